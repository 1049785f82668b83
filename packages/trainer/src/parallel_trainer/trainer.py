"""A run on this rank: everything a configuration asks for, put together, and stepped."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import numpy as np
from attrs import evolve
from device_mesh import AxisCommunicators, Communicator, ParallelMesh, Traffic

from parallel_trainer.batch import MicroBatch
from parallel_trainer.device import start_mindspore
from parallel_trainer.errors import UserError
from parallel_trainer.evaluation import EvaluationResult, evaluate
from parallel_trainer.job import Job
from parallel_trainer.kernels import kernels
from parallel_trainer.models import build_model
from parallel_trainer.optim.adamw import AdamW
from parallel_trainer.optim.decay import decaying
from parallel_trainer.parallel.chunk import Chunk
from parallel_trainer.parallel.context_parallel import build_attention, own_tokens
from parallel_trainer.parallel.dtypes import DTYPES
from parallel_trainer.parallel.expert_parallel import build_expert_parallel, update_biases
from parallel_trainer.parallel.fully_shard import ShardedWeights, averaging_divisor
from parallel_trainer.parallel.pipeline import Order, Pipeline, model_layout, stage_units, unit_names
from parallel_trainer.parallel.routing_record import ExpertLoads, RoutingRecord
from parallel_trainer.parallel.sequence import shards
from parallel_trainer.parallel.tensor_parallel import TensorParallel
from parallel_trainer.step import StepResult, skipped_in_a_row, training_step


class Trainer:
    """Trains the model of a `Job` on one rank of its world.

    job:          what to run, from `prepare`.
    communicator: the world, of `job.plan.world_size` ranks.
    traffic:      writes down what is communicated, by mesh axis and by unit; nothing does if left out.

    `loads` is what routers did in the last step, None where they did nothing; `step` and `consumed` are the steps
    and samples trained on; `layout` says which rank holds which part of the model.

    >>> trainer = Trainer(job, connect("mpi"))          # doctest: +SKIP
    >>> result = trainer.train_step()                   # doctest: +SKIP
    """

    def __init__(self, job: Job, communicator: Communicator, *, traffic: Traffic | None = None) -> None:
        if communicator.size != job.plan.world_size:
            raise UserError(
                f"The plan is for a world of {job.plan.world_size} ranks, and {communicator.size} were started."
            )
        kernel_set = kernels(job.device)
        start_mindspore(job.device)
        config, plan, precision = job.config, job.plan, job.precision
        self.job = job
        self.step = self.consumed = self.skipped = 0
        self.loads: ExpertLoads | None = None
        self.mesh = ParallelMesh(plan)
        self.groups = AxisCommunicators(self.mesh, communicator, traffic)
        cp_group = self.groups["cp"]
        average = not config.parallelism.disable_gradient_division
        routing = job.model.routing
        self.expert_parallel = build_expert_parallel(
            kernel_set,
            plan,
            job.model,
            self.groups,
            RoutingRecord(job.model.expert_layers, routing.experts if routing else 0),
            npus=config.parallelism.npu_nums_per_device,
            divisor=averaging_divisor(self.groups) if average else 1,
        )
        model = build_model(
            config.model,
            kernel_set,
            attention=build_attention(kernel_set, plan, job.seq_length, cp_group),
            tp=TensorParallel(kernel_set, self.groups["tp"], loss_parallel=config.parallelism.enable_loss_parallel),
            ep=self.expert_parallel,
            initial_weights=config.extensions.initial_weights,
        )
        self.model = model
        stages = stage_units(model.units, plan.stage_layers)
        self.layout = model_layout(model, plan)
        pp_group = self.groups["pp"]
        names = stage_units(unit_names(len(model.units)), plan.stage_layers)
        held = [stage for stage, rank in enumerate(plan.stage_ranks) if rank == pp_group.rank]
        self.weights = ShardedWeights(
            (weight for stage in held for unit in stages[stage] for weight in unit.weights),
            communicators=self.groups,
            dtype=DTYPES[precision.reduce_dtype],
            param_dtype=DTYPES[precision.param_dtype],
            on_host=job.device == "cpu",
            seed=config.training.seed,
            sharers=_sharers(self.layout.stages, pp_group),
            average=average,
        )
        self.biases = {
            layer: self.weights[weight.name]
            for layer, weight in model.expert_biases.items()
            if weight.name in self.weights
        }
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
            decay=_decay_mask(self.weights, decaying(model.weights, config.optimizer)),
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
            self.micro_batches(self.consumed),
            world=self.groups["world"],
            loss_group=self.groups["loss"],
            optimizer=self.optimizer,
            lr=self.lr,
            max_norm=training.max_norm,
            loss_weights=self.model.loss_weights,
            skip_non_finite=training.use_skip_step_on_nan,
        )
        self.loads = None
        if self.job.model.expert_layers and result.valid_tokens:
            self.loads = self.expert_parallel.record.collect(self.groups["world"])
            result = evolve(result, balance_loss=self.loads.balance_loss)
            if result.updated:
                update_biases(self.biases, self.loads, self.model.bias_update_rate)
        elif self.job.model.expert_layers:
            result = evolve(result, balance_loss=math.nan)
        self.step += 1
        self.consumed += self.job.plan.global_batch_size
        self.skipped = skipped_in_a_row(self.skipped, training, updated=result.updated)
        return result

    def evaluate(self) -> EvaluationResult:
        """The loss of the samples held out, with the weights as they are; training goes on as if it had not been.

        Collective over the world. Raises UserError as `evaluation.evaluate` does, and for a file without eval_dataset.
        """
        if self.job.held_out is None:
            raise UserError("The file has no eval_dataset, so there is nothing to evaluate: add the section.")
        plan = self.job.plan
        shard = self.mesh.shard_index(self.groups["world"].rank)
        batches = self.job.held_out.micro_batches(plan.local_batch_size, plan.data_parallel, shard)
        result = evaluate(
            self.pipeline,
            own_tokens(batches, self.shard, len(self.model.losses)),
            together=plan.num_accumulation_steps,
            loss_group=self.groups["loss"],
            losses=len(self.model.losses),
        )
        self.expert_parallel.record.clear()
        return result

    def micro_batches(self, consumed: int) -> list[MicroBatch]:
        """What this rank trains on in the step after `consumed` samples: its rows, and its part of their tokens."""
        return list(own_tokens(self.loader.micro_batches(consumed), self.shard, len(self.model.losses)))

    @property
    def held(self) -> int:
        """How many parameters this rank holds between steps."""
        return self.weights.values.size

    @property
    def lr(self) -> float:
        """The learning rate that the next step applies."""
        return self.job.schedule(self.step)

    def full_values(self) -> Iterator[tuple[str, np.ndarray]]:
        """Name and full value of every weight, one at a time. Collective over the world."""
        pp_group = self.groups["pp"]
        for weight in self.model.weights:
            owner = self.layout.stages[weight.name][0]
            if pp_group.rank == owner:
                value = self.weights.full_value(weight.name)
            else:
                value = np.empty(weight.shape, self.weights.values.dtype)
            yield weight.name, pp_group.broadcast(value, owner)


def _sharers(weight_ranks: Mapping[str, tuple[int, ...]], group: Communicator) -> dict[str, Communicator]:
    """The pipeline ranks that hold the same weight, for each that this rank shares (a tied head)."""
    return {
        name: group.subgroup(sorted(ranks))
        for name, ranks in weight_ranks.items()
        if len(ranks) > 1 and group.rank in ranks
    }


def _decay_mask(weights: ShardedWeights, decays: Mapping[str, bool]) -> np.ndarray:
    mask = np.empty(weights.trainable_size, np.bool_)
    for sharded in weights.trainable:
        mask[sharded.slice] = decays[sharded.weight.name]
    return mask
