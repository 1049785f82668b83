"""Every collective and gradient on 1, 2, 3, 4 and 8 ranks: the cases of rank_cases/, launched once."""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest

PROGRAM = Path(__file__).with_name("rank_cases")
MPIEXEC = Path(sys.executable).with_name("mpiexec")
RANKS = 8
CASES = runpy.run_path(str(PROGRAM))["CASES"]

Results = dict[tuple[str, int], dict[int, dict[str, str]]]


@pytest.fixture(scope="module")
def launch(tmp_path_factory: pytest.TempPathFactory) -> tuple[Results, str]:
    """What each rank reported, by case and world size, and how the launch ended."""
    folder = tmp_path_factory.mktemp("results")
    command = [MPIEXEC, "-n", str(RANKS), sys.executable, "-W", "ignore", str(PROGRAM), str(folder)]
    single_threaded = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "GLOG_v": "3"}
    try:
        done = subprocess.run(command, env=os.environ | single_threaded, capture_output=True, text=True, timeout=280)
        ending = f"exit code {done.returncode}\n{done.stdout[-4000:]}{done.stderr[-4000:]}"
    except subprocess.TimeoutExpired as error:
        ending = f"hung; {error.stderr!r}"
    results: Results = defaultdict(dict)
    for rank in range(RANKS):
        for line in (folder / f"{rank}.jsonl").read_text().splitlines():
            report = json.loads(line)
            results[report["case"], report["world"]][rank] = report["failures"]
    return results, ending


@pytest.mark.parametrize(("case", "world"), [(name, world) for name, case in CASES.items() for world in case.worlds])
def test_on_ranks(launch: tuple[Results, str], case: str, world: int) -> None:
    results, ending = launch
    reports = results[case, world]
    failures = [
        f"rank {rank}, {mode}:\n{text}" for rank, modes in sorted(reports.items()) for mode, text in modes.items()
    ]
    assert not failures, "\n".join(failures)
    assert sorted(reports) == list(range(RANKS)), f"not every rank finished; {ending}"


def test_the_launch_ends_well(launch: tuple[Results, str]) -> None:
    assert launch[1].startswith("exit code 0\n"), launch[1]
