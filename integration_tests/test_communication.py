"""What ranks hold and receive: planned, measured, and for tensor parallelism by the formula."""

from __future__ import annotations

from typing import Any

import pytest
from cases import CASES, GLOBAL_BATCH, SEQ_LENGTH, Case

Reports = dict[int, dict[str, Any]]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_run_holds_and_receives_what_the_plan_says(reports: Reports, case: Case) -> None:
    """Byte for byte on every rank; tokens on their way to experts aside."""
    assert reports[case.world]["cases"][case.name]["costs"] == "planned"


@pytest.mark.parametrize(("world", "least"), [(2, 3), (4, 10), (8, 5)])
def test_tokens_that_go_to_all_experts_alike_cost_what_the_plan_says(reports: Reports, world: int, least: int) -> None:
    found = reports[world]["checks"]["even_communication"]
    assert len(found) >= least
    assert [entry for entry in found.values() if entry["ranks that differ"]] == []
    assert all(entry["measured"]["ep (even routing)"] > 0 for entry in found.values())


@pytest.mark.parametrize(("world", "nodes"), [(2, 3), (4, 4), (8, 4)])
def test_every_pair_of_experts_costs_what_even_routing_is_planned_to_cost(
    reports: Reports, world: int, nodes: int
) -> None:
    found = reports[world]["checks"]["expert_exchange"]
    assert len(found) == nodes
    for entry in found.values():
        assert entry["measured"] == entry["planned"]
        assert entry["measured"][2] > 0


@pytest.mark.parametrize("world", [2, 4])
def test_a_block_gathers_and_scatters_twice_each_way(reports: Reports, world: int) -> None:
    """batch · seq · hidden / tp float64 numbers from each of the other ranks: no collective is lost or doubled."""
    found = reports[world]["checks"]["layer_traffic"]
    border = (world - 1) * GLOBAL_BATCH * SEQ_LENGTH * 20 // world * 8
    assert found["embedding forward"] == [["reduce_scatter", border]]
    assert found["layers.0 forward"] == [["all_gather", border], ["reduce_scatter", border]] * 2
    # The gradients of the feed-forward come first, each gathered before its products and scattered after them.
    assert found["layers.0 backward"] == [["all_gather", border], ["reduce_scatter", border]] * 2
    # Three numbers a token instead of its logits: the largest in the model's type, two sums in float64.
    tokens = GLOBAL_BATCH * SEQ_LENGTH
    numbers = [["all_reduce", 2 * tokens * 8 * count * (world - 1) // world] for count in (1, 2)]
    assert found["head forward"] == [["all_gather", border], *numbers]
    assert found["head backward"] == [["reduce_scatter", border]]


@pytest.mark.parametrize("world", [2, 4])
def test_a_shared_expert_is_computed_while_tokens_and_results_travel(reports: Reports, world: int) -> None:
    """Its borders of tensor parallelism lie within the exchanges of expert parallelism, forward and backward."""
    found = reports[world]["checks"]["experts_meanwhile"]
    attention, counts, weights = ["tp start", "tp end"] * 3, ["ep start", "ep end"], ["ep start", "ep end"] * 2
    within = ["ep start", "tp start", "tp end", "ep end"]
    assert found["layers.1 forward"] == [*attention, *counts, *within, *within]
    # Results' gradients while the shared expert's last matrix is differentiated, tokens' while its first are.
    assert found["layers.1 backward"] == [*within, *weights, *within, *attention[2:]]


def test_weights_and_gradients_travel_while_the_unit_beside_runs(reports: Reports) -> None:
    found = reports[4]["checks"]["units_meanwhile"]
    assert len(found) == 3
    assert found == {travelling: ["start", "the unit runs", "end"] for travelling in found}


def test_one_rank_calls_nothing_within_its_model(reports: Reports) -> None:
    """Valid tokens, losses over ranks and stages, the norm, whether the update was finite.

    Each is called in a group of one, from which nothing is received.
    """
    numbers = ("loss", "loss", "pp", "world", "world")
    assert reports[1]["checks"]["calls_of_one_rank"]["calls"] == [[group, "all_reduce", "", 0] for group in numbers]


@pytest.mark.parametrize(("world", "least"), [(1, 4), (2, 25), (4, 25)])
def test_a_run_keeps_what_the_plan_says(reports: Reports, world: int, least: int) -> None:
    """Byte for byte, of activations within 1 percent: token ids and their places are left out of the plan."""
    found = reports[world]["checks"]["held_memory"]
    assert len(found) >= least
    ranks = [(case, rank, numbers) for case, rows in found.items() for rank, numbers in enumerate(rows)]
    assert len(ranks) == world * len(found)
    for case, rank, numbers in ranks:
        for kind, (measured, planned) in numbers.items():
            tolerance = 0.01 if kind == "activations" else 0
            assert planned == pytest.approx(measured, rel=tolerance, abs=0), (case, rank, kind)
    kinds = {kind for _, _, numbers in ranks for kind, (measured, _) in numbers.items() if measured}
    assert len(kinds) == (6 if world > 1 else 5)
