"""Evaluation: the loss of held-out samples, by forward passes alone."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from itertools import islice

import numpy as np
from attrs import frozen
from device_mesh import Communicator

from parallel_trainer.batch import MicroBatch
from parallel_trainer.errors import UserError
from parallel_trainer.parallel.pipeline import Pipeline


@frozen
class EvaluationResult:
    """What an evaluation found, the same on every rank.

    loss:         mean over the valid tokens of all samples.
    valid_tokens: how many tokens that is the mean of.
    mtp_loss:     mean loss of predicting one token further ahead; None for a model without such.
    """

    loss: float
    valid_tokens: int
    mtp_loss: float | None = None

    @property
    def perplexity(self) -> float:
        """exp(loss), inf where that is beyond a float."""
        try:
            return math.exp(self.loss)
        except OverflowError:
            return math.inf


def evaluate(
    pipeline: Pipeline,
    micro_batches: Iterable[MicroBatch],
    *,
    together: int,
    loss_group: Communicator,
    losses: int = 1,
) -> EvaluationResult:
    """The mean loss over the valid tokens of all ranks' micro-batches. Nothing that training uses changes.

    pipeline:      this rank's part of the model.
    micro_batches: this rank's part of the samples: equally many on all ranks, and the same on all of the pipeline.
    together:      how many of them pass the pipeline in one schedule; so many are in memory at a time.
    loss_group:    the ranks that hold different tokens (mesh axis `loss`).
    losses:        how many the model has, the first being that of the next token.

    Raises UserError where no token counts. Collective over the pipeline's ranks and those of `loss_group`.
    """
    sums, counts = np.zeros(losses), np.zeros(losses)
    for batches in _in_groups(micro_batches, together):
        counts += np.sum([batch.counts(losses) for batch in batches], axis=0)
        sums += pipeline.loss_sums(batches, losses)
    counts = loss_group.all_reduce(counts)
    sums = pipeline.group.all_reduce(loss_group.all_reduce(sums))
    if not counts[0]:
        raise UserError(
            "The samples of eval_dataset have no token whose prediction counts: loss_mask is 0 everywhere. An "
            "evaluation needs at least one; look at eod_mask_loss, pad and the documents' content."
        )
    means = sums / np.where(counts, counts, 1)
    return EvaluationResult(float(means[0]), int(counts[0]), float(means[1]) if losses > 1 else None)


def _in_groups(batches: Iterable[MicroBatch], size: int) -> Iterator[list[MicroBatch]]:
    left = iter(batches)
    while group := list(islice(left, size)):
        yield group
