"""Ranks on this machine's CPUs: start them with the mpiexec of this environment, or join the ones we are among."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from parallel_trainer.errors import UserError
from parallel_trainer.launch.openblas import openblas_environment

_SIZE_VARIABLES = ("PMI_SIZE", "OMPI_COMM_WORLD_SIZE")
_THREAD_VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
# MindSpore logs errors only; freed arrays stay with the process (glibc), which asks the system for them again
# thousands of times a step otherwise: 10 to 15 % of the time of a small model.
_DEFAULTS = {"GLOG_v": "3", "MALLOC_MMAP_THRESHOLD_": str(32 << 20), "MALLOC_TRIM_THRESHOLD_": str(1 << 30)}
_INTERRUPT_SECONDS = 10.0


def started_ranks(environment: Mapping[str, str] = os.environ) -> int | None:
    """How many ranks an MPI launcher started, this process among them; None if none did."""
    for variable in _SIZE_VARIABLES:
        if variable in environment:
            return int(environment[variable])
    return None


def run_ranks(world_size: int, arguments: Sequence[str]) -> int:
    """Run `python *arguments` as `world_size` ranks and return the job's exit code.

    Ctrl-C and SIGTERM reach the ranks; those that do not end within 10 s are killed.

    Raises UserError where the environment has no mpiexec.
    """
    command = [_mpiexec(), "-n", str(world_size), sys.executable, *arguments]
    environment = rank_environment(world_size, os.environ)
    # A session of its own: the terminal's Ctrl-C reaches us alone, and we pass it on.
    with (
        _terminate_as_interrupt(),
        subprocess.Popen(command, env=environment, start_new_session=True, stdin=subprocess.DEVNULL) as job,
    ):
        try:
            code = job.wait()
        except KeyboardInterrupt:
            return _interrupt(job)
    return 128 - code if code < 0 else code


def rank_environment(world_size: int, environment: Mapping[str, str]) -> dict[str, str]:
    """The environment of `world_size` ranks on this machine; what `environment` already says stays.

    Each rank gets its share of the cores for NumPy's threads, OpenBLAS is told the processor, memory and logging
    get settings that suit training.
    """
    threads = str(max(1, len(os.sched_getaffinity(0)) // world_size))
    defaults = dict.fromkeys(_THREAD_VARIABLES, threads) | openblas_environment(environment) | _DEFAULTS
    return defaults | dict(environment)


def _mpiexec() -> str:
    beside = Path(sys.executable).parent
    found = shutil.which("mpiexec", path=str(beside))
    if found is None:
        raise UserError(
            f"There is no mpiexec in {beside}, and several ranks on CPUs need it: install the package mpich in this "
            "environment, or start the ranks yourself with the MPI that mpi4py was built for."
        )
    return found


@contextmanager
def _terminate_as_interrupt() -> Iterator[None]:
    def interrupt(signum: int, frame: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _interrupt(job: subprocess.Popen[bytes]) -> int:
    """End the job: ask the ranks first, kill their whole session if they do not listen."""
    job.send_signal(signal.SIGINT)
    try:
        job.wait(_INTERRUPT_SECONDS)
    except (subprocess.TimeoutExpired, KeyboardInterrupt):
        os.killpg(job.pid, signal.SIGKILL)
        job.wait()
    return 128 + signal.SIGINT
