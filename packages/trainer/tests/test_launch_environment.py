"""Ranks start the same way whatever launchers, batch systems and the parent left: variables and ignored signals.

Ranks are a script that says its number and that of all, started as `parallel-train run` and `verify` start theirs.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from device_mesh import Launch
from parallel_trainer.launch.joining import starts_ranks

HOST = socket.gethostname()
RANK = """\
from device_mesh import connect
comm = connect()
total = comm.all_reduce(__import__("numpy").ones(1))
print(f"rank {comm.rank} of {comm.size}, {total[0]:g} in all\\n", end="", flush=True)
"""
RUN = """\
import sys
from parallel_trainer.launch.mpiexec import run_ranks
sys.exit(run_ranks(int(sys.argv[1]), sys.argv[2:]))
"""
SLURM = {
    "SLURM_JOB_ID": "77",
    "SLURM_JOBID": "77",
    "SLURM_JOB_NODELIST": HOST,
    "SLURM_NODELIST": HOST,
    "SLURM_NNODES": "1",
    "SLURM_TASKS_PER_NODE": "2",
}

FAMILIES = {
    "PUB2-LAUNCH-01, slurm": SLURM,
    "slurm, four nodes": SLURM
    | {
        "SLURM_NNODES": "4",
        "SLURM_JOB_NODELIST": "n[1-4]",
        "SLURM_NODELIST": "n[1-4]",
        "SLURM_TASKS_PER_NODE": "8(x4)",
    },
    "PUB2-LAUNCH-02, pmix": {"PMIX_RANK": "0", "PMIX_NAMESPACE": "slurm.pmix.7.0"},
    "pmix of slurm": {"PMIX_RANK": "0", "PMIX_NAMESPACE": "slurm.pmix.7.0", "SLURM_STEP_NUM_TASKS": "1"} | SLURM,
    "prte": {"PRTE_LAUNCHED": "1", "PMIX_VERSION": "5.0.2"},
    "pmi of a shell": {"PMI_RANK": "0", "PMI_SIZE": "1", "PMI_FD": "97", "PMI_SPAWNED": "1", "PMI_JOBID": "77.0"},
    "pmi port": {"PMI_PORT": "nowhere:1", "PMI_ID": "0", "PMI2_DEBUG": "1"},
    "open mpi of a shell": {"OMPI_COMM_WORLD_SIZE": "1", "OMPI_COMM_WORLD_RANK": "0", "OMPI_UNIVERSE_SIZE": "1"},
    "pbs": {"PBS_NODEFILE": "/no/nodefile", "PBS_JOBID": "77.pbs", "PBS_NUM_NODES": "2"},
    "lsf": {"LSF_BINDIR": "/no/bin", "LSB_MCPU_HOSTS": f"{HOST} 2 other 2", "LSB_JOBID": "77"},
    "sge": {"SGE_ROOT": "/no/sge", "ARC": "lx-amd64", "PE_HOSTFILE": "/no/hostfile", "NSLOTS": "4"},
    "loadleveler": {"LOADL_HOSTFILE": "/no/hostfile", "MP_CHILD": "0", "LOADL_ACTIVE": "5.1"},
    "cobalt": {"COBALT_NODEFILE": "/no/nodefile", "COBALT_JOBID": "77"},
    "hydra's launcher": {"HYDRA_LAUNCHER": "slurm", "HYDRA_RMK": "slurm", "HYDRA_LAUNCHER_EXEC": "/no/srun"},
    "hydra's bootstrap": {"HYDRA_BOOTSTRAP": "ssh", "HYDRA_BOOTSTRAP_EXEC": "/no/ssh", "HYDRA_LAUNCHER_AUTOFORK": "0"},
    "hydra's arguments": {"HYDRA_LAUNCHER_EXTRA_ARGS": "--overlap", "HYDRA_ENV": "none"},
    "protocol": {"MPIR_CVAR_PMI_VERSION": "x", "MPICH_PMI_VERSION": "2"},
    "mpiexec": {"MPIEXEC_TIMEOUT": "100", "MPIEXEC_PORT_RANGE": "20000:30000", "HYDRA_TOPO_DEBUG": "0"},
    "tuning": {"MPIR_CVAR_CH4_NETMOD": "ofi", "MPICH_INTERFACE_HOSTNAME": "localhost", "UCX_TLS": "tcp"},
}


def started(tmp_path: Path, ranks: int, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    (tmp_path / "rank.py").write_text(RANK, encoding="utf-8")
    return subprocess.run(
        [sys.executable, "-c", RUN, str(ranks), str(tmp_path / "rank.py")],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.mark.parametrize("environment", FAMILIES.values(), ids=FAMILIES)
def test_ranks_start_and_connect(tmp_path: Path, environment: dict[str, str]) -> None:
    done = started(tmp_path, 2, environment)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["rank 0 of 2, 2 in all", "rank 1 of 2, 2 in all"]


@pytest.mark.parametrize("name", ["PUB2-LAUNCH-01, slurm", "PUB2-LAUNCH-02, pmix", "pmi of a shell"])
def test_one_rank_starts(tmp_path: Path, name: str) -> None:
    done = started(tmp_path, 1, FAMILIES[name])
    assert done.returncode == 0, done.stderr
    assert done.stdout == "rank 0 of 1, 1 in all\n"


def test_hosts_that_the_user_names_are_used(tmp_path: Path) -> None:
    """Two names of this machine, which mpiexec takes for two hosts."""
    (tmp_path / "hosts").write_text("localhost:1\n127.0.0.1:1\n", encoding="utf-8")
    done = started(tmp_path, 2, {"HYDRA_HOST_FILE": str(tmp_path / "hosts"), "HYDRA_LAUNCHER": "fork"})
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["rank 0 of 2, 2 in all", "rank 1 of 2, 2 in all"]
    done = started(tmp_path, 2, {"HYDRA_HOST_FILE": "/no/hosts"})
    assert done.returncode != 0
    assert "/no/hosts" in done.stderr + done.stdout


@pytest.mark.parametrize(
    ("launch", "nproc", "starts"),
    [
        (None, None, True),
        (None, 4, True),
        (Launch("mpi", 1, 0), 2, True),  # a shell that srun opened
        (Launch("mpi", 1, 0), None, False),  # mpiexec -n 1
        (Launch("mpi", 1, 0), 1, False),
        (Launch("mpi", 4, 0), 4, False),
        (Launch("mpi", 4, 0), 2, False),
        (Launch("mpi", None, 0), 2, False),
        (Launch("msrun", 1, 0), 2, False),
    ],
)
def test_a_process_that_is_alone_may_start_ranks(launch: Launch | None, nproc: int | None, starts: bool) -> None:
    assert starts_ranks(launch, nproc) is starts


WAITING = """\
import signal, sys, time
try:
    print(f"ready, SIGHUP {signal.getsignal(signal.SIGHUP)!r}", flush=True)
    time.sleep(30)
