"""The training loss: negative log likelihood of the labels, summed over the tokens that count."""

from __future__ import annotations

from typing import Any

import numpy as np
from device_mesh import Communicator, connect
from mindspore import Tensor
from mindspore.common import _Function

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
        logits_rows = logits.asnumpy().reshape(-1, logits.shape[-1])
        weights, columns, here = labels_among(
            labels, loss_mask, first=first, size=logits_rows.shape[1], vocab_size=vocab_size
        )
        rows = np.flatnonzero(here)
        columns = columns[rows]

        shifted = logits_rows - group.all_reduce(logits_rows.max(axis=1), "max")[:, None]
        label_logits = np.zeros(len(weights))
        label_logits[rows] = shifted[rows, columns]
        np.exp(shifted, out=shifted)
        sums, label_logits = group.all_reduce(np.stack((shifted.sum(axis=1, dtype=np.float64), label_logits)))
        counted = np.flatnonzero(weights)
        loss = np.dot(np.log(sums[counted]) - label_logits[counted], weights[counted])

        shifted *= (weights / sums).astype(shifted.dtype)[:, None]
        shifted[rows, columns] -= weights[rows].astype(shifted.dtype)
        ctx.d_logits = shifted.reshape(logits.shape)
        return Tensor.from_numpy(np.array(loss, logits_rows.dtype))

    @staticmethod
    def backward(ctx: Any, d_loss: Tensor) -> tuple[Tensor, None, None, None, None, None]:
        return Tensor.from_numpy(ctx.d_logits * d_loss.asnumpy()), None, None, None, None, None


def cross_entropy_sum(
    logits: Tensor,
    labels: np.ndarray,
    loss_mask: np.ndarray | None,
    *,
    first: int = 0,
    vocab_size: int | None = None,
    group: Communicator | None = None,
) -> Tensor:
    """See `Kernels.cross_entropy_sum`."""
    size = logits.shape[-1] if vocab_size is None else vocab_size
    return _CrossEntropySum.apply(logits, labels, loss_mask, first, size, group or connect("single"))
