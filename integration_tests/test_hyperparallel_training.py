"""The engine `hyperparallel` on CPU ranks, over a double of the library; and the double against closed forms.

The double is `hyperparallel_stand_in`: what it models is said there.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from parallel_trainer.launch.mpiexec import rank_environment

HERE = Path(__file__).parent
WORLDS = (2, 4)
Reports = dict[int, dict[str, Any]]

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def hyperparallel(tmp_path_factory: pytest.TempPathFactory) -> Reports:
    """By world size what `hyperparallel_ranks.py` found."""
    folder, found = tmp_path_factory.mktemp("hyperparallel"), {}
    for world in WORLDS:
        job = subprocess.run(
            [
                *(str(Path(sys.executable).parent / "mpiexec"), "-n", str(world), sys.executable),
                *(str(HERE / "hyperparallel_ranks.py"), str(folder)),
            ],
            cwd=folder,
            env=rank_environment(world, os.environ),
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert job.returncode == 0, f"{world} ranks ended with {job.returncode}:\n{job.stdout}\n{job.stderr}"
        found[world] = json.loads((folder / f"hyperparallel-{world}.json").read_text(encoding="utf-8"))
    return found


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize(
    "check",
    ["units_add_up", "tensor_parallel_gradients", "pipelines_add_up", "contexts_give_whole_attention"],
)
def test_the_double_computes_closed_forms(hyperparallel: Reports, world: int, check: str) -> None:
    of_ranks = [found[check] for found in hyperparallel[world]["checks"]]
    assert max(value for found in of_ranks for value in found.values()) < 1e-12, of_ranks


@pytest.mark.parametrize("world", [2, 4])
def test_gradients_of_replicas_are_added_up_once_a_step(hyperparallel: Reports, world: int) -> None:
    of_ranks = [found["replicas_add_up_once"] for found in hyperparallel[world]["checks"]]
    assert max(found["shards"] for found in of_ranks) < 1e-6  # in main_grad, which is float32
    assert max(found["whole"] for found in of_ranks) < 1e-12


@pytest.mark.parametrize("world", [2, 4])
def test_the_double_refuses_what_the_library_does_not_take(hyperparallel: Reports, world: int) -> None:
    for found in hyperparallel[world]["checks"]:
        said = found["what_is_refused"]
        assert "this is a float" in said["a number as gradient"]
        assert "take to_local()" in said["an operator on a DTensor"]
        assert f"its rows over {world} ranks" in said["uneven rows"]
        assert "it has no group" in said["an axis without a group"]
        assert "only sums" in said["another sum"]
