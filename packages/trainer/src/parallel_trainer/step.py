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

    loss:         mean over the valid tokens of the global batch; NaN, as are the other losses, where there is none.
    grad_norm:    of the gradient of everything that is minimised, before clipping; NaN where there is nothing to learn.
    valid_tokens: how many tokens the loss is the mean of.
    updated:      False where the step was skipped, because it was not finite or no token was valid.
    mtp_loss:     mean loss of predicting one token further ahead, not multiplied by its weight; None without such.
    balance_loss: auxiliary loss of all routers, with its coefficient; None for a model without experts.
    """

    loss: float
    grad_norm: float
    valid_tokens: int
    updated: bool
    mtp_loss: float | None = None
    balance_loss: float | None = None


@frozen(eq=False)
class ValidTokens:
    """The tokens of a global batch that count, by loss: what each of the losses is the mean over.

    counts: (losses,). Where the first is 0 all are, and there is nothing to learn from.
    """

    counts: np.ndarray

    @classmethod
    def of(cls, micro_batches: Sequence[MicroBatch], loss_group: Communicator, *, losses: int) -> ValidTokens:
        """Of all ranks of `loss_group`, which hold different tokens; other ranks hold the same, so all agree."""
        return cls(loss_group.all_reduce(np.sum([batch.counts(losses) for batch in micro_batches], axis=0)))

    @property
    def skipped(self) -> StepResult | None:
        """The result of a step without a valid token, in which nothing is computed or changed; None for any other."""
        if self.counts[0]:
            return None
        return StepResult(math.nan, math.nan, 0, False, math.nan if len(self.counts) > 1 else None)

    @property
    def divisors(self) -> np.ndarray:
        """What sums are divided by; 1 for a loss without valid tokens, a sum of nothing."""
        return np.where(self.counts, self.counts, 1)

    def result(
        self, sums: np.ndarray, norm: float, *, lr: float, max_norm: float, dtype: np.dtype, skip_non_finite: bool
    ) -> StepResult:
        """Of a step with these sums of losses over the global batch, (losses,), before anything is updated.

        max_norm: what gradients are clipped to.
        dtype:    of the optimizer's moments, one of which adds up squares of gradients.

        Raises UserError for a loss or norm that is not finite, or a norm too large to be squared, unless such steps are
        skipped.
        """
        means = sums / self.divisors
        fault = _fault(means, norm, norm * clip_coefficient(norm, max_norm), dtype)
        if fault and not skip_non_finite:
            raise UserError(
                f"{fault}: training cannot go on. The weights are those before this step (lr {lr:g}). Lower "
                "lr_scheduler.learning_rate, raise its warm-up, or set training.use_skip_step_on_nan: true to skip "
                "such steps."
            )
        updated = fault is None
        return StepResult(
            float(means[0]), norm, int(self.counts[0]), updated, float(means[1]) if len(means) > 1 else None
        )


def _fault(means: np.ndarray, norm: float, clipped: float, dtype: np.dtype) -> str | None:
    """What keeps a step with these losses and gradient norm, before and after clipping, from being made."""
    if not (np.isfinite(means).all() and math.isfinite(norm)):
        return f"The loss is {' and '.join(map(str, means))} and the gradient norm {norm}, and both must be finite"
    most = math.sqrt(np.finfo(dtype).max) / 2
    if clipped > most:
        return f"The gradient norm is {clipped:g} after clipping, and {dtype} holds squares of up to {most:.2g}"
    return None


def check_update(finite: bool, world: Communicator, *, lr: float) -> None:
    """Raise UserError, on all ranks, where an update left one of them with weights that are not finite.

    Before anything else is done with them: they are changed in place, so what they were is gone. Collective.
    """
    if world.all_reduce(np.array([finite], np.int64), "min")[0]:
        return
    raise UserError(
        f"The update of this step (lr {lr:g}) made weights that are not finite, though its loss and gradient norm were:"
        " training cannot go on, and nothing is saved of them. lr_scheduler.learning_rate or optimizer.weight_decay is "
        "far too large: lower it, and begin anew or go on from the last checkpoint. training.use_skip_step_on_nan "
        "cannot help: weights are changed in place, and those of before this step are lost."
    )


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

    A batch without a valid token is skipped: nothing is computed, and nothing changes.
    Raises UserError for a loss or norm that is not finite, weights are then unchanged; and for an update that made
    weights that are not.
    """
    tokens = ValidTokens.of(micro_batches, loss_group, losses=len(loss_weights))
    if tokens.skipped:
        return tokens.skipped
    weights.gradients[...] = 0
    seeds = np.array(loss_weights) * weights.divisor / tokens.divisors
    sums = pipeline.run(micro_batches, Tensor(seeds.astype(weights.values.dtype)))
    weights.finish_gradients()
    for chunk in pipeline.chunks:
        chunk.end_step()
    summed = pipeline.group.all_reduce(loss_group.all_reduce(sums))
    norm = global_norm(weights.norm_parts(), world)
    result = tokens.result(
        summed, norm, lr=lr, max_norm=max_norm, dtype=weights.values.dtype, skip_non_finite=skip_non_finite
    )
    if result.updated:
        weights.gradients *= clip_coefficient(norm, max_norm)
        check_update(optimizer.step(weights.gradients, lr=lr), world, lr=lr)
    return result


def skipped_in_a_row(before: int, training: Training, *, updated: bool) -> int:
    """How many steps have been skipped one after the other; `before` is that of the step before.

    Raises UserError for as many as the section's limit.
    """
    skipped = 0 if updated else before + 1
    if skipped >= training.max_consecutive_skipped_steps > 0:
        raise UserError(
            f"{skipped} steps in a row were skipped, because loss or gradient norm were not finite or no token was "
            f"valid, and training.max_consecutive_skipped_steps is {training.max_consecutive_skipped_steps}."
        )
    return skipped
