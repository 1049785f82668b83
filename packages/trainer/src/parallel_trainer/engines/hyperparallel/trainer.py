"""A run on this rank whose training steps are HyperParallel's calls; the counterpart of `parallel_trainer.trainer`."""

from __future__ import annotations

import math
from collections.abc import Iterator

import mindspore as ms
import numpy as np
from attrs import evolve
from device_mesh import AxisCommunicators, Communicator, ParallelMesh
from mindspore import Tensor

from parallel_trainer.batch import MicroBatch
from parallel_trainer.device import start_mindspore
from parallel_trainer.engines.hyperparallel.execute import Execution
from parallel_trainer.engines.hyperparallel.inputs import tensors
from parallel_trainer.engines.hyperparallel.layer import Positions
from parallel_trainer.engines.hyperparallel.model import Chunk
from parallel_trainer.engines.hyperparallel.modules import local
from parallel_trainer.engines.hyperparallel.optimizer import AdamW
from parallel_trainer.engines.hyperparallel.program import program
from parallel_trainer.engines.hyperparallel.routing import ForwardRecord
from parallel_trainer.engines.hyperparallel.runtime import move_to, named_parameters
from parallel_trainer.job import Job, in_one_type
from parallel_trainer.kernels import kernels
from parallel_trainer.models import build_model
from parallel_trainer.optim.decay import decaying
from parallel_trainer.parallel.context_parallel import own_tokens
from parallel_trainer.parallel.expert_parallel import bias_change, build_expert_parallel
from parallel_trainer.parallel.pipeline import stage_units
from parallel_trainer.parallel.routing_record import ExpertLoads
from parallel_trainer.parallel.sequence import attention_blocks, shards
from parallel_trainer.parallel.weights import Weight, initial_values
from parallel_trainer.step import StepResult, ValidTokens, check_update, skipped_in_a_row


