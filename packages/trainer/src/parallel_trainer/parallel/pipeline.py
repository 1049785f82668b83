"""Pipeline parallelism: this rank's chunks of the model, and the schedule by which micro-batches pass all chunks.

The schedule is data and comes with an executor (`pipeline_schedule`); here is what its actions do. A model that is not
cut is a pipeline of one stage: accumulating gradients over micro-batches is the same code.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import TypeVar

import numpy as np
from attrs import field, frozen
from device_mesh import Communicator, ParallelMesh, Request, connect
from mindspore import Tensor
from parallel_config import ParallelPlan
from parallel_config.schema import Parallelism
from pipeline_schedule import (
    Callbacks,
    Executor,
    Message,
    Schedule,
    forward_only,
    generate,
    overlap_b_f,
    overlap_p2p,
)

from parallel_trainer.batch import MicroBatch
from parallel_trainer.models.layers import Model
from parallel_trainer.models.unit import Unit
from parallel_trainer.parallel.chunk import Chunk, Products, Tape
from parallel_trainer.parallel.layout import ModelLayout

WATCHDOG_SECONDS = 300.0
"""A step of the schedule that takes longer is reported, with what it waits for and where that rank should be."""

StageLayers = Sequence[tuple[int, int]]


@frozen
class Order:
    """Which schedule a step follows, as the file chooses it.

    zero_bubble: none for what `schedule` says; zbh1 or zbv.
    overlap_p2p: receives are posted ahead, and sends completed late.
    overlap_b_f: a backward and the forward after it are one step of interleaved 1F1B, also for one chunk.
    schedule: gpipe, all forwards before all backwards; any other is 1F1B, interleaved for several chunks on each rank.
    """

    zero_bubble: str = "none"
    overlap_p2p: bool = False
    overlap_b_f: bool = False
    schedule: str = "1f1b"

    @classmethod
    def of(cls, parallelism: Parallelism) -> Order:
        """The file's choice, which is none without pipelining."""
        if parallelism.pipeline_parallel == 1:
            return cls()
        return cls(
            parallelism.pipeline_parallel_zero_bubble,
            parallelism.pipeline_parallel_overlap_p2p,
            parallelism.pipeline_parallel_overlap_b_f,
            parallelism.pipeline_parallel_schedule,
        )


@lru_cache(maxsize=8)
def schedule(stages: int, chunks: int, micro_batches: int, order: Order = Order()) -> Schedule:
    """What `stages` ranks with so many chunks each do with the micro-batches of a step."""
    made = generate(_name(order), stages, micro_batches, chunks)
    if order.overlap_b_f:
        made = overlap_b_f(made)
    return overlap_p2p(made) if order.overlap_p2p else made


def _name(order: Order) -> str | None:
    """What pipeline-schedule calls it; None for 1F1B, interleaved where there are several chunks."""
    if order.overlap_b_f:
        return "interleaved"
    if order.zero_bubble != "none":
        return order.zero_bubble
    return "gpipe" if order.schedule == "gpipe" else None


@lru_cache(maxsize=8)
def forward_schedule(placement: tuple[int, ...], micro_batches: int) -> Schedule:
    """What ranks with these stages do where nothing goes backward."""
    return forward_only(placement, micro_batches)


U = TypeVar("U")


def stage_units(units: Sequence[U], stage_layers: StageLayers) -> list[tuple[U, ...]]:
    """The units of each virtual stage: its layers, with the embedding on the first and what follows on the last.

    After the layers come a layer that predicts further tokens, if the model has one, and the head.
    """
    embedding, *others = units
    stages = [tuple(others[first : last + 1]) for first, last in stage_layers]
    stages[0] = (embedding, *stages[0])
    stages[-1] = (*stages[-1], *others[stage_layers[-1][1] + 1 :])
    return stages


def unit_names(units: int) -> list[str]:
    """What the units of a model are called, of which the first is the embedding and the last the head."""
    return ["embedding", *(f"layers.{layer}" for layer in range(units - 2)), "head"]


def weight_ranks(stages: Sequence[Sequence[Unit]], stage_ranks: Sequence[int]) -> dict[str, tuple[int, ...]]:
    """By the name of a weight the pipeline ranks that use it, that of its first stage first; a tied head may have two.

    stage_ranks: the rank of each virtual stage.
    """
    found: dict[str, tuple[int, ...]] = {}
    for rank, units in zip(stage_ranks, stages, strict=True):
        for weight in (weight for unit in units for weight in unit.weights):
            ranks = found.get(weight.name, ())
            found[weight.name] = ranks if rank in ranks else (*ranks, rank)
    return found


def model_layout(model: Model, plan: ParallelPlan) -> ModelLayout:
    """Which rank of a plan holds which elements of which weight of a model."""
    stages = stage_units(model.units, plan.stage_layers)
    return ModelLayout(
        {weight.name: weight for weight in model.weights}, ParallelMesh(plan), weight_ranks(stages, plan.stage_ranks)
    )


