"""Attention from the compressed mask by the fused operator, which takes bfloat16 and float16 alone.

`mask_compression.ascend` prepares what the operator is told about the mask. Here tensors are brought into the form it
takes: keys in the order of their positions, heads of 16, 32, … dimensions, alike for queries, keys and values, and for
packed documents the tokens of all rows one after the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import numpy as np
from mask_compression import CompressedMask, Range
from mask_compression.ascend import KernelCall, compressed_attn_mask, kernel_calls
from mindspore import Tensor, mint

from parallel_trainer.kernels.ascend import operators
from parallel_trainer.kernels.ascend.tensors import half, take
from parallel_trainer.kernels.checks import check_heads, check_whole_rows

_HEAD_MULTIPLE = 16
_MOST_DOCUMENTS = 1024


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    mask: CompressedMask,
    *,
    query_ranges: Sequence[Range] | None = None,
    key_ranges: Sequence[Range] | None = None,
) -> Tensor:
    """See `Kernels.attention`. Keys have to be of whole rows, in any order (else ValueError): as after all exchanges
    of context parallelism but those of a ring.

    float32 tensors are rounded to bfloat16, and the result is float32 again.
    """
    check_heads(q.shape[2], k.shape[2])
    query_order, key_order = (held_order(ranges, mask.seq_length) for ranges in (query_ranges, key_ranges))
    check_whole_rows(len(key_order), mask.seq_length)
    size = operator_head_size(q.shape[3], v.shape[3])
    ordered_q = take(_widened(q, size), query_order)
    ordered_k, ordered_v = (take(_widened(x, size), key_order) for x in (k, v))
    parts, first = [], 0
    for call in kernel_calls(mask, query_ranges):
        tokens = call.queries[1] - call.queries[0]
        parts.append(_called(mint.narrow(ordered_q, 1, first, tokens), ordered_k, ordered_v, scale, call))
        first += tokens
    out = parts[0] if len(parts) == 1 else mint.cat(parts, 1)
    return take(mint.narrow(out, 3, 0, v.shape[3]).astype(q.dtype), np.argsort(query_order))


def held_order(ranges: Sequence[Range] | None, seq_length: int) -> np.ndarray:
    """Where a tensor that holds these positions has the first, the second, …: int (S,)."""
    pieces = [(0, seq_length)] if ranges is None else ranges
    return np.argsort(np.concatenate([np.arange(*piece) for piece in pieces]), kind="stable")


def operator_head_size(*sizes: int) -> int:
    """The dimensions that the operator gets for heads of these sizes: the smallest multiple of 16 that holds them."""
    return -(-max(sizes) // _HEAD_MULTIPLE) * _HEAD_MULTIPLE


def _widened(x: Tensor, size: int) -> Tensor:
    """x with zeros behind its last dimension up to this size, which change no score and no other value."""
    missing = size - x.shape[-1]
    return x if not missing else mint.cat((x, mint.zeros((*x.shape[:-1], missing), dtype=x.dtype)), -1)


def _called(q: Tensor, k: Tensor, v: Tensor, scale: float, call: KernelCall) -> Tensor:
    shape = q.shape
    tensors = [half(x) for x in (q, k, v)]
    if call.layout == "TND":
        _check_documents(len(call.arguments.actual_seq_qlen or ()))
        tensors = [x.reshape(-1, *x.shape[2:]) for x in tensors]
    out = operators.flash_attention_score(
        *tensors,
        shape[2],
        attn_mask=_blocked(),
        scalar_value=float(scale),
        input_layout=call.layout,
        **call.arguments.mindspore(),
    )
    return out.reshape(shape)


def _check_documents(documents: int) -> None:
    if documents > _MOST_DOCUMENTS:
        raise ValueError(
            f"attention: {documents} documents in one call; MindSpore documents at most {_MOST_DOCUMENTS} for packed "
            "tokens; use fewer rows of a batch (local_batch_size) or longer documents"
        )


@cache
def _blocked() -> Tensor:
    return Tensor(compressed_attn_mask())
