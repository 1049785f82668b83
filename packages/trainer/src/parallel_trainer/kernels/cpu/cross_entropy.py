"""The training loss: negative log likelihood of the labels, summed over the tokens that count."""

from __future__ import annotations

from typing import Any

import numpy as np
from device_mesh import Communicator, connect
from mindspore import Tensor
from mindspore.common import _Function

from parallel_trainer.batch import IGNORED_LABEL, token_weights


def _checked_weights(labels: np.ndarray, loss_mask: np.ndarray | None, vocab_size: int) -> np.ndarray:
    """How much the loss of each token counts, float64 (N,). Raises ValueError for a label of no token."""
    weights = token_weights(labels, loss_mask)
    wrong = labels[(weights != 0) & ((labels < 0) | (labels >= vocab_size))]
    if wrong.size:
        raise ValueError(
            f"cross_entropy_sum: {wrong.size} of {labels.size} labels are outside the vocabulary, the first "
            f"is {wrong[0]}; a label that counts has to be 0 to {vocab_size - 1} for vocab_size "
            f"{vocab_size}; use {IGNORED_LABEL} or a loss_mask of 0 for tokens that do not count"
        )
    return weights


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
        label_of_row = np.asarray(labels).reshape(-1)
        weights = _checked_weights(label_of_row, loss_mask, vocab_size)
        columns = label_of_row - first
        # Rows that count and whose label is among these columns.
        rows = np.flatnonzero((weights != 0) & (columns >= 0) & (columns < logits_rows.shape[1]))
        columns = columns[rows]

        shifted = logits_rows - group.all_reduce(logits_rows.max(axis=1), "max")[:, None]
        label_logits = np.zeros(len(label_of_row))
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
