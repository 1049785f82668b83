"""Every collective and gradient: the cases of rank_cases/ on 1, 2, 3, 4 and 8 ranks over MPI, and on 2 and 4 over mccl.

The ranks are launched once by mpiexec, and once by msrun for each of its numbers of workers, these at the same time.
"""

from __future__ import annotations

import json
import os
import runpy
import socket
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from pathlib import Path

import pytest
from attrs import frozen
from device_mesh.variables import for_own_mpiexec

PROGRAM = Path(__file__).with_name("rank_cases")
BIN = Path(sys.executable).parent
CASES = runpy.run_path(str(PROGRAM))["CASES"]
RANKS = {"mpi": (8,), "mccl": (2, 4)}
LAUNCH_SECONDS = 900.0
"""Only ranks that hang need it: 14 share the cores."""
pytestmark = pytest.mark.timeout(2 * LAUNCH_SECONDS)

Results = dict[tuple[str, int], dict[int, dict[str, str]]]


@frozen
class Launch:
    """What each rank reported, by case and world size, and how the launch ended."""

    results: Results
    ending: str


@pytest.fixture(scope="module")
def launch(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str, int], Launch]]:
    """The launch of so many ranks over "mpi" or "mccl"; the first that is asked for starts all of its carrier."""
    with ThreadPoolExecutor() as pool:

        @cache
        def start(carrier: str) -> dict[int, Future[Launch]]:
            return {
                ranks: pool.submit(run, carrier, ranks, tmp_path_factory.mktemp("results")) for ranks in RANKS[carrier]
            }

        yield lambda carrier, ranks: start(carrier)[ranks].result()


def run(carrier: str, ranks: int, folder: Path) -> Launch:
    if carrier == "mpi":
        command = [BIN / "mpiexec", "-n", str(ranks), sys.executable, "-W", "ignore", PROGRAM, folder, "mpi", "end"]
    else:
        number = f"--worker_num={ranks} --local_worker_num={ranks} --master_port={free_port()} --join=True"
        command = [BIN / "msrun", *number.split(), f"--log_dir={folder}", PROGRAM / "__main__.py", folder, "mindspore"]
        command.append("fail" if ranks == 2 else "end")
    environment = for_own_mpiexec(os.environ)
    environment |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "GLOG_v": "3"}
    environment |= {"PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}"}
    environment |= {"MS_NODE_TIMEOUT": "10"}  # how soon MindSpore's scheduler notices that its workers were ended
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=LAUNCH_SECONDS)
        ending = f"exit code {done.returncode}\n{done.stdout[-4000:]}{done.stderr[-4000:]}"
    except subprocess.TimeoutExpired as error:
        ending = f"hung; {error.stderr!r}"
    results: Results = defaultdict(dict)
    for rank in range(ranks):
        for line in (folder / f"{rank}.jsonl").read_text().splitlines():
            report = json.loads(line)
            results[report["case"], report["world"]][rank] = report["failures"]
    return Launch(results, ending)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


OVER_MPI = [("mpi", 8, name, world) for name, case in CASES.items() for world in case.worlds]
OVER_MCCL = [
    ("mccl", ranks, name, ranks) for ranks in RANKS["mccl"] for name, case in CASES.items() if ranks in case.mccl
]


@pytest.mark.parametrize(("carrier", "ranks", "case", "world"), OVER_MPI + OVER_MCCL)
def test_on_ranks(launch: Callable[[str, int], Launch], carrier: str, ranks: int, case: str, world: int) -> None:
    launched = launch(carrier, ranks)
    reports = launched.results[case, world]
    failures = [
        f"rank {rank}, {mode}:\n{text}" for rank, modes in sorted(reports.items()) for mode, text in modes.items()
    ]
    assert not failures, "\n".join(failures)
    assert sorted(reports) == list(range(ranks)), f"not every rank finished; {launched.ending}"


@pytest.mark.parametrize(("carrier", "ranks"), [("mpi", 8), ("mccl", 4)])
def test_the_launch_ends_well(launch: Callable[[str, int], Launch], carrier: str, ranks: int) -> None:
    ending = launch(carrier, ranks).ending
    assert ending.startswith("exit code 0\n"), ending


def test_a_failing_rank_ends_the_launch(launch: Callable[[str, int], Launch]) -> None:
    """The other rank, which waits for a message, is ended before mccl gives up by itself."""
    ending = launch("mccl", 2).ending
    assert ending.startswith("exit code 1\n"), ending
    assert "rank 1 of 2 failed:" in ending
    assert ending.count("RuntimeError: rank 1 fails on purpose") == 1
    assert "mccl failed" not in ending
