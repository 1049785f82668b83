"""Pipeline parallelism: this rank's chunks of the model, and the schedule by which micro-batches pass all chunks.

The schedule is data and comes with an executor (`pipeline_schedule`); here is what its actions do. A model that is not
cut is a pipeline of one stage: accumulating gradients over micro-batches is the same code.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
from attrs import field, frozen
from device_mesh import Communicator, Request, connect
from mindspore import Tensor
from pipeline_schedule import Callbacks, Executor, Message, Schedule, generate, overlap_p2p

from parallel_trainer.batch import MicroBatch
from parallel_trainer.models.unit import Unit
from parallel_trainer.parallel.chunk import Chunk, Tape

WATCHDOG_SECONDS = 300.0
"""A step of the schedule that takes longer is reported, with what it waits for and where that rank should be."""

StageLayers = Sequence[tuple[int, int]]


@lru_cache(maxsize=8)
def schedule(stages: int, chunks: int, micro_batches: int, *, overlap: bool = False) -> Schedule:
    """Interleaved 1F1B, which for one chunk on each rank is 1F1B."""
    made = generate(None, stages, micro_batches, chunks)
    return overlap_p2p(made) if overlap else made


def stage_units(units: Sequence[Unit], stage_layers: StageLayers) -> list[tuple[Unit, ...]]:
    """The units of each virtual stage: its layers, with the embedding on the first and the head on the last."""
    embedding, *blocks, head = units
    stages = [tuple(blocks[first : last + 1]) for first, last in stage_layers]
    stages[0] = (embedding, *stages[0])
    stages[-1] = (*stages[-1], head)
    return stages


def weight_ranks(stages: Sequence[Sequence[Unit]], pp: int) -> dict[str, tuple[int, ...]]:
    """By the name of a weight the pipeline ranks that use it, that of its first stage first; a tied head has two."""
    found: dict[str, tuple[int, ...]] = {}
    for stage, units in enumerate(stages):
        for weight in (weight for unit in units for weight in unit.weights):
            ranks = found.get(weight.name, ())
            found[weight.name] = ranks if stage % pp in ranks else (*ranks, stage % pp)
    return found


@frozen(eq=False)
class Pipeline:
    """The chunks of this rank, and how a step's micro-batches pass them and those of the other ranks.

    chunks:       this rank's chunks, chunk k being virtual stage k · pp + rank.
    group:        the pipeline's ranks, in the order of the stages.
    width:        size of a hidden state; between stages travel arrays (tokens of a rank, width).
    token_ranks:  ranks that share the tokens of a micro-batch between blocks (sequence parallelism).
    overlap:      receives are posted ahead, and sends completed late.
    """

    chunks: Sequence[Chunk]
    group: Communicator = field(factory=lambda: connect("single"))
    width: int = 0
    token_ranks: int = 1
    overlap: bool = False

    def schedule(self, micro_batches: int) -> Schedule:
        """What all ranks do with so many micro-batches."""
        return schedule(self.group.size, len(self.chunks), micro_batches, overlap=self.overlap)

    def run(self, micro_batches: Sequence[MicroBatch], seed: Tensor) -> np.ndarray:
        """Forward and backward of a step: adds the gradients of the losses' sum times `seed` to the weights'.

        seed: one number for each of the model's losses, (losses,).
        Returns the sums of the losses, float64 (losses,), on the rank of the last stage, 0 on others. Collective over
        the group.
        """
        run = _Run(self, micro_batches, seed)
        callbacks = Callbacks(
            forward=run.forward, backward=run.backward, send=run.send, recv=run.recv, isend=run.isend, irecv=run.irecv
        )
        made = self.schedule(len(micro_batches))
        losses = Executor(made, self.group.rank, callbacks, watchdog_seconds=WATCHDOG_SECONDS).run()
        return sum((losses[number].asnumpy().astype(np.float64) for number in sorted(losses)), np.zeros(seed.shape))


class _Run:
    """One step: the tapes of the micro-batches that are between their forward and their backward."""

    def __init__(self, pipeline: Pipeline, micro_batches: Sequence[MicroBatch], seed: Tensor) -> None:
        self._chunks, self._group = pipeline.chunks, pipeline.group
        self._width, self._token_ranks = pipeline.width, pipeline.token_ranks
        self._micro_batches = micro_batches
        self._seed = seed
        self._dtype = seed.asnumpy().dtype
        self._tapes: dict[tuple[int, int], Tape] = {}
        self._backwards = [0] * len(self._chunks)

    def forward(self, stage: int, number: int, x: Tensor | None) -> Tensor:
        batch = self._micro_batches[number]
        x = Tensor(batch.input_ids) if x is None else x
        out, self._tapes[stage, number] = self._chunk(stage).forward(x, batch)
        return out

    def backward(self, stage: int, number: int, gradient: Tensor | None) -> Tensor:
        chunk = self._chunk(stage)
        gradient = chunk.backward(self._tapes.pop((stage, number)), self._seed if gradient is None else gradient)
        place = stage // self._group.size
        self._backwards[place] += 1
        if self._backwards[place] == len(self._micro_batches):
            chunk.reduce_gradients()
        return gradient

    def send(self, message: Message, value: Tensor) -> None:
        self._group.send(value.asnumpy(), message.receiver)

    def recv(self, message: Message) -> Tensor:
        return Tensor.from_numpy(self._group.recv(self._empty(message), message.sender))

    def isend(self, message: Message, value: Tensor) -> Request:
        return self._group.isend(value.asnumpy(), message.receiver)

    def irecv(self, message: Message) -> _Arriving:
        array = self._empty(message)
        return _Arriving(array, self._group.irecv(array, message.sender))

    def _chunk(self, stage: int) -> Chunk:
        return self._chunks[stage // self._group.size]

    def _empty(self, message: Message) -> np.ndarray:
        tokens = self._micro_batches[message.microbatch].input_ids.size // self._token_ranks
        return np.empty((tokens, self._width), self._dtype)


@frozen(eq=False)
class _Arriving:
    array: np.ndarray
    request: Request

    def wait(self) -> Tensor:
        self.request.wait()
        return Tensor.from_numpy(self.array)
