"""Ranks under a real msrun: they connect, and whatever goes wrong is said once, ends soon and leaves nothing behind."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
from attrs import define

BIN = Path(sys.executable).parent
LIMIT_SECONDS = 120.0
PROGRAM = """\
import os, sys, time
role, node_rank = os.environ["MS_ROLE"], os.environ.get("MS_NODE_ID")
EARLY
import numpy as np
from device_mesh import abort_on_error, connect

comm = connect()
with abort_on_error(comm):
    total = comm.all_reduce(np.arange(3.0) + comm.rank)
    print("rank", comm.rank, "of", comm.size, "has", total.tolist(), flush=True)
    BODY
"""


@define
class Job:
    """What one call of msrun leaves to look at."""

    process: subprocess.Popen[str]
    folder: Path

    def log(self, name: str) -> str:
        path = self.folder / f"{name}.log"
        return path.read_text(encoding="utf-8") if path.exists() else ""

    def wait(self) -> tuple[int, str]:
        """The exit code and what was on the terminal, which msrun ends with its own traceback of an error."""
        printed, _ = self.process.communicate(timeout=LIMIT_SECONDS)
        return self.process.returncode, printed

    def until(self, found: Callable[[], object]) -> None:
        """Wait until something can be seen."""
        deadline = time.monotonic() + LIMIT_SECONDS
        while not found():
            assert time.monotonic() < deadline, [path.read_text() for path in self.folder.iterdir()]
            time.sleep(0.1)


@pytest.fixture
def start(tmp_path: Path, port: int) -> Iterator[Callable[..., Job]]:
    """Start a program under msrun. At the end no process of it is left, and no shared memory."""
    memory = set(Path("/dev/shm").glob("mpich_*"))
    script = tmp_path / "ranks.py"
    jobs = []
    unconnected = False

    def launch(
        body: str = "pass",
        *,
        early: str = "",
        workers: int = 2,
        name: str = "logs",
        options: str = "",
        machine: Sequence[str] = (),
    ) -> Job:
        nonlocal unconnected
        unconnected |= "MPI" in early
        script.write_text(PROGRAM.replace("EARLY", early).replace("BODY", body), encoding="utf-8")
        numbers = "" if "local_worker_num" in options else f"--worker_num={workers} --local_worker_num={workers}"
        command = [*machine, BIN / "msrun", *numbers.split(), f"--master_port={port}", "--join=True"]
        environment = {name: value for name, value in os.environ.items() if not name.startswith("PMI")}
        environment |= {"PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}", "GLOG_v": "3"}
        environment |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "XDG_STATE_HOME": str(tmp_path)}
        with interruptible():
            process = subprocess.Popen(
                [*command, f"--log_dir={tmp_path / name}", *options.split(), str(script)],
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                env=environment,
            )
        jobs.append(Job(process, tmp_path / name))
        return jobs[-1]

    yield launch
    for job in jobs:
        job.process.kill()
        job.process.wait()
    deadline = time.monotonic() + LIMIT_SECONDS
    while (left := running(script)) and time.monotonic() < deadline:
        time.sleep(0.1)
    tails = [pid for job in jobs for pid in running(job.folder)]  # a msrun that is killed leaves what shows its logs
    for pid in {*left, *tails}:
        os.kill(pid, signal.SIGKILL)
    for job in jobs:
        job.process.communicate()
    assert not left
    ours = set(Path("/dev/shm").glob("mpich_*")) - memory
    if unconnected:  # what MPI made for worlds of one before `connect` could see to it; it stays when they are killed
        for path in ours:
            path.unlink(missing_ok=True)
        return
    assert not ours or _others_use_mpi(), ours


@contextmanager
def interruptible() -> Iterator[None]:
    """Processes that start in here end at SIGINT, also where ours ignores it, as `nohup` and shells' jobs do."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _others_use_mpi() -> bool:
    """Whether shared memory may be of another program of this machine, which MPI has just begun to share."""
    return any(b"PMI_FD" in _read(f"/proc/{pid}/environ") for pid in os.listdir("/proc") if pid.isdigit())


