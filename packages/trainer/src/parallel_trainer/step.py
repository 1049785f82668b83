"""The one training step: count, forward, backward, finish, norm, clip, update."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from attrs import frozen
from device_mesh import Communicator
from mindspore import Tensor
from parallel_config.schema import Training

from parallel_trainer.batch import MicroBatch
from parallel_trainer.errors import UserError
from parallel_trainer.optim.adamw import AdamW
from parallel_trainer.optim.gradient_norm import clip_coefficient, global_norm
from parallel_trainer.parallel.fully_shard import ShardedWeights
from parallel_trainer.parallel.pipeline import Pipeline


@frozen
class StepResult:
    """What a step reports, the same on every rank.

    loss:         mean over the valid tokens of the global batch.
    grad_norm:    of the gradient of everything that is minimised, before clipping.
    valid_tokens: how many tokens the loss is the mean of.
    updated:      False where a non-finite step was skipped.
    mtp_loss:     mean loss of predicting one token further ahead, not multiplied by its weight; None without such.
    balance_loss: sequence auxiliary loss of all routers, with its coefficient; None for a model without experts.
    """

    loss: float
    grad_norm: float
    valid_tokens: int
    updated: bool
    mtp_loss: float | None = None
    balance_loss: float | None = None


def training_step(
    pipeline: Pipeline,
    weights: ShardedWeights,
    micro_batches: Sequence[MicroBatch],
    *,
    world: Communicator,
    loss_group: Communicator,
    optimizer: AdamW,
    lr: float,
    max_norm: float,
    loss_weights: Sequence[float] = (1.0,),
    skip_non_finite: bool = False,
) -> StepResult:
    """Train on one global batch.

    pipeline:      this rank's part of the model; `weights` are those of its chunks.
    micro_batches: this rank's part of the batch, the same on all ranks of the pipeline.
    world:         every rank; they hold the parts of the gradients.
    loss_group:    the ranks that hold different tokens of it (mesh axis `loss`).
    max_norm:      clip gradients to this norm; 0 or less: no clipping.
    loss_weights:  how much each of the model's losses counts, the first being the loss of the next token.
    skip_non_finite: leave the weights alone, instead of failing, where loss or norm is not finite.

    The gradient is that of the mean loss over the valid tokens of the global batch: each rank's loss is a sum over
    its tokens, seeded with 1/valid tokens, and the reductions add ranks and replicas up. Each of several losses is the
    mean over the tokens that are valid for it. The ranks' numbers of valid tokens may differ; where they are equal this
    is the specification's coefficient 1/(world_size // pp) on a mean of means.

    Raises UserError for a batch without a valid token and for a non-finite loss or norm; weights are then unchanged.
    """
    losses = len(loss_weights)
    counts = loss_group.all_reduce(np.sum([batch.counts(losses) for batch in micro_batches], axis=0))
    if not counts[0]:
        raise no_tokens()
    weights.gradients[...] = 0
    divisors = np.where(counts, counts, 1)  # of a loss without valid tokens, a sum of nothing
    seeds = np.array(loss_weights) * weights.divisor / divisors
    sums = pipeline.run(micro_batches, Tensor(seeds.astype(weights.values.dtype)))
    weights.finish_gradients()
    for chunk in pipeline.chunks:
        chunk.end_step()
    means = pipeline.group.all_reduce(loss_group.all_reduce(sums)) / divisors
    norm = global_norm(weights.norm_parts(), world)
    updated = bool(np.isfinite(means).all()) and math.isfinite(norm)
    if updated:
        weights.gradients *= clip_coefficient(norm, max_norm)
        optimizer.step(weights.gradients, lr=lr)
    elif not skip_non_finite:
        raise not_finite(means, norm, lr)
    return StepResult(float(means[0]), norm, int(counts[0]), updated, float(means[1]) if losses > 1 else None)


def skipped_in_a_row(before: int, training: Training, *, updated: bool) -> int:
    """How many steps have been skipped one after the other; `before` is that of the step before.

    Raises UserError for as many as the section's limit.
    """
    skipped = 0 if updated else before + 1
    if skipped >= training.max_consecutive_skipped_steps > 0:
        raise UserError(
            f"{skipped} steps in a row had a non-finite loss or gradient norm, and "
            f"training.max_consecutive_skipped_steps is {training.max_consecutive_skipped_steps}."
        )
    return skipped


def no_tokens() -> UserError:
    """Of a global batch without a valid token."""
    return UserError(
        "The global batch has no token to learn from: loss_mask is 0 everywhere. A step needs at least one; "
        "look at eod_mask_loss, pad and the documents' content."
    )


def not_finite(means: np.ndarray, norm: float, lr: float) -> UserError:
    """Of a step whose losses or gradient norm are not finite."""
    return UserError(
        f"The loss is {' and '.join(map(str, means))} and the gradient norm {norm}: training cannot go on, they "
        f"must be finite. The weights are those before this step (lr {lr:g}). Lower lr_scheduler.learning_rate, "
        "raise its warm-up, or set training.use_skip_step_on_nan: true to skip such steps."
    )
