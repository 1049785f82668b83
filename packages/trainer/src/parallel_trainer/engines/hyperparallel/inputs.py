"""A micro-batch as named tensors, which HyperParallel's schedules cut by rows, and back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from mask_compression import from_ends
from mindspore import Tensor

from parallel_trainer.batch import MicroBatch

AHEAD = "ahead_"


def tensors(batches: Sequence[MicroBatch]) -> dict[str, Tensor]:
    """Micro-batches with labels as tensors by name, the rows of one after those of the other.

    `document_ends` are those of whole rows, counted from their first token and repeated up to the longest list.
    """
    width = max(int(np.bincount(batch.mask.document_rows).max()) for batch in batches)
    found = _columns(batches)
    found["position_ids"] = _stacked([batch.position_ids for batch in batches])
    found["document_ends"] = _stacked([batch.mask.padded_ends(width) for batch in batches])
    ahead = [batch.ahead for batch in batches if batch.ahead is not None]
    if ahead:
        found |= {f"{AHEAD}{name}": column for name, column in _columns(ahead).items()}
    return found


def _columns(batches: Sequence[MicroBatch]) -> dict[str, Tensor]:
    masks = [_mask(batch) for batch in batches]
    return {
        "input_ids": _stacked([batch.input_ids for batch in batches]),
        "labels": _stacked([_labels(batch) for batch in batches]),
        "loss_mask": _stacked(masks),
    }


def _labels(batch: MicroBatch) -> np.ndarray:
    assert batch.labels is not None, "what is trained on has labels"
    return batch.labels


def _mask(batch: MicroBatch) -> np.ndarray:
    return np.ones(batch.input_ids.shape, np.float32) if batch.loss_mask is None else batch.loss_mask


def _stacked(arrays: Sequence[np.ndarray]) -> Tensor:
    return Tensor(np.ascontiguousarray(np.concatenate(arrays)))


def micro_batch(
    input_ids: Any,
    position_ids: Any,
    labels: Any,
    loss_mask: Any,
    document_ends: Any,
    ahead: tuple[Any, Any, Any] | None = None,
) -> MicroBatch:
    """The micro-batch of rows of `tensors`; `ahead` are ids, labels and loss mask of its places one token further."""
    ends = document_ends.asnumpy()
    mask = from_ends(list(ends), int(ends[0, -1]))
    positions = position_ids.asnumpy()

    def rows(ids: Any, labels: Any, loss_mask: Any, ahead: MicroBatch | None = None) -> MicroBatch:
        return MicroBatch(ids.asnumpy(), positions, labels.asnumpy(), loss_mask.asnumpy(), mask, ahead)

    return rows(input_ids, labels, loss_mask, None if ahead is None else rows(*ahead))