class HyperParallelTrainer:
    """Trains the model of a `Job` with HyperParallel on one rank of its world; used as `Trainer` is.

    Weights start as they do there. Every rank makes all of its chunks' weights first; HyperParallel cuts them.

    job: from `prepare` with this engine, which says all that keeps it from training the file.

    Raises UserError where HyperParallel is missing or cannot be given this file.
    """

    def __init__(self, job: Job, communicator: Communicator) -> None:
        made = program(in_one_type(job.config, job.precision), job.plan.world_size, communicator.rank)
        kernel_set = kernels(job.device)
        start_mindspore(job.device)
        config, plan = job.config, job.plan
        self.job = job
        self.step = self.consumed = self.skipped = 0
        self.loads: ExpertLoads | None = None
        self.mesh = ParallelMesh(plan)
        self.groups = AxisCommunicators(self.mesh, communicator)
        routing, cp_rank = job.model.routing, self.groups["cp"].rank
        self._record = ForwardRecord(job.model.expert_layers, routing.experts if routing else 0)
        npus = config.parallelism.npu_nums_per_device
        ep = build_expert_parallel(kernel_set, plan, job.model, self.groups, self._record, npus=npus)
        self.model = build_model(config.model, kernel_set, ep=ep, initial_weights=config.extensions.initial_weights)
        stages = stage_units(self.model.units, plan.stage_layers)
        positions = Positions()
        if plan.cp > 1:
            positions = Positions.of(attention_blocks(plan, job.seq_length), cp_rank // plan.ulysses_degree)
        self.chunks = [
            Chunk(self.model, stages[stage], self._initial, kernel_set, positions, self._record, self.groups["tp"])
            for stage in made.chunks
        ]
        if job.device == "ascend":
            move_to("Ascend", self.chunks)
        self._shard = shards(plan, job.seq_length)[cp_rank]
        self._loader = job.loader(self.mesh.shard_index(communicator.rank))
        section = config.optimizer
        beta1, beta2 = section.betas
        self._optimizer = AdamW(
            self.chunks,
            decaying(self.model.weights, section),
            betas=(beta1, beta2),
            eps=section.eps,
            weight_decay=section.weight_decay,
        )
        self._inputs: list[dict[str, Tensor]] = []
        self._tokens: ValidTokens | None = None
        self._result: StepResult | None = None
        variables = {"batches": self._next_inputs(), "optimizer": _Update(self)}
        self._execution = Execution(made, self.chunks, variables)
        self._execution.set_up()

    def _initial(self, weight: Weight) -> Tensor:
        return Tensor(initial_values(weight, seed=self.job.config.training.seed).astype(self.job.dtype))

    def _next_inputs(self) -> Iterator[dict[str, Tensor]]:
        while True:
            yield self._inputs.pop(0)

    def train_step(self) -> StepResult:
        """Train on the next global batch. Collective over the world. Raises UserError as `training_step` does."""
        batches = list(own_tokens(self._loader.micro_batches(self.consumed), self._shard, len(self.model.losses)))
        self._tokens = ValidTokens.of(batches, self.groups["loss"], losses=len(self.model.losses))
        self._result = self._tokens.skipped
        if self._result is None:
            self._start_step(batches, self._tokens)
            self._execution.step()
        result = self._result
        assert result is not None, "the program's last phase calls the optimizer"
        self.loads = None
        if self.job.model.expert_layers and result.valid_tokens:
            self.loads = self._record.collect(self.groups["world"])
            result = evolve(result, balance_loss=self.loads.balance_loss)
            if result.updated:
                self._update_biases(self.loads)
        elif self.job.model.expert_layers:
            result = evolve(result, balance_loss=math.nan)
        self.step += 1
        self.consumed += self.job.plan.global_batch_size
        self.skipped = skipped_in_a_row(self.skipped, self.job.config.training, updated=result.updated)
        return result

    def _start_step(self, batches: list[MicroBatch], tokens: ValidTokens) -> None:
        """Make inputs of the micro-batches, and say what their losses are multiplied by.

        A loss that is the mean over the tokens of the global batch is, for HyperParallel, which multiplies by
        1/(world_size // pp)/micro-batches and adds up, a sum times what makes up for that. Tensor-parallel ranks, which
        each have the same loss, are among those that it divides by.
        """
        loss_group = self.groups["loss"]
        factors = np.array(self.model.loss_weights) * loss_group.size * len(batches) / tokens.divisors
        for chunk in self.chunks:
            chunk.start_step(factors.tolist())
        together = [batches] if self.job.plan.pp > 1 else [[batch] for batch in batches]
        self._inputs = [tensors(rows) for rows in together]

    def _finish_step(self, norm: float) -> None:
        sums = np.sum([chunk.sums for chunk in self.chunks], axis=0)
        summed = self.groups["pp"].all_reduce(self.groups["loss"].all_reduce(sums))
        training, lr = self.job.config.training, self.lr
        assert self._tokens is not None, "a step begins by counting them"
        self._result = self._tokens.result(
            summed,
            norm,
            lr=lr,
            max_norm=training.max_norm,
            dtype=self.job.dtype,
            skip_non_finite=training.use_skip_step_on_nan,
        )
        if self._result.updated:
            check_update(self._optimizer.step(lr), self.groups["world"], lr=lr)

    def _update_biases(self, loads: ExpertLoads) -> None:
        """Move each router's bias as `expert_parallel.update_biases` does; every rank has all of them."""
        layers = {weight.name: layer for layer, weight in self.model.expert_biases.items()}
        for name, parameter in named_parameters(self.chunks):
            if name in layers:
                bias = local(parameter)
                values = bias.asnumpy()
                moved = values + bias_change(loads, layers[name], self.model.bias_update_rate)
                with ms._no_grad():
                    bias.copy_(Tensor(moved.astype(values.dtype)))

    @property
    def lr(self) -> float:
        """The learning rate that the next step applies."""
        return self.job.schedule(self.step)

    @property
    def held(self) -> int:
        """How many parameters this rank holds between steps."""
        return sum(math.prod(local(parameter).shape) for _, parameter in named_parameters(self.chunks))


class _Update:
    """What the program's call of an optimizer does."""

    def __init__(self, trainer: HyperParallelTrainer) -> None:
        self._trainer = trainer

    def step(self, norm: float) -> None:
        """Update the parameters if the gradients' norm and the losses are finite."""
        self._trainer._finish_step(norm)
