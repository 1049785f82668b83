"""Runs that go on from checkpoints equal runs that were never stopped."""

from __future__ import annotations

from typing import Any

import pytest
from checkpoint_checks import RELAYS

Reports = dict[int, dict[str, Any]]


@pytest.mark.parametrize("world", RELAYS)
def test_a_run_goes_on_under_any_other_plan_as_one_rank_does(reports: Reports, world: int) -> None:
    relays = reports[world]["checks"]["relay"]
    assert len(relays) == RELAYS[world]
    for legs, found in relays.items():
        assert found["loss"] < 1e-9, legs
        assert found["weights"] < 1e-9, legs
        assert found["damages"] == [], legs


@pytest.mark.parametrize("world", RELAYS)
def test_together_ranks_read_each_byte_once_and_in_equal_shares(reports: Reports, world: int) -> None:
    """That each is read once is asserted while it happens."""
    for legs, found in reports[world]["checks"]["relay"].items():
        assert found["most read by a rank, of its share"] <= 1.2, legs


@pytest.mark.parametrize("world", [1, 2, 4])
def test_under_the_same_plan_a_run_goes_on_to_the_last_bit(reports: Reports, world: int) -> None:
    for found in reports[world]["checks"]["same_plan"].values():
        assert found["steps"]
        assert found["weights"]
        assert found["moments"]
        assert found["samples"][0] == found["samples"][1] > 0
