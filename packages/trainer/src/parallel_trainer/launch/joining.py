"""Being one of the ranks that somebody else started: finding out, and joining the others."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from typing import NoReturn

from device_mesh import Communicator, connect

from parallel_trainer.errors import UserError
from parallel_trainer.launch.mpiexec import rank_environment

# Variables by which a launcher tells a process how many ranks there are, and which one it is.
_LAUNCHERS = (
    ("PMI_SIZE", "PMI_RANK"),
    ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"),
    ("MS_WORKER_NUM", "RANK_ID"),
)


def started_ranks(environment: Mapping[str, str] = os.environ) -> int | None:
    """How many ranks a launcher started, this process among them; None if none did.

    Knows MPICH's and Open MPI's mpiexec, launchers that speak PMI to them, and MindSpore's msrun.
    """
    for size, _ in _LAUNCHERS:
        if environment.get(size, "").isdigit():
            return int(environment[size])
    return None


def join() -> Communicator:
    """The communicator of all ranks that the launcher started.

    Raises UserError where MPI does not connect as many as were started: going on would train that many unconnected
    copies. All copies raise; those that the launcher does not call rank 0 end without a word.
    """
    expected = started_ranks()
    if expected and "MS_WORKER_NUM" in os.environ and "PMI_PORT" not in os.environ:
        _refuse(
            f"msrun started {expected} workers, and this version cannot join them: start the ranks with "
            f"parallel-train run --nproc {expected}, or with mpiexec."
        )
    communicator = connect()
    if expected not in (None, communicator.size):
        _refuse(
            f"The launcher started {expected} ranks, and MPI connects {communicator.size}: mpiexec belongs to another "
            "MPI than mpi4py. Use the mpiexec of this Python environment, or parallel-train run --nproc."
        )
    return communicator


def _refuse(message: str) -> NoReturn:
    if any(os.environ.get(rank, "0") != "0" for _, rank in _LAUNCHERS):
        sys.exit(2)
    raise UserError(message)


def with_rank_environment(module: str, arguments: Sequence[str]) -> None:
    """Begin again with the variables that ranks need, if whoever started this rank did not set them.

    NumPy's threads and its choice of kernels are decided when it is loaded. Does not return if it begins again, and
    does nothing the second time.
    """
    wanted = rank_environment(started_ranks() or 1, os.environ)
    if wanted != dict(os.environ):
        sys.stdout.flush()
        os.execve(sys.executable, [sys.executable, "-m", module, *arguments], wanted)
