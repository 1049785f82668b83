"""Attention under a compressed mask as a MindSpore function with a gradient, on CPU (extra `mindspore`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

try:
    from mindspore import Tensor
    from mindspore.common import _Function
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "mask_compression.mindspore needs MindSpore, which is not installed: pip install 'mask-compression[mindspore]'",
        name=error.name,
    ) from error

from mask_compression.attention import attention as numpy_attention
from mask_compression.attention_backward import attention_backward
from mask_compression.mask import CompressedMask, Range


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: CompressedMask,
    *,
    scale: float | None = None,
    query_ranges: Sequence[Range] | None = None,
    key_ranges: Sequence[Range] | None = None,
) -> Tensor:
    """`out` of `mask_compression.attention.attention`, which describes the arguments, for tensors in host memory.

    q (B, Sq, heads, D), k (B, Sk, kv_heads, D) and v (B, Sk, kv_heads, Dv) get gradients; they may be freed and filled
    again between forward and backward. Returns (B, Sq, heads, Dv), of the same dtype.

    Raises ValueError and TypeError as that function does; TypeError for bfloat16, which NumPy does not have.
    """
    return _Attention.apply(q, k, v, mask, scale, query_ranges, key_ranges)


class _Attention(_Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, mask: CompressedMask, *options: Any) -> Tensor:
        scale, query_ranges, key_ranges = options
        ctx.mask = mask
        ctx.options = {"scale": scale, "query_ranges": query_ranges, "key_ranges": key_ranges}
        ctx.out, ctx.lse = numpy_attention(q.asnumpy(), k.asnumpy(), v.asnumpy(), mask, **ctx.options)
        # Views of tensors would go stale when their memory is freed and given back, as FSDP and recomputation do.
        ctx.save_for_backward(q, k, v)
        return Tensor(ctx.out)

    @staticmethod
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v = (tensor.asnumpy() for tensor in ctx.saved_tensors)
        gradients = attention_backward(d_out.asnumpy(), q, k, v, ctx.out, ctx.lse, ctx.mask, **ctx.options)
        return *map(Tensor, gradients), None, None, None, None
