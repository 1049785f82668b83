"""Declarations: shard sizes and initial values."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from parallel_trainer.parallel.weights import Constant, Normal, Weight, initial_values, shard_sizes


@settings(deadline=None)
@given(st.integers(0, 10_000), st.integers(1, 64))
def test_shards_cover_everything_in_order_and_none_is_larger_than_the_first(size, parts):
    sizes = shard_sizes(size, parts)
    assert len(sizes) == parts
    assert sum(sizes) == size
    assert list(sizes) == sorted(sizes, reverse=True)
    assert sizes[0] == -(-size // parts)


def test_initial_values_are_normal_and_depend_on_seed_and_name():
    weight = Weight("w", (400, 500), init=Normal(0.02))
    values = initial_values(weight, seed=1)
    assert abs(values.mean()) < 4 * 0.02 / np.sqrt(values.size)
    assert abs(values.std() / 0.02 - 1) < 0.01
    assert np.unique(values).size == values.size  # rows do not repeat each other
    for other in (
        initial_values(weight, seed=2),
        initial_values(Weight("v", (400, 500), init=Normal(0.02)), seed=1),
    ):
        assert abs(np.corrcoef(values, other)[0, 1]) < 0.02


def test_constant_initial_values():
    np.testing.assert_array_equal(initial_values(Weight("n", (3,), init=Constant(1.0)), seed=0), np.ones(3))
