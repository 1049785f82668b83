"""Both dispatchers on 1, 2, 3, 4 and 8 ranks, and their gradients in MindSpore on 2: the cases of rank_cases/."""

from __future__ import annotations

import importlib.util
import json
import os
import runpy
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest
from device_mesh.variables import for_own_mpiexec

PROGRAM = Path(__file__).with_name("rank_cases")
MPIEXEC = Path(sys.executable).with_name("mpiexec")
RANKS = {"numpy": 8, "mindspore": 2}
CASES = runpy.run_path(str(PROGRAM))["CASES"]

Results = dict[tuple[int, str], dict[int, str | None]]


def launch(cases: str, folder: Path) -> tuple[Results, str]:
    """What each rank reported, by world size and case, and how the launch ended."""
    command = [MPIEXEC, "-n", str(RANKS[cases]), sys.executable, "-W", "ignore", str(PROGRAM), str(folder), cases]
    single_threaded = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "GLOG_v": "3"}
    try:
        done = subprocess.run(
            command, env=for_own_mpiexec(os.environ | single_threaded), capture_output=True, text=True, timeout=240
        )
        ending = f"exit code {done.returncode}\n{done.stdout[-4000:]}{done.stderr[-4000:]}"
    except subprocess.TimeoutExpired as error:
        ending = f"hung; {error.stderr!r}"
    results: Results = defaultdict(dict)
    for path in folder.glob("*.jsonl"):
        for line in path.read_text().splitlines():
            report = json.loads(line)
            results[report["world"], report["case"]][int(path.stem)] = report["failure"]
    return results, ending


@pytest.fixture(scope="module")
def numpy_launch(tmp_path_factory: pytest.TempPathFactory) -> tuple[Results, str]:
    return launch("numpy", tmp_path_factory.mktemp("numpy"))


@pytest.fixture(scope="module")
def mindspore_launch(tmp_path_factory: pytest.TempPathFactory) -> tuple[Results, str]:
    return launch("mindspore", tmp_path_factory.mktemp("mindspore"))


def check(launched: tuple[Results, str], world: int, case: str, ranks: int) -> None:
    results, ending = launched
    reports = results[world, case]
    failures = [f"rank {rank}:\n{failure}" for rank, failure in sorted(reports.items()) if failure]
    assert not failures, "\n".join(failures)
    assert sorted(reports) == list(range(ranks)), f"not every rank finished; {ending}"
    assert ending.startswith("exit code 0\n"), ending


@pytest.mark.parametrize(("world", "case"), list(CASES["numpy"]))
def test_on_ranks(numpy_launch: tuple[Results, str], world: int, case: str) -> None:
    check(numpy_launch, world, case, RANKS["numpy"])


@pytest.mark.skipif(
    importlib.util.find_spec("mindspore") is None,
    reason="MindSpore is not installed: pip install 'moe-dispatch[mindspore]'",
)
@pytest.mark.parametrize(("world", "case"), list(CASES["mindspore"]))
def test_gradients_in_mindspore(mindspore_launch: tuple[Results, str], world: int, case: str) -> None:
    check(mindspore_launch, world, case, RANKS["mindspore"])
