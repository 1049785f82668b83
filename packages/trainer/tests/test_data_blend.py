"""Mixtures of corpora against a plain loop over the rule, and their lengths against the rule's numbers."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from parallel_trainer.data.blend import BlendedDataset, mixing_order, normalized, requested_samples
from parallel_trainer.data.sample import Sample


def looped_order(weights: list[float], size: int) -> list[int]:
    taken = [0] * len(weights)
    order = []
    for position in range(size):
        behind = [weight * max(position, 1) - count for weight, count in zip(weights, taken, strict=True)]
        order.append(behind.index(max(behind)))
        taken[order[-1]] += 1
    return order


class Numbered:
    """Samples that say which dataset and which number they are."""

    def __init__(self, name: int, size: int) -> None:
        self.name, self.size = name, size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, number: int) -> Sample:
        assert 0 <= number < self.size
        here = np.array([self.name, number])
        return Sample(here, here, here, here, np.array([len(here)]))


@settings(max_examples=40, deadline=None)
@given(
    weights=st.lists(st.floats(1e-9, 1.0) | st.sampled_from([0.5, 0.25, 0.1]), min_size=1, max_size=12),
    size=st.integers(0, 4000),
)
def test_the_order_is_that_of_the_loop(weights: list[float], size: int) -> None:
    shares = normalized(weights)
    assert mixing_order(shares, size).tolist() == looped_order(shares.tolist(), size)


@pytest.mark.parametrize(
    "weights", [[1] * 7, [0.3, 0.3, 0.4], [1, 2, 3, 4, 5], [1e-6, 1], [1e-4, 1e-4, 3e-4, 1], [1e-7] * 9 + [1]]
)
def test_a_long_order_is_that_of_the_loop(weights: list[float]) -> None:
    """Many blocks, with ties in every one of them and with sources that come up once in several."""
    shares = normalized(weights)
    assert mixing_order(shares, 40_000).tolist() == looped_order(shares.tolist(), 40_000)


def test_the_first_of_equals_comes_first() -> None:
    assert mixing_order(normalized([1, 1, 1]), 6).tolist() == [0, 1, 2, 0, 1, 2]


def test_a_million_samples_are_mixed_without_going_through_each(
    lines_run: Callable[[Callable[[], object]], int],
) -> None:
    shares = normalized([0.5, 0.3, 0.15, 0.05])
    assert lines_run(lambda: mixing_order(shares, 1_000_000)) < 200_000
    order = mixing_order(shares, 1_000_000)
    assert np.bincount(order) / 1e6 == pytest.approx([0.5, 0.3, 0.15, 0.05], abs=1e-5)


def test_requests_have_half_a_percent_of_margin() -> None:
    """One weighted prefix of 8000 samples becomes 8040; 0.7 and 0.3 of 1000: 703.5 and 301.5, rounded up."""
    assert requested_samples([1.0], 8000) == (8040,)
    assert requested_samples([7, 3], 1000) == (704, 302)


def test_samples_are_taken_in_turn_and_start_over_where_a_source_is_short() -> None:
    mixed = BlendedDataset.of([Numbered(0, 2), Numbered(1, 100)], weights=[1, 1], size=8)
    taken = [mixed[number].input_ids.tolist() for number in range(len(mixed))]
    assert taken == [[0, 0], [1, 0], [0, 1], [1, 1], [0, 0], [1, 2], [0, 1], [1, 3]]
    with pytest.raises(IndexError):
        mixed[8]
