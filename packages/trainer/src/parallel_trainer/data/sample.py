"""What a model gets to read and predict: one sample, and samples as the rows of a micro-batch."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from attrs import frozen

from parallel_trainer.batch import MicroBatch
from parallel_trainer.data.settings import SampleSettings


@frozen(eq=False)
class Sample:
    """input_ids, labels, position_ids int32 (S,); loss_mask float32 (S,), 1 where the label counts."""

    input_ids: np.ndarray
    labels: np.ndarray
    loss_mask: np.ndarray
    position_ids: np.ndarray


def make_sample(tokens: np.ndarray, settings: SampleSettings) -> Sample:
    """The sample of `tokens`, integers (S + 1,) or, without the extra token, (S,).

    Labels are the tokens one place further, taken before anything is cut over ranks. A label that is `pad`
    does not count. Places that hold `pad` become 0 at the end, an id that every model has.
    """
    tokens = tokens.astype(np.int32)
    if settings.extra_token:
        inputs, labels = tokens[:-1].copy(), tokens[1:].copy()
    else:
        inputs, labels = tokens.copy(), np.append(tokens[1:], np.int32(settings.pad))
    ends = inputs == settings.eod
    loss_mask = (labels != settings.pad).astype(np.float32)
    if settings.eod_mask_loss:
        loss_mask[ends] = 0
    positions = restarting_positions(ends) if settings.reset_position_ids else np.arange(len(inputs))
    inputs[inputs == settings.pad] = 0
    labels[labels == settings.pad] = 0
    return Sample(inputs, labels, loss_mask, positions.astype(np.int32))


def restarting_positions(ends: np.ndarray) -> np.ndarray:
    """Positions (S,) that start again at 0 after each place where `ends`, bool (S,), is true."""
    places = np.arange(len(ends))
    starts = np.zeros(len(ends), dtype=places.dtype)
    starts[1:] = np.where(ends[:-1], places[1:], 0)
    return places - np.maximum.accumulate(starts)


def stack(samples: Sequence[Sample]) -> MicroBatch:
    """Samples as the rows of one batch."""
    return MicroBatch(
        input_ids=np.stack([sample.input_ids for sample in samples]),
        labels=np.stack([sample.labels for sample in samples]),
        loss_mask=np.stack([sample.loss_mask for sample in samples]),
        position_ids=np.stack([sample.position_ids for sample in samples]),
    )
