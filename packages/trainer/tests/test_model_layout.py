"""Which rank of a plan holds which elements of which weight, for any plan and between any two."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from device_mesh import ParallelMesh
from hypothesis import given, settings
from hypothesis import strategies as st
from parallel_trainer.parallel.layout import Holding, ModelLayout, Runs
from parallel_trainer.parallel.weights import Normal, Weight


def weight(name: str, shape: tuple[int, ...], **split: Any) -> Weight:
    return Weight(name, shape, init=Normal(1.0), **split)


# One of each kind that models declare, with sizes that seldom divide.
WEIGHTS = (
    weight("embedding", (61, 6), tp_dim=0),
    weight("norm", (6,)),
    weight("queries", (24, 5), tp_dim=0, tp_block=3),
    weight("keys", (6, 5), tp_dim=0, tp_block=3),
    weight("output", (5, 24), tp_dim=1, tp_block=3),
    weight("fused", (16 + 16, 3), tp_dim=0, tp_fused=(16, 16)),
    weight("experts", (8, 3, 5), ep_dim=0),
    weight("bias", (8,), ep_dim=0, trainable=False),
    weight("scale", ()),
)


def random_layout(random: np.random.Generator) -> ModelLayout:
    """Degrees of at most 24 ranks."""
    world = 99
    while world > 24:
        pp, dp_replicate, dp_shard, cp, tp = (
            int(random.choice(sizes)) for sizes in ([1, 2, 3], [1, 2], [1, 2, 3], [1, 2], [1, 2, 4])
        )
        world = pp * dp_replicate * dp_shard * cp * tp
    replica = dp_shard * cp * tp
    ep = int(random.choice([ep for ep in (1, 2, 4, 8) if replica % ep == 0]))
    degrees = SimpleNamespace(pp=pp, dp_replicate=dp_replicate, dp_shard=dp_shard, cp=cp, tp=tp, ep=ep)
    stages = {declared.name: (int(random.integers(pp)),) for declared in WEIGHTS}
    if pp > 1:
        stages["embedding"] = (0, pp - 1)  # as a tied head
    return ModelLayout({declared.name: declared for declared in WEIGHTS}, ParallelMesh(degrees), stages)


def elements(holding: Holding) -> np.ndarray:
    """Numbers of the elements held, by cutting an array that holds them."""
    numbers = np.arange(holding.part.weight.size).reshape(holding.part.weight.shape)
    return numbers[holding.part.index].reshape(-1)[holding.start : holding.start + holding.size]


def pairs() -> Iterator[tuple[ModelLayout, ModelLayout]]:
    random = np.random.default_rng(8)
    for _ in range(1000):
        yield random_layout(random), random_layout(random)


def test_any_two_plans_store_each_element_once_and_move_each_once_to_every_rank_that_holds_it() -> None:
    """1,000 random pairs: what the first stores covers the model, and the second finds each of its elements there."""
    for before, after in pairs():
        stored = [before.stored(rank) for rank in range(before.mesh.world_size)]
        for name, declared in before.weights.items():
            written = [held.runs for of_rank in stored if (held := of_rank.get(name))]
            counts = np.zeros(declared.size, int)
            for runs in written:
                for start, stop in zip(runs.starts, runs.stops, strict=True):
                    counts[start:stop] += 1
            assert (counts == 1).all(), (name, before.mesh)
            for rank in {0, after.mesh.world_size - 1, after.mesh.world_size // 2}:
                wanted = after.holding(name, rank)
                if wanted is None:
                    continue
                received = np.zeros(wanted.size, int)
                for runs in written:
                    received[wanted.runs.common(runs).here] += 1
                assert (received == 1).all(), (name, before.mesh, after.mesh, rank)


@pytest.mark.parametrize("seed", range(20))
def test_runs_are_the_elements_that_cutting_the_weight_gives(seed: int) -> None:
    layout = random_layout(np.random.default_rng(seed))
    for name in layout.weights:
        for rank in range(layout.mesh.world_size):
            held = layout.holding(name, rank)
            if held is not None:
                runs = held.runs
                found = [
                    number for start, stop in zip(runs.starts, runs.stops, strict=True) for number in range(start, stop)
                ]
                assert found == elements(held).tolist()
                assert (runs.starts[1:] >= runs.stops[:-1]).all()


def test_experts_are_where_their_global_numbers_say() -> None:
    """PUB-CKPT-01: eight experts over ep 1, 2, 4, 8."""
    expected = {
        1: [[0, 1, 2, 3, 4, 5, 6, 7]],
        2: [[0, 1, 2, 3], [4, 5, 6, 7]],
        4: [[0, 1], [2, 3], [4, 5], [6, 7]],
        8: [[0], [1], [2], [3], [4], [5], [6], [7]],
    }
    experts = weight("experts", (8, 1), ep_dim=0)
    for ep, by_rank in expected.items():
        degrees = SimpleNamespace(pp=1, dp_replicate=1, dp_shard=ep, cp=1, tp=1, ep=ep)
        layout = ModelLayout({"experts": experts}, ParallelMesh(degrees), {"experts": (0,)})
        assert [elements(layout.stored(rank)["experts"]).tolist() for rank in range(ep)] == by_rank


numbers = st.sets(st.integers(0, 60))


def runs_of(held: set[int]) -> Runs:
    ordered = np.array(sorted(held), np.int64)
    breaks = np.flatnonzero(np.diff(ordered) != 1) + 1
    pieces = [piece for piece in np.split(ordered, breaks) if piece.size]
    return Runs(
        np.array([piece[0] for piece in pieces], np.int64), np.array([piece.size for piece in pieces], np.int64)
    )


@settings(deadline=None)
@given(numbers, numbers)
def test_common_elements_are_found_where_each_side_holds_them(one: set[int], other: set[int]) -> None:
    common = runs_of(one).common(runs_of(other))
    assert np.array(sorted(one), int)[common.here].tolist() == sorted(one & other)
    assert np.array(sorted(other), int)[common.there].tolist() == sorted(one & other)
    assert common.size == len(one & other)


@settings(deadline=None)
@given(numbers, st.tuples(st.integers(0, 70), st.integers(0, 70)).map(sorted))
def test_a_cut_is_a_slice_of_what_is_held(held: set[int], bounds: list[int]) -> None:
    first, last = bounds
    cut = runs_of(held).cut(first, last)
    found = [number for start, stop in zip(cut.starts, cut.stops, strict=True) for number in range(start, stop)]
    assert found == sorted(held)[first:last]
