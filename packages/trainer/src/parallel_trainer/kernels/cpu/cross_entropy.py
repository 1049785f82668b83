"""The training loss: negative log likelihood of the labels, summed over the tokens that count."""

from __future__ import annotations

from typing import Any

import numpy as np
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
    def forward(ctx: Any, logits: Tensor, labels: np.ndarray, loss_mask: np.ndarray | None) -> Tensor:
        logits_rows = logits.asnumpy().reshape(-1, logits.shape[-1])
        label_of_row = np.asarray(labels).reshape(-1)
        weights = _checked_weights(label_of_row, loss_mask, logits_rows.shape[1])
        rows = np.flatnonzero(weights)
        columns = label_of_row[rows]

        shifted = logits_rows - logits_rows.max(axis=1, keepdims=True)
        label_logits = shifted[rows, columns].astype(np.float64)
        np.exp(shifted, out=shifted)
        sums = shifted.sum(axis=1)
        losses = np.log(sums[rows].astype(np.float64)) - label_logits
        loss = np.dot(losses, weights[rows])

        shifted *= (weights / sums).astype(shifted.dtype)[:, None]
        shifted[rows, columns] -= weights[rows].astype(shifted.dtype)
        ctx.d_logits = shifted.reshape(logits.shape)
        return Tensor.from_numpy(np.array(loss, logits_rows.dtype))

    @staticmethod
    def backward(ctx: Any, d_loss: Tensor) -> tuple[Tensor, None, None]:
        return Tensor.from_numpy(ctx.d_logits * d_loss.asnumpy()), None, None


def cross_entropy_sum(logits: Tensor, labels: np.ndarray, loss_mask: np.ndarray | None) -> Tensor:
    """See `Kernels.cross_entropy_sum`."""
    return _CrossEntropySum.apply(logits, labels, loss_mask)
