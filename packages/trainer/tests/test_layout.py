"""Which part of a weight a tensor-parallel rank holds."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from parallel_trainer.parallel.layout import weight_part
from parallel_trainer.parallel.weights import Constant, Normal, Weight, initial_values


def weight(shape: tuple[int, ...], **split: object) -> Weight:
    return Weight("w", shape, init=Normal(1.0), **split)  # type: ignore[arg-type]


def ranges(declared: Weight, tp: int) -> list[tuple[tuple[int, int], ...]]:
    return [weight_part(declared, tp, rank).ranges for rank in range(tp)]


def test_rows_that_do_not_divide_go_to_the_first_ranks_without_padding() -> None:
    vocabulary = weight((61, 4), tp_dim=0)
    assert ranges(vocabulary, 4) == [((0, 16),), ((16, 31),), ((31, 46),), ((46, 61),)]
    assert [weight_part(vocabulary, 4, rank).shape for rank in range(4)] == [(16, 4), (15, 4), (15, 4), (15, 4)]


def test_heads_stay_together() -> None:
    assert ranges(weight((24, 4), tp_dim=0, tp_block=6), 2) == [((0, 12),), ((12, 24),)]
    assert ranges(weight((4, 18), tp_dim=1, tp_block=6), 2) == [((0, 12),), ((12, 18),)]


def test_fewer_heads_than_ranks_are_held_by_neighbours() -> None:
    parts = [weight_part(weight((12, 4), tp_dim=0, tp_block=6), 8, rank) for rank in range(8)]
    assert [part.ranges for part in parts] == [((0, 6),)] * 4 + [((6, 12),)] * 4
    assert {part.copies for part in parts} == {4}


def test_a_fused_weight_is_split_piece_by_piece() -> None:
    qkv = weight((8 + 4 + 4, 3), tp_dim=0, tp_block=2, tp_fused=(8, 4, 4))
    assert ranges(qkv, 2) == [((0, 4), (8, 10), (12, 14)), ((4, 8), (10, 12), (14, 16))]
    gate_up = weight((12, 3), tp_dim=0, tp_fused=(6, 6))
    values = np.arange(36).reshape(12, 3)
    assert values[weight_part(gate_up, 3, 1).index].tolist() == values[[2, 3, 8, 9]].tolist()


def test_a_weight_that_is_not_split_is_held_by_all() -> None:
    part = weight_part(weight((5,)), 4, 2)
    assert (part.shape, part.copies) == ((5,), 4)


@pytest.mark.parametrize(
    ("split", "message"),
    [
        ({"tp_dim": 0, "tp_block": 5}, "multiples of 5"),
        ({"tp_dim": 0, "tp_fused": (6, 5)}, "add up to 12"),
        ({"tp_dim": 1, "ep_dim": 0}, "ep_dim is 0 and tp_dim 1"),
    ],
)
def test_what_cannot_be_declared_is_refused(split: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        weight((12, 4), **split)


@pytest.mark.parametrize(
    ("declared", "tp", "message"),
    [
        (weight((12, 4), tp_dim=0, tp_block=4), 8, "3 blocks of 4 over 8 ranks"),
        (weight((3, 4), tp_dim=0), 6, "3 blocks of 1 over 6 ranks"),
        (weight((16, 4), tp_dim=0, tp_block=2, tp_fused=(12, 2, 2)), 2, "some would be split and others copied"),
    ],
)
def test_what_cannot_be_split_is_refused(declared: Weight, tp: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        weight_part(declared, tp, 1)


def test_experts_are_split_over_their_own_axis() -> None:
    experts = weight((8, 3, 2), ep_dim=0)
    assert (experts.split_axis, experts.split_dim, experts.shard_axis) == ("ep", 0, "efsdp")
    parts = [weight_part(experts, 4, rank) for rank in range(4)]
    assert [(part.shape, part.ranges, part.copies) for part in parts] == [
        ((2, 3, 2), ((2 * rank, 2 * rank + 2),), 1) for rank in range(4)
    ]


@st.composite
def splits(draw: st.DrawFn) -> tuple[Weight, int]:
    block, tp = draw(st.integers(1, 3)), draw(st.integers(1, 6))
    pieces = tuple(block * draw(st.integers(tp, 3 * tp)) for _ in range(draw(st.integers(1, 3))))
    dim = draw(st.integers(0, 1))
    other = draw(st.integers(1, 4))
    shape = (sum(pieces), other) if dim == 0 else (other, sum(pieces))
    return weight(shape, tp_dim=dim, tp_block=block, tp_fused=pieces), tp


@settings(deadline=None)
@given(splits())
def test_parts_cover_every_element_once(split: tuple[Weight, int]) -> None:
    declared, tp = split
    count = np.zeros(declared.shape, int)
    for rank in range(tp):
        part = weight_part(declared, tp, rank)
        assert count[part.index].shape == part.shape
        count[part.index] += 1
    assert (count == 1).all()


@settings(deadline=None)
@given(splits(), st.data())
def test_a_piece_of_a_parts_initial_values_is_that_of_the_whole_weight(
    split: tuple[Weight, int], data: st.DataObject
) -> None:
    declared, tp = split
    part = weight_part(declared, tp, data.draw(st.integers(0, tp - 1)))
    start, stop = sorted(data.draw(st.tuples(*[st.integers(0, part.size)] * 2)))
    expected = initial_values(declared, seed=3)[part.index].reshape(-1)[start:stop]
    np.testing.assert_array_equal(part.initial_values(seed=3, start=start, stop=stop), expected)


def test_initial_values_of_one_number() -> None:
    scalar = Weight("s", (), init=Constant(2.0))
    assert weight_part(scalar, 2, 1).initial_values(seed=0, start=0, stop=1).tolist() == [2.0]
