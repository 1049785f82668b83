"""What evaluations on several ranks must have found: `evaluation_checks.py` ran them."""

from __future__ import annotations

from typing import Any

import pytest
from evaluation_checks import MODELS, PLANS

Reports = dict[int, dict[str, Any]]
SEVERAL = [(world, case.name) for world, cases in PLANS.items() for case in cases if world > 1]


def alone(reports: Reports) -> dict[str, dict[str, Any]]:
    """By model what one rank found, one sample at a time."""
    return {entry["model"]: entry for entry in reports[1]["checks"]["evaluations"].values()}


@pytest.mark.parametrize(("world", "plan"), SEVERAL, ids=[f"{world}-{plan}" for world, plan in SEVERAL])
def test_samples_lose_what_they_lose_on_one_rank_under_every_plan(reports: Reports, world: int, plan: str) -> None:
    found = reports[world]["checks"]["evaluations"][plan]
    expected = alone(reports)[found["model"]]
    assert found["tokens"] == expected["tokens"]
    before, after = found["losses"]
    assert before == pytest.approx(expected["losses"][0], rel=1e-12)
    assert after == pytest.approx(expected["losses"][1], rel=1e-9)  # of weights that differ by rounding
    assert before[0] != pytest.approx(after[0], rel=1e-6)
    assert found["held"] == 0


def test_models_with_a_further_prediction_have_its_loss_too(reports: Reports) -> None:
    assert {name: len(entry["losses"][0]) for name, entry in alone(reports).items()} == {
        name: 1 + model.mtp for name, model in MODELS.items()
    }


@pytest.mark.parametrize("world", [1, 2, 4])
def test_training_with_evaluations_is_bit_by_bit_the_training_without(reports: Reports, world: int) -> None:
    found = [entry["changed"] for entry in reports[world]["checks"]["evaluations"].values() if "changed" in entry]
    assert found == [0]
