"""A run on this rank: everything a configuration asks for, put together, and stepped."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import mindspore as ms
import numpy as np
from device_mesh import AxisCommunicators, Communicator, ParallelMesh, Traffic
from parallel_config.schema import Optimizer

from parallel_trainer.batch import MicroBatch
from parallel_trainer.errors import UserError
from parallel_trainer.job import Job
from parallel_trainer.kernels import kernels
from parallel_trainer.models import build_model
from parallel_trainer.optim.adamw import AdamW
from parallel_trainer.optim.decay import decays
from parallel_trainer.parallel.chunk import Chunk
from parallel_trainer.parallel.context_parallel import build_attention, cut
from parallel_trainer.parallel.fully_shard import ShardedWeights
from parallel_trainer.parallel.pipeline import Order, Pipeline, stage_units, unit_names, weight_ranks
from parallel_trainer.parallel.sequence import shards
from parallel_trainer.parallel.tensor_parallel import TensorParallel
from parallel_trainer.step import StepResult, training_step


class Trainer:
    """Trains the model of a `Job` on one rank of its world.

    job:          what to run, from `prepare`.
    communicator: the world, of `job.plan.world_size` ranks.
    traffic:      writes down what is communicated, by mesh axis and by unit; nothing does if left out.

    >>> trainer = Trainer(job, connect("mpi"))          # doctest: +SKIP
    >>> result = trainer.train_step()                   # doctest: +SKIP
    """

    def __init__(self, job: Job, communicator: Communicator, *, traffic: Traffic | None = None) -> None:
        if communicator.size != job.plan.world_size:
            raise UserError(
                f"The plan is for a world of {job.plan.world_size} ranks, and {communicator.size} were started."
            )
        _start_mindspore()
        config, plan = job.config, job.plan
        self.job = job
        self.step = 0
        self.skipped = 0
        self.mesh = ParallelMesh(plan)
        self.groups = AxisCommunicators(self.mesh, communicator, traffic)
        cpu = kernels("cpu")
        cp_group = self.groups["cp"]
        model = build_model(
            config.model,
            cpu,
            attention=build_attention(cpu, plan, job.seq_length, cp_group),
            tp=TensorParallel(cpu, self.groups["tp"], loss_parallel=config.parallelism.enable_loss_parallel),
        )
        self.model_weights = model.weights
        stages = stage_units(model.units, plan.stage_layers)
        self.weight_ranks = weight_ranks(stages, plan.stage_ranks)
        pp_group = self.groups["pp"]
        names = stage_units(unit_names(len(model.units)), plan.stage_layers)
        held = [stage for stage, rank in enumerate(plan.stage_ranks) if rank == pp_group.rank]
        self.weights = ShardedWeights(
            (weight for stage in held for unit in stages[stage] for weight in unit.weights),
            communicators=self.groups,
            dtype=job.dtype,
            seed=config.training.seed,
            sharers=_sharers(self.weight_ranks, pp_group),
            average=not config.parallelism.disable_gradient_division,
        )
        self.pipeline = Pipeline(
            [
                Chunk(
                    stages[stage],
                    self.weights,
                    reshard_after_forward=plan.reshard_after_forward,
                    names=names[stage],
                    traffic=traffic,
                )
                for stage in held
            ],
            pp_group,
            width=model.config.hidden_size,
            token_ranks=plan.tp,
            order=Order.of(config.parallelism),
        )
        beta1, beta2 = config.optimizer.betas
        self.optimizer = AdamW(
            self.weights.values[: self.weights.trainable_size],
            decay=_decay_mask(self.weights, config.optimizer),
            betas=(beta1, beta2),
            eps=config.optimizer.eps,
            weight_decay=config.optimizer.weight_decay,
        )
        self.shard = shards(plan, job.seq_length)[cp_group.rank]
        self.loader = job.loader(self.mesh.shard_index(communicator.rank))

    def train_step(self) -> StepResult:
        """Train on the next global batch. Collective over the world. Raises UserError as `training_step` does."""
        training = self.job.config.training
        result = training_step(
            self.pipeline,
            self.weights,
            self.micro_batches(self.step),
            world=self.groups["world"],
            loss_group=self.groups["loss"],
            optimizer=self.optimizer,
            lr=self.lr,
            max_norm=training.max_norm,
            skip_non_finite=training.use_skip_step_on_nan,
        )
        self.step += 1
        self.skipped = 0 if result.updated else self.skipped + 1
        if self.skipped >= training.max_consecutive_skipped_steps > 0:
            raise UserError(
                f"{self.skipped} steps in a row had a non-finite loss or gradient norm, and "
                f"training.max_consecutive_skipped_steps is {training.max_consecutive_skipped_steps}."
            )
        return result

    def micro_batches(self, step: int) -> list[MicroBatch]:
        """What this rank trains on in a step: its rows, and its part of their tokens."""
        return [cut(batch, self.shard) for batch in self.loader.micro_batches(step)]

    @property
    def lr(self) -> float:
        """The learning rate that the next step applies."""
        return self.job.schedule(self.step)

    def full_values(self) -> Iterator[tuple[str, np.ndarray]]:
        """Name and full value of every weight, one at a time. Collective over the world."""
        pp_group = self.groups["pp"]
        for weight in self.model_weights:
            owner = self.weight_ranks[weight.name][0]
            if pp_group.rank == owner:
                value = self.weights.full_value(weight.name)
            else:
                value = np.empty(weight.shape, self.job.dtype)
            yield weight.name, pp_group.broadcast(value, owner)


def _sharers(weight_ranks: Mapping[str, tuple[int, ...]], group: Communicator) -> dict[str, Communicator]:
    """The pipeline ranks that hold the same weight, for each that this rank shares (a tied head)."""
    return {
        name: group.subgroup(sorted(ranks))
        for name, ranks in weight_ranks.items()
        if len(ranks) > 1 and group.rank in ranks
    }


def _start_mindspore() -> None:
    ms.set_device("CPU")
    ms.set_context(mode=ms.PYNATIVE_MODE)
    # Kernels are NumPy and wait for their inputs: handing operators to MindSpore's own threads only adds waiting,
    # half of a small model's step on one rank and more where ranks share cores.
    ms.runtime.launch_blocking()


def _decay_mask(weights: ShardedWeights, section: Optimizer) -> np.ndarray:
    mask = np.empty(weights.trainable_size, np.bool_)
    for sharded in weights.trainable:
        mask[sharded.slice] = decays(
            sharded.weight, include=section.weight_decay_include, exclude=section.weight_decay_exclude
        )
    return mask
