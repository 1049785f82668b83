"""The one training step: count, forward, backward, finish, norm, clip, update."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from attrs import frozen
from device_mesh import Communicator
from mindspore import Tensor

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
    grad_norm:    of the gradient of that loss, before clipping.
    valid_tokens: how many tokens the loss is the mean of.
    updated:      False where a non-finite step was skipped.
    """

    loss: float
    grad_norm: float
    valid_tokens: int
    updated: bool


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
    skip_non_finite: bool = False,
) -> StepResult:
    """Train on one global batch.

    pipeline:      this rank's part of the model; `weights` are those of its chunks.
    micro_batches: this rank's part of the batch, the same on all ranks of the pipeline.
    world:         every rank; they hold the parts of the gradients.
    loss_group:    the ranks that hold different tokens of it (mesh axis `loss`).
    max_norm:      clip gradients to this norm; 0 or less: no clipping.
    skip_non_finite: leave the weights alone, instead of failing, where loss or norm is not finite.

    The gradient is that of the mean loss over the valid tokens of the global batch: each rank's loss is a sum over
    its tokens, seeded with 1/valid tokens, and the reductions add ranks and replicas up. The ranks'
    numbers of valid tokens may differ; where they are equal this is the specification's coefficient
    1/(world_size // pp) on a mean of means.

    Raises UserError for a batch without a valid token and for a non-finite loss or norm; weights are then unchanged.
    """
    valid_tokens = _total(loss_group, sum(batch.valid_tokens() for batch in micro_batches))
    if not valid_tokens:
        raise UserError(
            "The global batch has no token to learn from: loss_mask is 0 everywhere. A step needs at least one; "
            "look at eod_mask_loss, pad and the documents' content."
        )
    weights.gradients[...] = 0
    seed = Tensor(np.asarray(weights.divisor / valid_tokens, weights.values.dtype))
    loss_sum = pipeline.run(micro_batches, seed)
    weights.finish_gradients()
    for chunk in pipeline.chunks:
        chunk.end_step()
    loss_mean = _total(pipeline.group, _total(loss_group, loss_sum)) / valid_tokens
    norm = global_norm(weights.norm_parts(), world)
    updated = math.isfinite(loss_mean) and math.isfinite(norm)
    if updated:
        weights.gradients *= clip_coefficient(norm, max_norm)
        optimizer.step(weights.gradients, lr=lr)
    elif not skip_non_finite:
        raise UserError(
            f"The loss is {loss_mean} and the gradient norm {norm}: training cannot go on, both must be finite. "
            f"The weights are those before this step (lr {lr:g}). Lower lr_scheduler.learning_rate, raise its warm-up, "
            "or set training.use_skip_step_on_nan: true to skip such steps."
        )
    return StepResult(loss_mean, norm, int(valid_tokens), updated)


def _total(group: Communicator, value: float) -> float:
    return float(group.all_reduce(np.array([value]))[0])
