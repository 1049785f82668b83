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

from device_mesh import LaunchError, shared_memory
from device_mesh.variables import for_own_mpiexec, names_hosts

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

    All start on this machine, whatever a batch system or another launcher left in the environment, unless it names
    hosts (`device_mesh.variables`).

    Ctrl-C, SIGTERM and SIGHUP reach the ranks as an interrupt; those that do not end within 10 s are killed. With
    `stop_on_sigterm`, SIGTERM reaches them as it is and they take the time they need. SIGINT and SIGHUP that this
    process was started to ignore, as `nohup` and jobs in the background are, stay ignored.

    Raises UserError where the environment has no mpiexec or the machine too little shared memory.
    """
    command = [_mpiexec(), "-n", str(world_size), sys.executable, *arguments]
    if not names_hosts(os.environ):
        try:
            shared_memory.check(world_size)
        except LaunchError as error:
            raise UserError(str(error)) from error
    environment = rank_environment(world_size, for_own_mpiexec(os.environ))
    # A session of its own: the terminal's Ctrl-C reaches us alone, and we pass it on.
    with (
        _signals_as_interrupt(),
        subprocess.Popen(
            command,
            env=environment,
            start_new_session=True,
            stdin=subprocess.DEVNULL,
            preexec_fn=_prepare,
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


def _prepare() -> None:
    """In the child, before it becomes mpiexec: heed interrupts, which come from us alone, and end when we do.

    Ranks that inherited an ignored SIGINT would not notice that they are to end.
    """
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


@contextmanager
def _signals_as_interrupt() -> Iterator[None]:
    def interrupt(signum: int, frame: object) -> None:
        raise KeyboardInterrupt

    heeded = [signal.SIGTERM, *([] if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else [signal.SIGHUP])]
    before = {number: signal.signal(number, interrupt) for number in heeded}
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
