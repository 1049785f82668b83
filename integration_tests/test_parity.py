"""Every plan trains as one rank does."""

from __future__ import annotations

from pathlib import Path
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
    uneven = case.world > 1 and case.model.text != "long"
    assert found["uneven"] or not uneven, "ranks must have different numbers of valid tokens"
    allowed = TOLERANCE[case.model.dtype]
    assert {name: found[name] for name in allowed if not found[name] <= allowed[name]} == {}


@pytest.mark.timeout(3000)
@pytest.mark.parametrize("page", table.TABLES, ids=lambda page: page.name)
def test_table_shows_what_was_found(page: Path, reports: dict[int, dict[str, Any]], request: Any) -> None:
    if request.config.getoption("--write-table"):
        table.write(reports)
    found, claimed = table.rows(reports, page), table.claims(page)
    assert {key: runs for key, (runs, _) in claimed.items()} == {key: runs for key, (runs, _) in found.items()}
    broken = {
        (key, name): (largest[name], bound)
        for key, (_, largest) in found.items()
        for name, bound in claimed[key][1].items()
        if not largest[name] < bound
    }
    assert broken == {}
