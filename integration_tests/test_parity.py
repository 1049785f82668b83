"""Every plan trains as one rank does."""

from __future__ import annotations

from typing import Any

import pytest
import table
from cases import CASES, Case

TOLERANCE = {
    "float64": {"losses": 1e-9, "grad_norms": 1e-9, "weights": 1e-9},
    "float32": {"losses": 1e-5, "grad_norms": 1e-4},
}


@pytest.mark.timeout(3000)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_plan_equals_one_rank(case: Case, reports: dict[int, dict[str, Any]]) -> None:
    found = reports[case.world]["cases"][case.name]
    assert found["uneven"] is (case.world > 1), "ranks must have different numbers of valid tokens"
    allowed = TOLERANCE[case.dtype]
    assert {name: found[name] for name in allowed if not found[name] <= allowed[name]} == {}


@pytest.mark.timeout(3000)
def test_table_shows_what_was_found(reports: dict[int, dict[str, Any]], request: pytest.FixtureRequest) -> None:
    if request.config.getoption("--write-table"):
        table.write(reports)
    found = table.rows(reports)
    claimed = table.claims(table.PAGE)
    assert {key: runs for key, (runs, _) in claimed.items()} == {key: runs for key, (runs, _) in found.items()}
    broken = {
        (key, name): (largest[name], bound)
        for key, (_, largest) in found.items()
        for name, bound in claimed[key][1].items()
        if not largest[name] < bound
    }
    assert broken == {}


def test_readme_shows_the_same_table() -> None:
    assert table.claims(table.README) == table.claims(table.PAGE)
