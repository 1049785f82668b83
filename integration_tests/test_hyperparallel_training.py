"""The engine `hyperparallel` on CPU ranks, over a double of the library; and the double against closed forms.

The double is `hyperparallel_stand_in`, which says what it models. `hyperparallel_ranks.py` has run it all.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cases import SCENARIOS
from hyperparallel_cases import DRAWN
from launching import launch

HERE = Path(__file__).parent
FURTHEST = {"loss": 1e-6, "mtp_loss": 1e-6, "balance_loss": 1e-6, "grad_norm": 2e-5, "valid_tokens": 0.0}
"""Of float32 from one rank in float64, relative, over the steps."""

Reports = dict[int, dict[str, Any]]


@pytest.fixture(scope="module")
def hyperparallel(
    corpora: dict[str, str], show: Callable[[str], None], tmp_path_factory: pytest.TempPathFactory
) -> Reports:
    """By world size what `hyperparallel_ranks.py` found."""
    folder, found = tmp_path_factory.mktemp("hyperparallel"), {}
    (folder / "corpora.json").write_text(json.dumps(corpora), encoding="utf-8")
    for world in (4, 8):
        launch(HERE / "hyperparallel_ranks.py", world, folder, cwd=Path(corpora["plain"]).parent, show=show)
        found[world] = json.loads((folder / f"hyperparallel-{world}.json").read_text(encoding="utf-8"))
    return found


def assert_near(found: dict[str, float]) -> None:
    assert {"loss", "grad_norm", "valid_tokens"} <= found.keys()
    far = {name: value for name, value in found.items() if not value <= FURTHEST[name]}
    assert not far


@pytest.mark.parametrize("name", [path.stem for path in SCENARIOS])
def test_scenarios_on_eight_ranks_equal_one_rank(hyperparallel: Reports, name: str) -> None:
    assert_near(hyperparallel[8]["trained"][name])


def test_drawn_plans_equal_one_rank(hyperparallel: Reports) -> None:
    trained = hyperparallel[4]["trained"]
    assert len(trained) == sum(DRAWN.values())
    for name, found in trained.items():
        print(name)  # shown with what is too far
        assert_near(found)


@pytest.mark.parametrize(
    "check", ["units_add_up", "tensor_parallel_gradients", "pipelines_add_up", "contexts_give_whole_attention"]
)
def test_the_double_computes_closed_forms(hyperparallel: Reports, check: str) -> None:
    of_ranks = [found[check] for found in hyperparallel[4]["checks"]]
    assert max(value for found in of_ranks for value in found.values()) < 1e-12, of_ranks


def test_gradients_of_replicas_are_added_up(hyperparallel: Reports) -> None:
    of_ranks = [found["replicas_add_up"] for found in hyperparallel[4]["checks"]]
    assert max(found["shards"] for found in of_ranks) < 1e-6  # in main_grad, which is float32
    assert max(found["whole"] for found in of_ranks) < 1e-12


def test_the_double_refuses_what_the_library_does_not_take(hyperparallel: Reports) -> None:
    for found in hyperparallel[4]["checks"]:
        said = found["what_is_refused"]
        assert "this is a float" in said["a number as gradient"]
        assert "take to_local()" in said["an operator on a DTensor"]
        assert "its rows over 4 ranks" in said["uneven rows"]
        assert "it has no group" in said["an axis without a group"]
        assert "only sums" in said["another sum"]