def running(path: Path) -> list[int]:
    """Processes that have a file, or one of a folder, on their command line; msrun and dead ones left out."""
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        line = _read(f"/proc/{pid}/cmdline")
        if str(path).encode() in line and b"--join=True" not in line:
            found.append(int(pid))
    return found


def scheduler_of(job: Job) -> int:
    """The process that msrun started as scheduler."""
    found = running(job.folder.parent / "ranks.py")
    (scheduler,) = [pid for pid in found if b"MS_SCHED\0" in _read(f"/proc/{pid}/environ")]
    return scheduler


def _read(path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError:
        return b""


@pytest.fixture
def port() -> int:
    """One that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_workers_connect_over_shared_memory(start: Callable[..., Job]) -> None:
    shared = 'print("mpich_shm" in open("/proc/self/maps").read(), flush=True)'
    job = start(f"{shared}; comm.all_to_all(np.zeros((comm.size, 300_000)))", workers=4)
    assert job.wait()[0] == 0
    for rank in range(4):
        assert job.log(f"worker_{rank}") == f"rank {rank} of 4 has [6.0, 10.0, 14.0]\nTrue\n"
    assert job.log("scheduler").splitlines()[1:] == ["All 4 ranks have joined.", "All ranks have finished."]


def test_one_worker(start: Callable[..., Job]) -> None:
    job = start(workers=1)
    assert job.wait()[0] == 0
    assert job.log("worker_0") == "rank 0 of 1 has [0.0, 1.0, 2.0]\n"


def test_strangers_do_not_disturb_a_job_that_joins(start: Callable[..., Job], port: int) -> None:
    """A flood of connections that say nothing, and ranks without the token, while the workers are on their way."""
    job = start(early="if role == 'MS_WORKER': time.sleep(3)", workers=3)
    job.until(lambda: "Waiting for 3 ranks" in job.log("scheduler"))
    strangers = [socket.create_connection(("127.0.0.1", port), 5) for _ in range(200)]
    for rank, stranger in enumerate(strangers[-20:]):
        stranger.sendall(f"cmd=initack pmiid={rank % 3} size=3\ncmd=abort exitcode=1\n".encode())
    code, printed = job.wait()
    for stranger in strangers:
        stranger.close()
    assert code == 0, printed
    assert job.log("scheduler").splitlines()[-2:] == ["All 3 ranks have joined.", "All ranks have finished."]


def test_workers_with_another_token_are_refused_in_words(start: Callable[..., Job]) -> None:
    other = "if role == 'MS_WORKER': os.environ['DEVICE_MESH_TOKEN'] = 'another token of 20'"
    code, printed = start(early=other).wait()
    assert code != 0
    assert printed.count("refused this worker: it does not know the token of the job here") == 1
    assert "DEVICE_MESH_TOKEN_FILE" in printed


def test_an_error_is_shown_once_and_ends_all(start: Callable[..., Job]) -> None:
    code, printed = start("1 / 0 if comm.rank else comm.barrier()", workers=3).wait()
    assert code != 0
    assert printed.count("ZeroDivisionError") == 1
    assert "rank 1 of 3 failed:" in printed
    assert "Error: " not in printed.replace("ZeroDivisionError: ", "").replace("RuntimeError: ", "")


def test_a_killed_rank_is_named(start: Callable[..., Job]) -> None:
    code, printed = start("comm.barrier() if comm.rank else os.kill(os.getpid(), 9)").wait()
    assert code != 0
    assert re.search(r"Error: Rank 0 of 2, at 127.0.0.1:\d+, ended without finishing\.", printed)


@pytest.mark.parametrize("dies", ["os.kill(os.getpid(), 9)", "time.sleep(2); sys.exit(3)"], ids=["at once", "later"])
def test_a_worker_that_dies_before_it_joins(start: Callable[..., Job], dies: str) -> None:
    code, printed = start(early=f"if role == 'MS_WORKER' and node_rank == '1': {dies}").wait()
    assert code != 0
    assert "Error: Rank 0 of 2" in printed or "Error: All workers of this msrun ended before" in printed


def test_a_rank_that_two_workers_claim(start: Callable[..., Job]) -> None:
    code, printed = start(early="os.environ['MS_NODE_ID'] = '0'").wait()
    assert code != 0
    assert printed.count("refused this worker: rank 0 has joined already, from 127.0.0.1:") == 1


def test_workers_that_msrun_gives_no_numbers(start: Callable[..., Job]) -> None:
    code, printed = start(options="--worker_num=3 --local_worker_num=1 --cluster_time_out=15").wait()
    assert code != 0
    assert "1 of 3 ranks joined within 15 s, and ranks 1, 2 did not" in printed


def test_mpi_that_was_loaded_too_early(start: Callable[..., Job]) -> None:
    """The workers would be that many jobs of one rank."""
    code, printed = start(early="from mpi4py import MPI").wait()
    assert code != 0
    assert printed.count("LaunchError: mpi4py.MPI was imported before connect()") == 1


def test_a_port_that_is_taken(start: Callable[..., Job], port: int) -> None:
    """Another job, started while the first runs, ends; so does one whose port another program has."""
    first = start("time.sleep(600)", name="first")
    first.until(lambda: "rank 1 of 2" in first.log("worker_1"))
    code, printed = start(name="second").wait()
    assert code != 0
    assert f"Error: another job, of 2 ranks, has 127.0.0.1:{port}. Give msrun another --master_port." in printed
    assert printed.count("it is of another job than the 2 ranks here: another job needs another port") == 1
    first.process.send_signal(signal.SIGINT)
    first.wait()
    with socket.create_server(("127.0.0.1", port)) as stranger:
        stranger.listen()
        short = "from device_mesh import greeting; greeting.ANSWER_SECONDS = 2.0"
        code, printed = start(name="third", early=short).wait()
    assert code != 0
    assert f"Error: cannot listen on 127.0.0.1:{port}, where another program does." in printed


def test_two_jobs_that_start_at_once_on_one_port(start: Callable[..., Job], port: int) -> None:
    """One of them runs, with its own workers alone; the other says why it does not."""
    logs = "[p for p in pathlib.Path(__file__).parent.glob('*/*.log') if 'Error: ' in p.read_text()]"
    body = f"import pathlib\n    while len({logs}) < 2: time.sleep(0.1)"  # until the other has been sent away
    jobs = [start(body, name=name) for name in ("one", "other")]
    ends = [job.wait() for job in jobs]
    (loser,) = [number for number, (code, _) in enumerate(ends) if code != 0]
    for rank in range(2):
        assert jobs[1 - loser].log(f"worker_{rank}") == f"rank {rank} of 2 has [1.0, 3.0, 5.0]\n"
        assert "has [" not in jobs[loser].log(f"worker_{rank}")
    assert f"Error: another job, of 2 ranks, has 127.0.0.1:{port}. Give msrun another --master_port." in ends[loser][1]


def test_the_scheduler_is_killed(start: Callable[..., Job]) -> None:
    job = start("time.sleep(600)")
    job.until(lambda: "rank 1 of 2" in job.log("worker_1"))
    os.kill(scheduler_of(job), signal.SIGKILL)
    code, printed = job.wait()
    assert code != 0
    assert len(re.findall(r"The scheduler on 127.0.0.1:\d+ is gone, and with it the job\.", printed)) == 1


@pytest.mark.parametrize("joined", [True, False])
def test_msrun_is_killed(start: Callable[..., Job], joined: bool) -> None:
    missing = 0 if joined else 1
    job = start("time.sleep(600)", options=f"--worker_num={2 + missing} --local_worker_num=2 --node_rank=0")
    job.until(lambda: "rank 1 of 2" in job.log("worker_1") if joined else "Waiting" in job.log("scheduler"))
    job.process.kill()
    job.process.wait()
    job.until(lambda: "was killed" in job.log("scheduler") or "ended" in job.log("scheduler"))


def test_workers_that_handle_sigterm_end_in_their_own_time(start: Callable[..., Job]) -> None:
    """The signal reaches msrun and the scheduler beside it, as that of a cluster's manager does."""
    body = """told = []
    import signal
    signal.signal(signal.SIGTERM, lambda *_: told.append(1))
    print("handles", flush=True)
    while not comm.all_reduce(np.array([float(len(told))]), "max")[0]: time.sleep(0.1)
    time.sleep(3)
    print("rank", comm.rank, "saved")"""
    job = start(body)
    job.until(lambda: all("handles" in job.log(f"worker_{rank}") for rank in range(2)))
    for pid in (scheduler_of(job), job.process.pid):
        os.kill(pid, signal.SIGTERM)
    job.until(lambda: "All ranks have finished." in job.log("scheduler"))
    for rank in range(2):
        assert f"rank {rank} saved" in job.log(f"worker_{rank}")


def test_two_calls_of_msrun_are_one_job(start: Callable[..., Job]) -> None:
    """Two nodes on one machine: whose rank dies, both end."""
    logs = "[os.path.join(os.path.dirname(__file__), node, 'scheduler.log') for node in ('node0', 'node1')]"
    both = f"all(map(os.path.getsize, {logs}))"
    body = f"while comm.rank == 1: {both} and os.kill(os.getpid(), 9)\n    time.sleep(600)"
    options = "--worker_num=4 --local_worker_num=2 --node_rank="
    nodes = [start(body, name=f"node{rank}", options=f"{options}{rank}") for rank in (0, 1)]
    ends = [node.wait() for node in nodes]
    assert all(code != 0 for code, _ in ends)
    for rank in range(4):
        assert f"rank {rank} of 4 has [6.0, 10.0, 14.0]\n" in nodes[rank // 2].log(f"worker_{rank}")
        assert ends[rank // 2][1].count("Error: Rank 1 of 4, at 127.0.0.1:") == 1


@pytest.fixture
def machines() -> Iterator[list[list[str]]]:
    """Two machines with a network between them, as prefixes of commands: network namespaces with host names."""
    names = [f"mesh{os.getpid()}{side}" for side in "ab"]
    try:
        for name in names:
            subprocess.run(["ip", "netns", "add", name], check=True, capture_output=True)
        one, other = names
        commands = [f"link add v{os.getpid()} netns {one} type veth peer name v{os.getpid()} netns {other}"]
        for number, name in enumerate(names, start=1):
            commands.append(f"-n {name} addr add 10.213.7.{number}/24 dev v{os.getpid()}")
            commands += [f"-n {name} link set {device} up" for device in ("lo", f"v{os.getpid()}")]
        for command in commands:
            subprocess.run(["ip", *command.split()], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"needs root and iproute2, to make network namespaces: {error}")
    else:
        shell = ["unshare", "--uts", "sh", "-c"]
        yield [["ip", "netns", "exec", name, *shell, f'hostname {name}; exec "$0" "$@"'] for name in names]
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


def test_two_machines(start: Callable[..., Job], machines: list[list[str]]) -> None:
    """Ranks of different host names talk over the network; when one dies, the machine without a scheduler hears why."""
    body = "comm.barrier(); comm.rank == 1 and os.kill(os.getpid(), 9); comm.barrier(); time.sleep(600)"
    options = "--worker_num=4 --local_worker_num=2 --master_addr=10.213.7.1 --cluster_time_out=60 --node_rank="
    nodes = [
        start(body, name=f"node{rank}", options=f"{options}{rank}", machine=machine)
        for rank, machine in enumerate(machines)
    ]
    ends = [node.wait() for node in nodes]
    assert all(code != 0 for code, _ in ends)
    for rank in range(4):
        assert f"rank {rank} of 4 has [6.0, 10.0, 14.0]\n" in nodes[rank // 2].log(f"worker_{rank}")
    assert "Error: Rank 1 of 4, at 10.213.7.1:" in ends[0][1]
    assert "The scheduler on 10.213.7.1:" in ends[1][1]
    assert ends[1][1].count("ended the job: Rank 1 of 4, at 10.213.7.1:") == 1
