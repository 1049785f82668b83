"""Shared memory: how much ranks need, what is said where it is short, and that killed ranks leave none.

Small folders are mounted over /dev/shm in a mount namespace, which no other process sees.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Timer
from types import SimpleNamespace

import pytest
from device_mesh import Launch, LaunchError, mpi_start, shared_memory
from device_mesh.shared_memory import check, needed_bytes
from device_mesh.variables import for_own_mpiexec

BIN = Path(sys.executable).parent
SECONDS = 120.0
SHM = Path("/dev/shm")
CELLS = "MPIR_CVAR_CH4_SHM_POSIX_IQUEUE_NUM_CELLS"
CELL_SIZE = "MPIR_CVAR_CH4_SHM_POSIX_IQUEUE_CELL_SIZE"
PROGRAM = """\
import sys, time
from device_mesh import connect
comm = connect()
print(f"rank {comm.rank} of {comm.size}\\n", end="", flush=True)
comm.barrier()
"""


# Sizes of the file of MPICH 5.0.2 in /dev/shm, by number of ranks.
@pytest.mark.parametrize(
    ("ranks", "environment", "measured"),
    [
        (2, {}, 2_118_784),
        (3, {}, 3_176_128),
        (4, {}, 4_233_472),
        (8, {}, 8_462_848),
        (16, {}, 16_921_600),
        (4, {CELLS: "128"}, 8_460_544),
        (4, {CELL_SIZE: "32768"}, 8_427_776),
        (4, {CELL_SIZE: "many"}, 4_233_472),
    ],
)
def test_what_is_asked_for_is_what_mpi_takes_and_a_twentieth(
    ranks: int, environment: dict[str, str], measured: int
) -> None:
    assert needed_bytes(ranks, environment) == pytest.approx(measured * 1.05, abs=2)


@pytest.mark.parametrize(
    ("size_mib", "free_mib", "ranks", "said"),
    [
        (1, 1, 2, ["1.0 MiB free of 1.0 MiB", "2 ranks on one machine need 2.1 MiB", "run 1 rank."]),
        (4, 4, 4, ["4.0 MiB free of 4.0 MiB", "4 ranks on one machine need 4.2 MiB", "run 3 ranks."]),
        (64, 3, 4, ["3.0 MiB free of 64.0 MiB", "delete what fills it", "run 2 ranks.", "--shm-size=128m"]),
        (64, 64, 4, []),
        (64, 64, 32, []),
        (64, 64, 64, ["need 67.8 MiB", "run 60 ranks.", "--shm-size=128m"]),
        (1, 1, 1, []),
        (0, 0, 8, []),  # a tmpfs without a limit
    ],
)
def test_folders_of_all_sizes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size_mib: int, free_mib: int, ranks: int, said: list[str]
) -> None:
    """PUB2-LAUNCH-03, by what the system says of the folder."""
    found = SimpleNamespace(f_bavail=free_mib * 256, f_frsize=4096, f_blocks=size_mib * 256)
    monkeypatch.setattr(shared_memory.os, "statvfs", lambda folder: found)
    if not said:
        check(ranks, {}, folder=tmp_path)
        return
    with pytest.raises(LaunchError) as error:
        check(ranks, {}, folder=tmp_path)
    for words in (str(tmp_path), *said):
        assert words in str(error.value)


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match="nowhere does not exist, and 2 ranks on one machine"):
        check(2, {}, folder=tmp_path / "nowhere")
    check(1, {}, folder=tmp_path / "nowhere")


def test_a_folder_that_cannot_be_written_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_memory.os, "access", lambda folder, mode: False)
    with pytest.raises(LaunchError, match="cannot be written to, and 2 ranks"):
        check(2, {}, folder=tmp_path)


@pytest.mark.parametrize(
    ("launch", "said"),
    [
        (Launch("mpi", 64, 0, 0, 64), "64 ranks on one machine need 67.8 MiB"),
        (Launch("mpi", 64, 0, 0, 32), None),
        (Launch("mpi", 64, 32, 0, 32), None),  # the first of the second node
        (Launch("mpi", 128, 64, 0, 64), "64 ranks on one machine need 67.8 MiB"),
        (Launch("mpi", 64, 0), None),  # on one machine or on several: nobody knows
    ],
)
def test_ranks_of_several_machines_need_the_memory_of_their_own(
    monkeypatch: pytest.MonkeyPatch, launch: Launch, said: str | None
) -> None:
    """Ranks of `srun --mpi=pmi2`, with Docker's 64 MiB on each machine."""
    found = SimpleNamespace(f_bavail=64 * 256, f_frsize=4096, f_blocks=64 * 256)
    monkeypatch.setattr(shared_memory.os, "statvfs", lambda folder: found)
    monkeypatch.setattr(mpi_start.atexit, "register", lambda end: None)
    for name in ("MPI_LOCALNRANKS", "PMI_FD"):
        monkeypatch.delenv(name, raising=False)
    if said is None:
        mpi_start.check_memory(launch)
        return
    with pytest.raises(LaunchError, match=said):
        mpi_start.check_memory(launch)


