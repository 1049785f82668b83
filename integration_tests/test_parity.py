"""Every plan trains as one rank does."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest
import table
from cases import CASES, Case

TOLERANCE = {
    "float64": {"losses": 1e-9, "grad_norms": 1e-9, "weights": 1e-9},
    "float32": {"losses": 1e-5, "grad_norms": 1e-4},
}


Choice = Callable[[Case], object]


def _crossed(cases: Iterable[Case], one: Choice, other: Choice) -> set[object]:
    return {(one(case), other(case)) for case in cases if case.model.dtype == "float64"}


def _missing(cases: Iterable[Case], pairs: Mapping[str, tuple[Choice, Choice, int]]) -> dict[str, tuple[int, int]]:
    cases = tuple(cases)
    found = {name: (len(_crossed(cases, one, other)), wanted) for name, (one, other, wanted) in pairs.items()}
    return {name: (count, wanted) for name, (count, wanted) in found.items() if count < wanted}


@pytest.mark.parametrize("world", [2, 4, 8])
def test_choices_of_context_parallelism_are_crossed_with_each_other(world: int) -> None:
    """No two of these go in step: each value of one is trained with each of the other."""
    pairs: dict[str, tuple[Choice, Choice, int]] = {
        "order and text": (lambda case: case.order, lambda case: case.model.text, 2 * 4),
        "waiting and text": (lambda case: case.asynchronous, lambda case: case.model.text, 2 * 4),
        "order and waiting": (lambda case: case.order, lambda case: case.asynchronous, 2 * 2),
        "order and reduction": (lambda case: case.order, lambda case: case.reduction, 2 * 2),
        "method and order": (lambda case: case.method, lambda case: case.order, 2 * (2 if world == 2 else 3)),
    }
    assert _missing((case for case in CASES if case.world == world and case.cp > 1), pairs) == {}


@pytest.mark.parametrize("tp", [2, 4, 8])
def test_choices_of_tensor_parallelism_are_crossed_with_each_other(tp: int) -> None:
    pairs: dict[str, tuple[Choice, Choice, int]] = {
        "logits and tied": (lambda case: case.loss_parallel, lambda case: case.model.tied, 2 * 2),
        "logits and key/value heads": (lambda case: case.loss_parallel, lambda case: case.model.kv_heads, 2 * 3),
        "tied and key/value heads": (lambda case: case.model.tied, lambda case: case.model.kv_heads, 2 * 3),
        "tied and reduction": (lambda case: case.model.tied, lambda case: case.reduction, 2 * 2),
        "logits and micro-batches": (lambda case: case.loss_parallel, lambda case: case.accumulation, 2 * 2),
    }
    cases = [case for case in CASES if case.tp == tp and case.pp == 1]
    assert _missing(cases, pairs) == {}
    splits = {(case.dp_replicate > 1, case.dp_shard > 1, case.cp > 1) for case in cases}
    wanted = {2: 7, 4: 4, 8: 1}  # with 8 ranks in all, what is left splits into so many
    assert len(splits) >= wanted[tp]


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
