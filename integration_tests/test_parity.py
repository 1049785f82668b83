"""Every plan trains as one rank does."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import pytest
import table
from cases import CASES, TOLERANCE, Case

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


def _beside(case: Case) -> object:
    """What a pipeline is crossed with."""
    cp = (case.method, case.asynchronous) if case.cp > 1 else ()
    return case.dp_replicate, case.dp_shard, case.tp, case.loss_parallel, *cp


PIPELINES = tuple(
    case for case in CASES if case.pp > 1 and case.model.architecture == "qwen3" and case.schedule != "gpipe"
)

# What a step does, and beside what: every value of the one meets every value of the other.
PIPELINE_CHOICES: dict[str, Choice] = {
    "chunks": lambda case: case.chunks,
    "micro-batches": lambda case: case.accumulation,
    "layout": lambda case: case.layout == "auto",
    "tied": lambda case: case.model.tied,
    "overlap": lambda case: case.overlap,
    "reshard": lambda case: case.reshard,
    "reduction": lambda case: case.reduction,
    "beside": _beside,
}


@pytest.mark.parametrize("pp", [2, 4])
@pytest.mark.parametrize("schedule", ["1F1B", "overlap_b_f", "zero bubble"])
def test_choices_of_pipelines_are_crossed(pp: int, schedule: str) -> None:
    """Of those that follow a kind of schedule on two or four stages, alone or crossed on four ranks."""
    kinds = {"1F1B": ("none", False), "overlap_b_f": ("none", True)}
    zero_bubble = {("zbh1", False), ("zbv", False)}
    kind = {kinds[schedule]} if schedule in kinds else zero_bubble
    of_stages = [case for case in PIPELINES if case.pp == pp and case.world <= 4 and case.model.dtype == "float64"]
    cases = [case for case in of_stages if (case.zero_bubble, case.paired) in kind]
    values = {name: {choice(case) for case in cases} for name, choice in PIPELINE_CHOICES.items()}
    assert values["chunks"] == ({1, 2} if schedule == "zero bubble" else {1, 2, 3})
    assert {True, False} == values["layout"] == values["tied"] == values["overlap"]
    missing = {}
    for (one, first), (other, second) in itertools.combinations(PIPELINE_CHOICES.items(), 2):
        if schedule != "1F1B" and other == "beside":
            continue  # crossed once or twice
        wanted = set(itertools.product(values[one], values[other]))
        if lacking := wanted - {(first(case), second(case)) for case in cases}:
            missing[one, other] = lacking
    assert missing == {}


def test_a_pipeline_beside_another_dimension_has_every_number_of_chunks_and_micro_batches() -> None:
    """One micro-batch, as many as stages, and a number that they do not divide."""
    found: dict[object, set[tuple[int, int]]] = {}
    for case in PIPELINES:
        if case.pp == 2 and case.world == 4 and case.zero_bubble == "none":
            found.setdefault(_beside(case), set()).add((case.chunks, case.accumulation))
    assert len(found) == 6
    assert all(met == set(itertools.product((1, 2, 3), (1, 2, 5))) for met in found.values())


def test_gpipe_is_trained_alone_and_beside_other_dimensions() -> None:
    """Fewer micro-batches than stages and more, both reductions and ways of transfer, shards kept and gathered."""
    cases = [case for case in CASES if case.schedule == "gpipe"]
    assert {(case.pp, case.accumulation) for case in cases} == {(2, 1), (2, 5), (4, 3), (4, 9)}
    assert {name for name in DIMENSIONS for case in cases if getattr(case, name) > 1} == set(DIMENSIONS)
    for choice in ("overlap", "reshard", "reduction"):
        assert len({getattr(case, choice) for case in cases}) == 2, choice


DIMENSIONS = ("dp_replicate", "dp_shard", "cp", "tp", "pp")


@pytest.mark.parametrize("world", [2, 4, 8])
def test_experts_are_trained_beside_every_dimension(world: int) -> None:
    """With both dispatchers up to four ranks; every degree, number of experts, choice and kind of text on eight."""
    cases = [case for case in CASES if case.world == world and case.ep > 1 and case.model.dtype == "float64"]
    beside = {(name, case.node is None) for case in cases for name in DIMENSIONS if getattr(case, name) > 1}
    # Two replicas and two stages leave no rank of two to share experts with.
    dimensions = ("dp_shard", "cp", "tp") if world == 2 else DIMENSIONS
    assert {name for name, _ in beside} == set(dimensions)
    assert world == 8 or beside == set(itertools.product(dimensions, (True, False)))
    if world == 8:
        assert {case.ep for case in cases} == {2, 4, 8}
        assert {case.node for case in cases} == {None, 2, 4}
        assert {case.model.experts for case in cases} == {8, 16}
        assert {case.model.top_k for case in cases} == {1, 2, 4}
        assert {case.model.text for case in cases} >= {"plain", "packed", "padded"}
        assert {case.model.mtp for case in cases} == {0, 1}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_plan_equals_one_rank(case: Case, reports: dict[int, dict[str, Any]]) -> None:
    found = reports[case.world]["cases"][case.name]
    uneven = case.world > case.tp * case.pp and case.model.text != "long"
    assert found["uneven"] or not uneven, "ranks must have different numbers of valid tokens"
    allowed = TOLERANCE[case.model.dtype]
    assert {name: found[name] for name in allowed if not found[name] <= allowed[name]} == {}


def test_pages_have_every_plan_and_its_tolerance() -> None:
    """From the cases alone: what was measured depends on the machine."""
    command = "python integration_tests/table.py writes both pages anew"
    assert table.PAGE.read_text(encoding="utf-8") == table.page(), command
    assert table.README.read_text(encoding="utf-8") == table.readme(), command
    assert sum(int(line.split(" | ")[-1].strip(" |")) for line in _plans(table.page())) == len(CASES)


def _plans(page: str) -> list[str]:
    """The lines of plans, which end with a number of runs."""
    return [
        line for line in page.splitlines() if line.endswith(" |") and line.strip(" |").rpartition("| ")[2].isdigit()
    ]


def test_what_was_measured_is_written_with_the_machine() -> None:
    """Of the largest of each kind; weights of float32, which are not judged, are left out."""
    cases = {case.name: case for case in CASES if case.world == 2}
    found = {name: {"losses": 1e-15, "grad_norms": 2e-15, "weights": 3e-15} for name in cases}
    found[next(name for name, case in cases.items() if case.model.dtype == "float64")]["losses"] = 1.26e-14
    lines = list(table.largest({2: {"cases": found}}))
    number = sum(case.model.dtype == "float64" for case in cases.values())
    assert lines[0] == f"float64, {number} plans: losses 1.3e-14, gradient norms 2.0e-15, weights 3.0e-15"
    assert lines[1] == f"float32, {len(cases) - number} plans: losses 1.0e-15, gradient norms 2.0e-15"
    page = table.measured({2: {"cases": found}})
    assert f"measured on {table.machine()}, 2" in page.splitlines()[0]
    assert page.count("\n|") == 2 + len(cases)