except KeyboardInterrupt:
    print("interrupted", flush=True)
    sys.exit(130)
"""


def ignore(*numbers: signal.Signals) -> None:
    """In a child, before its program: what a parent that ignores signals leaves to it."""
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN if number in numbers else signal.SIG_DFL)


def waiting(*ignored: signal.Signals) -> subprocess.Popen[str]:
    job = subprocess.Popen(
        [sys.executable, "-c", RUN, "1", "-c", WAITING],
        stdout=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: ignore(*ignored),
    )
    assert job.stdout is not None
    assert job.stdout.readline().startswith("ready")
    return job


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP, signal.SIGTERM])
def test_a_signal_that_is_heeded_interrupts_ranks(number: signal.Signals) -> None:
    with waiting() as job:
        job.send_signal(number)
        assert job.communicate(timeout=20)[0].endswith("interrupted\n")
    assert job.returncode == 130


@pytest.mark.parametrize("ignored", [(signal.SIGHUP,), (signal.SIGINT,), (signal.SIGINT, signal.SIGHUP)])
def test_a_run_under_nohup_or_in_the_background_goes_on(ignored: tuple[signal.Signals, ...]) -> None:
    """What it was started to ignore it ignores; SIGTERM still ends it, and its ranks notice at once."""
    with waiting(*ignored) as job:
        for number in ignored:
            job.send_signal(number)
        time.sleep(0.5)
        assert job.poll() is None
        start = time.monotonic()
        job.terminate()
        assert job.communicate(timeout=20)[0].endswith("interrupted\n")
    assert job.returncode == 130
    assert time.monotonic() - start < 8.0  # not killed after 10 s of waiting
