"""What ranks must have done with global batches that have no valid token: `empty_batch_checks.py` trained on them."""

from __future__ import annotations

from typing import Any

import pytest
from empty_batch_checks import EMPTY
from evaluation_checks import PLANS

Reports = dict[int, dict[str, Any]]
EVERY = [(world, case.name) for world, cases in PLANS.items() for case in cases]


@pytest.mark.parametrize(("world", "plan"), EVERY, ids=[f"{world}-{plan}" for world, plan in EVERY])
def test_steps_without_a_valid_token_are_skipped_on_every_rank(reports: Reports, world: int, plan: str) -> None:
    found = reports[world]["checks"]["empty_batches"][plan]
    assert found["updated"] == [not empty for empty in EMPTY]
    assert [tokens == 0 for tokens in found["valid"]] == list(EMPTY)
    assert found["nothing"], "a mean of nothing is no number"
    assert found["skipped"] == [1, 0, 1, 2, 0]
    assert found["optimizer"] == EMPTY.count(False)
    assert found["changed"] == 0


@pytest.mark.parametrize(("world", "plan"), EVERY, ids=[f"{world}-{plan}" for world, plan in EVERY])
def test_steps_between_them_are_those_of_one_rank(reports: Reports, world: int, plan: str) -> None:
    found = reports[world]["checks"]["empty_batches"][plan]
    alone = {entry["model"]: entry for entry in reports[1]["checks"]["empty_batches"].values()}[found["model"]]
    assert found["valid"] == alone["valid"]
    for step, expected in zip(found["results"], alone["results"], strict=True):
        assert step == pytest.approx(expected, rel=1e-9)
    assert found["weights"] == pytest.approx(alone["weights"], rel=1e-9)
    first, last = found["results"]
    assert first[0] != pytest.approx(last[0], rel=1e-6)
