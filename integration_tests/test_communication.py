"""What ranks hold and receive: planned, measured, and for tensor parallelism by the formula."""

from __future__ import annotations

from typing import Any

import pytest
from cases import GLOBAL_BATCH, SEQ_LENGTH

pytestmark = pytest.mark.timeout(3000)
Reports = dict[int, dict[str, Any]]


@pytest.mark.parametrize(("world", "least"), [(1, 4), (2, 15), (4, 30), (8, 15)])
def test_a_run_holds_and_receives_what_the_plan_says(reports: Reports, world: int, least: int) -> None:
    found = reports[world]["checks"]["communication"]
    assert len(found) >= least
    assert [entry for entry in found.values() if entry["ranks that differ"]] == []
    if world > 1:
        assert all(sum(entry["measured"].values()) > 0 for entry in found.values())


@pytest.mark.parametrize("world", [2, 4])
def test_a_block_gathers_and_scatters_twice_each_way(reports: Reports, world: int) -> None:
    """batch · seq · hidden / tp float64 numbers from each of the other ranks: no collective is lost or doubled."""
    found = reports[world]["checks"]["layer_traffic"]
    border = (world - 1) * GLOBAL_BATCH * SEQ_LENGTH * 20 // world * 8
    assert found["unit 0 forward"] == [["reduce_scatter", border]]
    assert found["unit 1 forward"] == [["all_gather", border], ["reduce_scatter", border]] * 2
    # The gradients of the feed-forward come first, each gathered before its products and scattered after them.
    assert found["unit 1 backward"] == [["all_gather", border], ["reduce_scatter", border]] * 2
    # Three numbers a token instead of its logits: the largest in the model's type, two sums in float64.
    tokens = GLOBAL_BATCH * SEQ_LENGTH
    numbers = [["all_reduce", 2 * tokens * 8 * count * (world - 1) // world] for count in (1, 2)]
    assert found["unit 3 forward"] == [["all_gather", border], *numbers]
    assert found["unit 3 backward"] == [["reduce_scatter", border]]


def test_one_rank_communicates_nothing_over_the_axes_of_a_model(reports: Reports) -> None:
    assert set(map(len, reports[1]["checks"]["layer_traffic"].values())) == {0}