@pytest.fixture
def script(tmp_path: Path) -> Path:
    (tmp_path / "ranks.py").write_text(PROGRAM, encoding="utf-8")
    return tmp_path / "ranks.py"


def in_namespace(mount: str, command: Sequence[str | Path]) -> subprocess.CompletedProcess[str]:
    """A command that sees another /dev/shm; nothing that it mounts outlives it."""
    probe = subprocess.run(["unshare", "-m", "mount", "-t", "tmpfs", "tmpfs", SHM], check=False, capture_output=True)
    if probe.returncode:
        pytest.skip(f"needs root, to mount another /dev/shm in a namespace: {probe.stderr.decode().strip()}")
    isolated = ["unshare", "-m", "sh", "-c", f'{mount} && exec "$@"', "sh", *map(str, command)]
    with started(isolated, cwd=Path(str(command[-1])).parent) as job:
        stdout, stderr = job.communicate()
    return subprocess.CompletedProcess(isolated, job.returncode, stdout, stderr)


@contextmanager
def started(command: list[str], cwd: Path | None = None) -> Iterator[subprocess.Popen[str]]:
    """A launcher, told to start its ranks on this machine; it is killed with them after a while, and at the end."""
    environment = for_own_mpiexec(os.environ)
    environment |= {"OMP_NUM_THREADS": "1", "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}", "GLOG_v": "3"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, env=environment, cwd=cwd, text=True, start_new_session=True, **pipes) as job:
        timer = Timer(SECONDS, _end, [job])
        timer.start()
        try:
            yield job
        finally:
            timer.cancel()
            _end(job)


def _end(job: subprocess.Popen[str]) -> None:
    """mpiexec ends its ranks, which are no members of its group, when it is asked to; some launchers do not listen."""
    with suppress(ProcessLookupError):
        if job.poll() is None:
            os.killpg(job.pid, signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                job.wait(5)
        os.killpg(job.pid, signal.SIGKILL)


SMALL = "mount -t tmpfs -o size={} tmpfs /dev/shm"


@pytest.mark.parametrize(
    ("mount", "ranks", "said"),
    [
        (SMALL.format("1m"), 2, "/dev/shm has 1.0 MiB free of 1.0 MiB, and 2 ranks on one machine need 2.1 MiB"),
        (SMALL.format("4m"), 4, "/dev/shm has 4.0 MiB free of 4.0 MiB, and 4 ranks on one machine need 4.2 MiB"),
        (
            SMALL.format("64m") + " && head -c 63M /dev/zero > /dev/shm/other",
            2,
            "/dev/shm has 1.0 MiB free of 64.0 MiB, and 2 ranks",
        ),
        ("mount -t tmpfs -o ro tmpfs /dev/shm", 2, "/dev/shm cannot be written to, and 2 ranks"),
    ],
    ids=["1m", "4m", "full", "read-only"],
)
def test_mpiexec_where_memory_is_short(script: Path, mount: str, ranks: int, said: str) -> None:
    """PUB2-LAUNCH-03: one message names the folder and the sizes, and all ranks end."""
    done = in_namespace(mount, [BIN / "mpiexec", "-n", str(ranks), sys.executable, script])
    assert done.returncode == 2, done.stderr
    assert done.stderr.count(said) == 1, done.stderr
    assert "signal" not in done.stderr


@pytest.mark.parametrize(("size", "ranks"), [("64m", 4), ("5m", 4), ("16m", 8)])
def test_mpiexec_where_memory_suffices(script: Path, size: str, ranks: int) -> None:
    done = in_namespace(SMALL.format(size), [BIN / "mpiexec", "-n", str(ranks), sys.executable, script])
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.split("\n")[:-1]) == [f"rank {rank} of {ranks}" for rank in range(ranks)]


