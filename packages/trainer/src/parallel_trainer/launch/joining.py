"""Being one of the ranks that somebody else started: joining the others, and what must hold before that."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from typing import NoReturn

from device_mesh import Communicator, Launch, LaunchError, connect

from parallel_trainer.errors import UserError
from parallel_trainer.launch.mpiexec import rank_environment

_SHOW_SECONDS = 0.5


def starts_ranks(launch: Launch | None, nproc: int | None) -> bool:
    """Whether a command that was told `--nproc` starts its ranks itself.

    It does so too where a launcher started this process alone, such as a shell that `srun` opened and its variables.
    """
    return launch is None or (launch.kind == "mpi" and launch.size == 1 and (nproc or 1) > 1)


def left_over(launch: Launch) -> str:
    """What to do where a launcher's variables do not mean this process."""
    names = sorted(name for name in os.environ if name.startswith(launch.sign.split("_")[0]))
    without = " ".join(f"-u {name}" for name in names)
    return f"If {launch.sign} is left over from the shell: env {without}, then the command."


def join(launch: Launch) -> Communicator:
    """The communicator of all ranks that the launcher started.

    Raises UserError where they do not connect: going on would train that many unconnected copies.
    """
    try:
        communicator = connect()
    except LaunchError as error:
        raise UserError(str(error)) from error
    size = communicator.size
    if launch.size not in (None, size):
        refuse(launch, _unconnected(f"started {launch.size} ranks", size))
    if launch.rank is not None and launch.rank >= size:
        raise UserError(_unconnected(f"calls this process rank {launch.rank}", size))
    return communicator


def _unconnected(said: str, size: int) -> str:
    return (
        f"The launcher {said}, and MPI connects {size}: the launcher belongs to another MPI than mpi4py. Use the "
        "mpiexec of this Python environment, or parallel-train run --nproc."
    )


def refuse(launch: Launch, message: str) -> NoReturn:
    """Raise UserError in one of the processes that all see the same problem; the others end without a word."""
    if launch.speaks:
        raise UserError(message)
    launch.leave()


def let_log_be_shown(launch: Launch | None) -> None:
    """Before a worker of msrun ends: msrun stops showing its log the moment it notices."""
    if launch is not None and launch.kind == "msrun":
        sys.stderr.flush()
        time.sleep(_SHOW_SECONDS)


def with_rank_environment(launch: Launch, arguments: Sequence[str]) -> None:
    """Begin again as `parallel-train *arguments` with the variables that ranks need, if they are not set yet.

    NumPy's threads and its choice of kernels are decided when it is loaded. Does not return if it begins again, and
    does nothing the second time.
    """
    wanted = rank_environment(launch.size or len(os.sched_getaffinity(0)), os.environ)
    if wanted != dict(os.environ):
        sys.stdout.flush()
        os.execve(sys.executable, [sys.executable, "-m", "parallel_trainer", *arguments], wanted)
