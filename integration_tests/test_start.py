"""Starts in surroundings that people really have: batch systems, shells of srun, small shared memory, nohup, SIGKILL.

The cases PUB2-LAUNCH-01 to -04, with their model and environments. What other variables do, and what ranks need, is
tested without a model in `packages/trainer/tests/test_launch_environment.py` and `packages/device-mesh/tests`.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType

import psutil
import pytest
from small_runs import write
from test_command import COMMAND, metrics, refused, running

pytestmark = pytest.mark.timeout(300)

SHM = Path("/dev/shm")
SLURM = {
    "SLURM_JOB_ID": "77",
    "SLURM_JOBID": "77",
    "SLURM_JOB_NODELIST": socket.gethostname(),
    "SLURM_NODELIST": socket.gethostname(),
    "SLURM_NNODES": "1",
    "SLURM_TASKS_PER_NODE": "2",
}
PMIX = {"PMIX_RANK": "0", "PMIX_NAMESPACE": "slurm.pmix.7.0"}
THREADS = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}


def written(folder: Path, corpus: str, steps: int = 3) -> Path:
    return write(folder / "start.yaml", steps=steps, corpus=corpus, samples=12, checkpoint="{enable_save: false}")


def run(
    config: Path, ranks: int, environment: Mapping[str, str] = MappingProxyType({}), before: tuple[str, ...] = ()
) -> subprocess.CompletedProcess[str]:
    command = [*before, *COMMAND, "run", str(config), "--nproc", str(ranks), "--output", "out"]
    return subprocess.run(
        command,
        cwd=config.parent,
        env=os.environ | THREADS | environment,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


@pytest.mark.parametrize(
    ("environment", "ranks"), [(SLURM, 2), (PMIX, 1), (PMIX, 2)], ids=["LAUNCH-01", "LAUNCH-02-1", "LAUNCH-02-2"]
)
def test_variables_of_a_batch_system_do_not_decide_how_ranks_start(
    corpus: str, tmp_path: Path, environment: dict[str, str], ranks: int
) -> None:
    """PUB2-LAUNCH-01 and PUB2-LAUNCH-02; there is no srun."""
    done = run(written(tmp_path, corpus), ranks, environment)
    assert done.returncode == 0, done.stderr
    assert len(metrics(tmp_path / "out")) == 3


@pytest.mark.parametrize(
    ("size", "ranks", "said"),
    [("1m", 2, "need 2.1 MiB"), ("4m", 4, "need 4.2 MiB"), ("64m", 4, "")],
)
def test_shared_memory_of_a_container(corpus: str, tmp_path: Path, size: str, ranks: int, said: str) -> None:
    """PUB2-LAUNCH-03."""
    mount = f"mount -t tmpfs -o size={size} tmpfs {SHM}"
    if subprocess.run(["unshare", "-m", *mount.split()], check=False, capture_output=True).returncode:
        pytest.skip("needs root, to mount another /dev/shm in a namespace")
    done = run(written(tmp_path, corpus), ranks, before=("unshare", "-m", "sh", "-c", f'{mount} && exec "$@"', "sh"))
    if said:
        refused(done, "/dev/shm", f"free of {float(size[:-1]):.1f} MiB", f"{ranks} ranks", said, "--shm-size")
        assert done.returncode == 2
        assert not (tmp_path / "out").exists()
    else:
        assert done.returncode == 0, done.stderr


def begun(config: Path, ranks: int, *ignored: signal.Signals) -> subprocess.Popen[bytes]:
    """A run that has finished its first step, started as by a parent that ignores signals."""
    with (config.parent / "log").open("w") as log:
        process = subprocess.Popen(
            [*COMMAND, "run", str(config), "--nproc", str(ranks), "--output", "out"],
            cwd=config.parent,
            env=os.environ | THREADS,
            stdout=log,
            stderr=subprocess.STDOUT,
            preexec_fn=lambda: [signal.signal(number, signal.SIG_IGN) for number in ignored],
        )
    deadline = time.monotonic() + 120
    while not (config.parent / "out" / "metrics.jsonl").exists():
        assert process.poll() is None, (config.parent / "log").read_text()
        assert time.monotonic() < deadline
        time.sleep(0.1)
    return process


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_run_that_is_killed_leaves_no_shared_memory(corpus: str, tmp_path: Path, ranks: int) -> None:
    """PUB2-LAUNCH-04: SIGKILL to all of its processes after the first step."""
    before = set(SHM.iterdir())
    config = written(tmp_path, corpus, steps=2000)
    with begun(config, ranks) as process:
        for victim in running(str(config)):
            victim.kill()
        process.wait(30)
    deadline = time.monotonic() + 10
    while (running(str(config)) or left_since(before)) and time.monotonic() < deadline:
        time.sleep(0.1)  # files of other programs on this machine go, for their ranks unlink them or end
    assert left_since(before) == set()


def left_since(before: set[Path]) -> set[Path]:
    """New files of MPI that no process has: not those of other programs on this machine, which may just start."""
    mapped = set()
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            mapped |= {mapping.path for mapping in process.memory_maps()}
    return {path for path in set(SHM.glob("mpich_*")) - before if str(path) not in mapped}


def test_a_run_in_the_background_outlives_its_terminal_and_ends_when_asked_to(corpus: str, tmp_path: Path) -> None:
    """As `nohup parallel-train run FILE &` starts it: without SIGINT and SIGHUP, with SIGTERM."""
    config = written(tmp_path, corpus, steps=100_000)
    with begun(config, 2, signal.SIGINT, signal.SIGHUP) as process:
        for number in (signal.SIGINT, signal.SIGHUP):
            process.send_signal(number)
        known = len(metrics(tmp_path / "out"))
        deadline = time.monotonic() + 60
        while len(metrics(tmp_path / "out")) <= known + 2:
            assert process.poll() is None, (tmp_path / "log").read_text()
            assert time.monotonic() < deadline
            time.sleep(0.1)
        process.terminate()
        assert process.wait(30) == 130, (tmp_path / "log").read_text()
    assert running(str(config)) == []
    assert (tmp_path / "out" / "loss_curve.png").read_bytes().endswith(b"IEND\xaeB`\x82")
