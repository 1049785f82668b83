"""The training loss: negative log likelihood of the labels, summed over the tokens that count.

The logits stay on the device, in float32. Three numbers a token come to the host, where ranks add them up and the loss
is summed in float64.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from device_mesh import Communicator, connect
from mindspore import Tensor, mint
from mindspore.common import _Function

from parallel_trainer.kernels.ascend.tensors import wide
from parallel_trainer.kernels.checks import labels_among


class _CrossEntropySum(_Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        labels: np.ndarray,
        loss_mask: np.ndarray | None,
        first: int,
        vocab_size: int,
        group: Communicator,
    ) -> Tensor:
        logits_NV = wide(logits).reshape(-1, logits.shape[-1])
        weights, columns, here = labels_among(
            labels, loss_mask, first=first, size=logits_NV.shape[1], vocab_size=vocab_size
        )
        columns = Tensor(np.where(here, columns, 0).astype(np.int64)[:, None])

        largest = group.all_reduce(mint.amax(logits_NV, -1).asnumpy(), "max")
        shifted = logits_NV - Tensor(largest[:, None])
        label_logits = np.where(here, mint.gather(shifted, 1, columns).asnumpy()[:, 0], 0)
        shifted = mint.exp(shifted)
        sums, label_logits = group.all_reduce(
            np.stack((mint.sum(shifted, -1).asnumpy(), label_logits), dtype=np.float64)
        )
        counted = np.flatnonzero(weights)
        loss = np.dot(np.log(sums[counted]) - label_logits[counted], weights[counted])

        d_logits = shifted * Tensor((weights / sums)[:, None]).astype(shifted.dtype)
        of_labels = Tensor((weights * here)[:, None]).astype(shifted.dtype)
        d_logits = mint.scatter(d_logits, 1, columns, mint.gather(d_logits, 1, columns) - of_labels)
        ctx.d_logits, ctx.dtype = d_logits.reshape(logits.shape), logits.dtype
        return Tensor(loss, shifted.dtype)

    @staticmethod
    def backward(ctx: Any, d_loss: Tensor) -> tuple[Tensor, None, None, None, None, None]:
        return (ctx.d_logits * d_loss).astype(ctx.dtype), None, None, None, None, None


def cross_entropy_sum(
    logits: Tensor,
    labels: np.ndarray,
    loss_mask: np.ndarray | None,
    *,
    first: int = 0,
    vocab_size: int | None = None,
    group: Communicator | None = None,
) -> Tensor:
    """See `Kernels.cross_entropy_sum`. The loss of logits in bfloat16 or float16 is float32."""
    size = logits.shape[-1] if vocab_size is None else vocab_size
    return _CrossEntropySum.apply(logits, labels, loss_mask, first, size, group or connect("single"))
