"""Ranks on this machine's CPUs, started with the mpiexec of this environment."""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from parallel_trainer.errors import UserError
from parallel_trainer.launch.openblas import openblas_environment

_THREAD_VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
# MindSpore logs errors only; freed arrays stay with the process (glibc), which asks the system for them again
# thousands of times a step otherwise: 10 to 15 % of the time of a small model.
_DEFAULTS = {"GLOG_v": "3", "MALLOC_MMAP_THRESHOLD_": str(32 << 20), "MALLOC_TRIM_THRESHOLD_": str(1 << 30)}
_INTERRUPT_SECONDS = 10.0
_PR_SET_PDEATHSIG = 1


def run_ranks(world_size: int, arguments: Sequence[str], *, stop_on_sigterm: bool = False) -> int:
    """Run `python *arguments` as `world_size` ranks and return the job's exit code.

    Ctrl-C, SIGTERM and SIGHUP reach the ranks as an interrupt; those that do not end within 10 s are killed. With
    `stop_on_sigterm`, SIGTERM reaches them as it is and they take the time they need.

    Raises UserError where the environment has no mpiexec.
    """
    command = [_mpiexec(), "-n", str(world_size), sys.executable, *arguments]
    environment = rank_environment(world_size, os.environ)
    # A session of its own: the terminal's Ctrl-C reaches us alone, and we pass it on.
    with (
        _signals_as_interrupt(),
        subprocess.Popen(
            command,
            env=environment,
            start_new_session=True,
            stdin=subprocess.DEVNULL,
            preexec_fn=_end_with_parent if sys.platform == "linux" else None,
        ) as job,
    ):
        if stop_on_sigterm:
            signal.signal(signal.SIGTERM, lambda *_: job.send_signal(signal.SIGTERM))
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
    folders = [sysconfig.get_path("scripts"), sysconfig.get_path("scripts", sysconfig.get_preferred_scheme("user"))]
    found = shutil.which("mpiexec", path=os.pathsep.join(folders))
    if found is None:
        raise UserError(
            f"There is no mpiexec in {' or '.join(folders)}, and ranks on CPUs need the one that fits mpi4py: install "
            "the package mpich in this environment, or start the ranks yourself with the MPI that mpi4py was built for."
        )
    return found


def _end_with_parent() -> None:
    """In the child, before it becomes mpiexec: be terminated when the process that started us dies, however it does."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


@contextmanager
def _signals_as_interrupt() -> Iterator[None]:
    def interrupt(signum: int, frame: object) -> None:
        raise KeyboardInterrupt

    # What is ignored stays so: `nohup` means that the run goes on when the terminal closes.
    numbers = [number for number in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, interrupt) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _interrupt(job: subprocess.Popen[bytes]) -> int:
    """End the job: ask first; a mpiexec that is killed takes its ranks with it."""
    job.send_signal(signal.SIGINT)
    try:
        job.wait(_INTERRUPT_SECONDS)
    except (subprocess.TimeoutExpired, KeyboardInterrupt):
        job.kill()
        job.wait()
    return 128 + signal.SIGINT
