"""The specification's scenarios, complete files in docs/scenarios/specification, each on eight ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from cases import SCENARIOS
from parallel_config import load, plan

# What the specification says that the framework infers; where it has 16 devices, here with half as many.
INFERRED: dict[str, dict[str, int]] = {
    "overview-one-device": {"dp_replicate": 1, "dp_shard": 8, "cp": 1, "tp": 1, "pp": 1, "ep": 1},
    "1.4-a-fsdp": {"dp_replicate": 1, "dp_shard": 8},
    "1.4-b-hsdp": {"dp_replicate": 2, "dp_shard": 4},
    "2.4-tensor": {"data_parallel": 4, "dp_shard": 4, "tp": 2},
    "3.5-a-colossal": {"dp_shard": 4, "fsdp": 8, "cp": 2},
    "3.5-a-colossal-packed": {"dp_shard": 4, "fsdp": 8, "cp": 2},
    "3.5-b-ulysses": {"data_parallel": 2, "cp": 4, "ulysses_degree": 4},
    "3.5-c-hybrid": {"data_parallel": 2, "cp": 4, "ulysses_degree": 2},
    "4.4-1-even-stages": {"dp_shard": 1, "tp": 4, "pp": 2, "interleave_num": 2},
    "4.4-2-uneven-stages": {"dp_shard": 1, "tp": 4, "pp": 2, "interleave_num": 2},
    "5.4-a-experts": {"dp_shard": 2, "tp": 4, "ep": 2, "efsdp": 4},
    "5.4-b-experts-across-nodes": {"dp_shard": 4, "tp": 2, "ep": 4, "efsdp": 2},
}


def test_every_scenario_is_here() -> None:
    assert {path.stem for path in SCENARIOS} == set(INFERRED)


@pytest.mark.parametrize("path", SCENARIOS, ids=lambda path: path.stem)
def test_plan_of_a_scenario_is_the_specifications(path: Path) -> None:
    made = plan(load(path), 8)
    assert {name: getattr(made, name) for name in INFERRED[path.stem]} == INFERRED[path.stem]


def test_layers_of_a_scenario_are_the_specifications() -> None:
    layers = {path.stem: plan(load(path), 8).stage_layers for path in SCENARIOS}
    assert layers["4.4-1-even-stages"] == ((0, 1), (2, 3), (4, 5), (6, 7))
    assert layers["4.4-2-uneven-stages"] == ((0, 1), (2, 3), (4, 8), (9, 9))


@pytest.mark.parametrize("path", SCENARIOS, ids=lambda path: path.stem)
def test_scenario_trains_as_one_rank_does(path: Path, reports: dict[int, dict[str, Any]]) -> None:
    found = reports[8]["scenarios"][path.stem]
    assert found["loads"] == 0
    assert max(found["losses"], found["grad_norms"], found["weights"]) < 1e-9
