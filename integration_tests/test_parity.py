"""Every plan trains as one rank does."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import table
from cases import CASES, Case

TOLERANCE = {
    "float64": {"losses": 1e-9, "grad_norms": 1e-9, "weights": 1e-9},
    "float32": {"losses": 1e-5, "grad_norms": 1e-4},
}


def _crossed(world: int, one: Callable[[Case], object], other: Callable[[Case], object]) -> set[object]:
    cases = [case for case in CASES if case.world == world and case.cp > 1 and case.model.dtype == "float64"]
    return {(one(case), other(case)) for case in cases}


@pytest.mark.parametrize("world", [2, 4, 8])
def test_choices_are_crossed_with_each_other(world: int) -> None:
    """No two of these go in step: each value of one is trained with each of the other."""
    pairs = {
        "order and text": (lambda case: case.order, lambda case: case.model.text, 2 * 4),
        "waiting and text": (lambda case: case.asynchronous, lambda case: case.model.text, 2 * 4),
        "order and waiting": (lambda case: case.order, lambda case: case.asynchronous, 2 * 2),
        "order and reduction": (lambda case: case.order, lambda case: case.reduction, 2 * 2),
        "method and order": (lambda case: case.method, lambda case: case.order, 2 * (2 if world == 2 else 3)),
    }
    missing = {
        name: (len(found), wanted)
        for name, (one, other, wanted) in pairs.items()
        if len(found := _crossed(world, one, other)) < wanted
    }
    assert missing == {}


@pytest.mark.timeout(3000)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_plan_equals_one_rank(case: Case, reports: dict[int, dict[str, Any]]) -> None:
    found = reports[case.world]["cases"][case.name]
    uneven = case.world > case.tp * case.pp and case.model.text != "long"
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
