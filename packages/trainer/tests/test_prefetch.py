"""The order in which weights are gathered and gradients reduced, written down by a group whose messages come late."""

from __future__ import annotations

from typing import Any

import mindspore as ms
import numpy as np
import pytest
from device_mesh import Communicator, Traffic, connect
from late_groups import LatePair, Note
from mindspore import Tensor
from mindspore.common import _Function
from parallel_trainer.batch import MicroBatch
from parallel_trainer.models.unit import Unit
from parallel_trainer.parallel.chunk import Chunk
from parallel_trainer.parallel.fully_shard import ShardedWeights
from parallel_trainer.parallel.weights import Normal, Weight, initial_values

ms.set_device("CPU")
BATCH = MicroBatch(np.zeros((1, 1), np.int32), np.zeros((1, 1), np.int32))
SIZES = {"a": 3, "b": 4, "c": 1}
"""Of the three units' weights; of the last, rank 1 of 2 has no element."""


class _Times(_Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, note: Note, name: str) -> Tensor:
        note(f"forward {name}")
        ctx.save_for_backward(x, weight)
        ctx.note, ctx.name = note, name
        return Tensor.from_numpy(x.asnumpy() * weight.asnumpy().sum())

    @staticmethod
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
        ctx.note(f"backward {ctx.name}")
        x, weight = (tensor.asnumpy() for tensor in ctx.saved_tensors)
        d_weight = np.full(weight.shape, (d_out.asnumpy() * x).sum())
        return Tensor.from_numpy(d_out.asnumpy() * weight.sum()), Tensor.from_numpy(d_weight), None, None


class Times(Unit):
    """x times the sum of its weight's elements."""

    def __init__(self, weight: Weight, note: Note) -> None:
        super().__init__([weight])
        self._note = note

    def construct(self, x: Tensor, batch: MicroBatch, *weights: Tensor) -> Tensor:
        return _Times.apply(x, weights[0], self._note, self.weights[0].name)


def chunk_of(
    events: list[str],
    *,
    rank: int = 0,
    reshard: bool = True,
    frozen: str = "",
    traffic: Traffic | None = None,
    alone: bool = False,
) -> Chunk:
    declared = [Weight(name, (size,), init=Normal(1.0), trainable=name not in frozen) for name, size in SIZES.items()]
    single = connect("single")
    pair: Communicator = LatePair(  # type: ignore[assignment]
        rank,
        {weight.size: initial_values(weight, seed=3) for weight in declared},
        {weight.size: weight.name for weight in declared},
        events.append,
    )
    groups = {"fsdp": single if alone else pair, "dp_replicate": single, "tp": single}
    if traffic:
        groups["fsdp"] = traffic.count(pair, "fsdp")
    weights = ShardedWeights(declared, communicators=groups, dtype=np.dtype(np.float64), seed=3)
    units = [Times(weight, events.append) for weight in declared]
    return Chunk(units, weights, reshard_after_forward=reshard, names=list(SIZES), traffic=traffic)


def run(chunk: Chunk, micro_batches: int = 1) -> None:
    for number in range(micro_batches):
        _, tape = chunk.forward(Tensor(np.array([1.0 + number])), BATCH)
        chunk.backward(tape, Tensor(np.array([1.0])))
    chunk.reduce_gradients()
    chunk.weights.finish_gradients()
    chunk.end_step()


FORWARD = [
    "gather a",
    "gather a done",
    "gather b",
    "forward a",
    "gather b done",
    "gather c",
    "forward b",
    "gather c done",
    "forward c",
]
BACKWARD = [
    "gather c",
    "gather c done",
    "gather b",
    "backward c",
    "reduce c",
    "gather b done",
    "gather a",
    "backward b",
    "reduce c done",
    "reduce b",
    "gather a done",
    "backward a",
    "reduce b done",
    "reduce a",
]


def test_one_unit_is_gathered_ahead_and_one_reduced_behind() -> None:
    events: list[str] = []
    run(chunk_of(events), micro_batches=2)
    second = [*BACKWARD[:4], "reduce a done", *BACKWARD[4:]]
    assert events == [*FORWARD, *BACKWARD, *FORWARD, *second, "reduce a done"]


def test_weights_that_stay_are_gathered_once_and_gradients_reduced_at_the_end() -> None:
    events: list[str] = []
    run(chunk_of(events, reshard=False), micro_batches=2)
    computed = [f"{part} {name}" for part, names in (("forward", "abc"), ("backward", "cba")) for name in names]
    reduced = [f"reduce {name}" for name in "cba"]
    assert events == [*FORWARD, *computed[3:], *computed, *reduced, *(f"{event} done" for event in reduced)]


@pytest.mark.parametrize("reshard", [True, False])
def test_an_evaluation_gathers_one_unit_ahead_and_keeps_none(reshard: bool) -> None:
    events: list[str] = []
    chunk = chunk_of(events, reshard=reshard)
    chunk.evaluate(Tensor(np.array([1.0])), BATCH)
    assert events == FORWARD
    assert [held.tensor.untyped_storage().size() for held in chunk.weights] == [0, 0, 0]


def test_a_frozen_weight_is_gathered_and_not_reduced() -> None:
    events: list[str] = []
    run(chunk_of(events, frozen="b"))
    without = [event for event in BACKWARD if not event.startswith("reduce b")]
    assert events == [*FORWARD, *without, "reduce a done"]


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("reshard", [True, False])
@pytest.mark.parametrize("frozen", ["", "b"])
def test_gradients_are_those_of_one_rank_twice(rank: int, reshard: bool, frozen: str) -> None:
    """What is read before it has come is not a number; of a weight of one element rank 1 has none."""
    together, alone = (
        chunk_of([], rank=rank, reshard=reshard, frozen=frozen, alone=one_rank) for one_rank in (False, True)
    )
    for chunk in (together, alone):
        run(chunk, micro_batches=2)
    for held in together.weights.trainable:
        whole = alone.weights.gradients[alone.weights[held.weight.name].slice]
        expected = 2 * whole[held.holding.start :][: held.holding.size]
        np.testing.assert_array_equal(together.weights.gradients[held.slice], expected)
    assert together.weights["c"].sizes == (1, 0)
    assert [held.tensor.untyped_storage().size() for held in together.weights] == [0, 0, 0]


def test_traffic_is_told_for_which_unit_weights_are_gathered() -> None:
    traffic = Traffic()
    run(chunk_of([], traffic=traffic))
    gathers = [call.during for call in traffic.calls if call.operation == "all_gather"]
    assert gathers == [f"{name} {part}" for part, names in (("forward", "abc"), ("backward", "cba")) for name in names]
    reductions = [call.during for call in traffic.calls if call.operation == "reduce_scatter"]
    assert reductions == ["c backward", "b backward", "a backward"]