@frozen(eq=False)
class Pipeline:
    """The chunks of this rank, and how a step's micro-batches pass them and those of the other ranks.

    chunks:       this rank's chunks, in the order of their virtual stages.
    group:        the pipeline's ranks, in the order of the stages.
    width:        size of a hidden state; between stages travel arrays (tokens of a rank, width).
    token_ranks:  ranks that share the tokens of a micro-batch between blocks (sequence parallelism).
    order:        which schedule is followed.
    """

    chunks: Sequence[Chunk]
    group: Communicator = field(factory=lambda: connect("single"))
    width: int = 0
    token_ranks: int = 1
    order: Order = Order()

    def schedule(self, micro_batches: int) -> Schedule:
        """What all ranks do with so many micro-batches."""
        return schedule(self.group.size, len(self.chunks), micro_batches, self.order)

    def run(self, micro_batches: Sequence[MicroBatch], seed: Tensor) -> np.ndarray:
        """Forward and backward of a step: adds the gradients of the losses' sum times `seed` to the weights'.

        seed: one number for each of the model's losses, (losses,).
        Returns the sums of the losses, float64 (losses,), on the rank of the last stage, 0 on others. Collective over
        the group.
        """
        made = self.schedule(len(micro_batches))
        run = _Run(self, dict(zip(made.stages[self.group.rank], self.chunks, strict=True)), micro_batches, seed)
        callbacks = Callbacks(
            forward=run.forward,
            backward=run.backward,
            backward_input=run.backward_input,
            backward_weight=run.backward_weight,
            send=run.send,
            recv=run.recv,
            isend=run.isend,
            irecv=run.irecv,
        )
        losses = Executor(made, self.group.rank, callbacks, watchdog_seconds=WATCHDOG_SECONDS).run()
        return _sum(losses, seed.shape[0])

    def loss_sums(self, micro_batches: Sequence[MicroBatch], losses: int) -> np.ndarray:
        """Forward alone: the sums of the losses, float64 (losses,), on the rank of the last stage, 0 on others.

        Keeps nothing for a backward. Collective over the group.
        """
        made = forward_schedule(self.schedule(1).placement, len(micro_batches))
        chunks = dict(zip(made.stages[self.group.rank], self.chunks, strict=True))
        dtype = self.chunks[0].weights.values.dtype
        run = _Evaluation(self, chunks, micro_batches, Tensor(np.zeros(losses, dtype)))
        callbacks = Callbacks(forward=run.forward, send=run.send, recv=run.recv)
        found = Executor(made, self.group.rank, callbacks, watchdog_seconds=WATCHDOG_SECONDS).run()
        return _sum(found, losses)


def _sum(losses: Mapping[int, Tensor], size: int) -> np.ndarray:
    """The losses (size,) of the micro-batches added up in their order, float64."""
    return sum((losses[number].asnumpy().astype(np.float64) for number in sorted(losses)), np.zeros(size))


class _Run:
    """One step: the tapes of the micro-batches that are between their forward and their backward.

    chunks: this rank's, by virtual stage.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        chunks: Mapping[int, Chunk],
        micro_batches: Sequence[MicroBatch],
        seed: Tensor,
    ) -> None:
        self._chunks, self._group = chunks, pipeline.group
        self._width, self._token_ranks = pipeline.width, pipeline.token_ranks
        self._micro_batches = micro_batches
        self._seed = seed
        self._dtype = pipeline.chunks[0].weights.param_dtype
        self._tapes: dict[tuple[int, int], Tape] = {}
        self._products: dict[tuple[int, int], Products] = {}
        self._done = Counter[int]()

    def forward(self, stage: int, number: int, x: Tensor | None) -> Tensor:
        batch = self._micro_batches[number]
        x = Tensor(batch.input_ids) if x is None else x
        out, self._tapes[stage, number] = self._chunks[stage].forward(x, batch)
        return out

    def backward(self, stage: int, number: int, gradient: Tensor | None) -> Tensor:
        gradient = self._seed if gradient is None else gradient
        gradient = self._chunks[stage].backward(self._tapes.pop((stage, number)), gradient)
        self._count(stage)
        return gradient

    def backward_input(self, stage: int, number: int, gradient: Tensor | None) -> Tensor:
        gradient = self._seed if gradient is None else gradient
        tape = self._tapes.pop((stage, number))
        gradient, self._products[stage, number] = self._chunks[stage].backward_input(tape, gradient)
        return gradient

    def backward_weight(self, stage: int, number: int) -> None:
        self._chunks[stage].backward_weight(self._products.pop((stage, number)))
        self._count(stage)

    def _count(self, stage: int) -> None:
        """A micro-batch is done with a stage; after the last one, the stage's gradients are complete."""
        self._done[stage] += 1
        if self._done[stage] == len(self._micro_batches):
            self._chunks[stage].reduce_gradients()

    def send(self, message: Message, value: Tensor) -> None:
        self._group.send(value.asnumpy(), message.receiver)

    def recv(self, message: Message) -> Tensor:
        array = self._empty(message)
        self._group.recv(array, message.sender)
        return Tensor.from_numpy(array)

    def isend(self, message: Message, value: Tensor) -> Request:
        return self._group.isend(value.asnumpy(), message.receiver)

    def irecv(self, message: Message) -> _Arriving:
        array = self._empty(message)
        return _Arriving(array, self._group.irecv(array, message.sender))

    def _empty(self, message: Message) -> np.ndarray:
        tokens = self._micro_batches[message.microbatch].input_ids.size // self._token_ranks
        return np.empty((tokens, self._width), self._dtype)


class _Evaluation(_Run):
    """Forwards alone, which leave no tapes."""

    def forward(self, stage: int, number: int, x: Tensor | None) -> Tensor:
        batch = self._micro_batches[number]
        return self._chunks[stage].evaluate(Tensor(batch.input_ids) if x is None else x, batch)


@frozen(eq=False)
class _Arriving:
    array: np.ndarray
    request: Request

    def wait(self) -> Tensor:
        self.request.wait()
        return Tensor.from_numpy(self.array)