def test_msrun_where_memory_is_short(script: Path) -> None:
    command = [BIN / "msrun", "--worker_num=2", "--local_worker_num=2", "--master_port=0", "--join=True"]
    done = in_namespace(SMALL.format("1m"), [*command, f"--log_dir={script.parent / 'logs'}", script])
    assert done.returncode != 0
    logs = [(script.parent / "logs" / f"worker_{rank}.log").read_text(encoding="utf-8") for rank in range(2)]
    assert sum(log.count("/dev/shm has 1.0 MiB free of 1.0 MiB, and 2 ranks on one machine") for log in logs) == 1


def left_since(before: set[Path]) -> set[Path]:
    """New files of MPI that no process has: not those of other programs on this machine, which may just start."""
    deadline = time.monotonic() + 10
    while (left := {path for path in set(SHM.glob("mpich_*")) - before if not _is_mapped(path)}) and (
        time.monotonic() < deadline
    ):
        time.sleep(0.1)
    return left


def _is_mapped(path: Path) -> bool:
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with suppress(OSError):
            if str(path) in maps.read_text(encoding="utf-8", errors="replace"):
                return True
    return False


OF_SLURM = {
    "HYDRA_LAUNCHER": "slurm",
    "SLURM_JOB_ID": "1",
    "SLURM_NNODES": "2",
    "SLURM_NODELIST": "a[1-2]",
    "SLURM_JOB_NODELIST": "a[1-2]",
    "SLURM_TASKS_PER_NODE": "2(x2)",
}


@pytest.mark.parametrize(("ranks", "variables"), [(1, OF_SLURM), (2, {})])
def test_ranks_that_are_killed_leave_nothing(
    script: Path, monkeypatch: pytest.MonkeyPatch, ranks: int, variables: dict[str, str]
) -> None:
    """PUB2-LAUNCH-04: mpiexec and its ranks, all by SIGKILL; a batch system's variables change nothing."""
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    script.write_text(PROGRAM + "time.sleep(60)\n", encoding="utf-8")
    before = set(SHM.glob("mpich_*"))
    command = [str(BIN / "mpiexec"), "-n", str(ranks), sys.executable, str(script)]
    with started(command) as job:
        assert job.stdout is not None
        assert {job.stdout.readline() for _ in range(ranks)} == {f"rank {rank} of {ranks}\n" for rank in range(ranks)}
        time.sleep(0.5)  # past the barrier
        victims = [int(pid) for pid in os.listdir("/proc") if pid.isdigit() and str(script) in _command(pid)]
        for pid in [job.pid, *victims]:
            os.kill(pid, 9)
    while any(map(_command, map(str, victims))):
        time.sleep(0.1)
    assert left_since(before) == set()


def test_one_rank_of_mpi_leaves_nothing_either(script: Path) -> None:
    """`connect("mpi")` without a launcher, which starts MPI."""
    before = set(SHM.glob("mpich_*"))
    program = "import os; from device_mesh import connect; connect('mpi'); os.kill(os.getpid(), 9)"
    with started([sys.executable, "-c", program]) as job:
        assert job.wait() == -9
    assert left_since(before) == set()


def _command(pid: str) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text(encoding="utf-8").replace("\0", " ")
    except OSError:
        return ""
