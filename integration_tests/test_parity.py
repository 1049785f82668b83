"""Every plan trains as one rank does."""

from __future__ import annotations

from typing import Any

import pytest
from cases import CASES, GLOBAL_BATCH, SEQ_LENGTH, Case

TOLERANCE = {
    "float64": {"losses": 1e-9, "grad_norms": 1e-9, "weights": 1e-9},
    "float32": {"losses": 1e-5, "grad_norms": 1e-4},
}


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_plan_equals_one_rank(case: Case, reports: dict[int, dict[str, Any]]) -> None:
    found = reports[case.world]["cases"][case.name]
    assert found["fewest_valid"] < GLOBAL_BATCH * SEQ_LENGTH, "the corpus must mask some tokens"
    allowed = TOLERANCE[case.dtype]
    assert {name: found[name] for name in allowed if not found[name] <= allowed[name]} == {}
