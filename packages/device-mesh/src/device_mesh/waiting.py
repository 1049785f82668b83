"""How a rank waits for MPI: it holds its core, or gives way where ranks outnumber cores."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

from mpi4py import MPI

# How long a waiting rank of a crowded machine only lets others go first, and then sleeps between looks.
_YIELD_SECONDS = 3e-4
_SLEEP_SECONDS = 2e-4

Wait = Callable[[Any, Any], None]
"""How to wait for an MPI request, with the status to fill in or None."""


def hold_core(request: Any, status: Any) -> None:
    """Wait inside MPI: the quickest to notice, and a core is busy meanwhile."""
    request.Wait(status)


def give_way(request: Any, status: Any) -> None:
    """Wait on a machine that runs more ranks than it has cores.

    A rank that waits inside MPICH keeps its core busy, which a rank with work to do may need: with 4 ranks on 2
    cores, work takes twice as long while the other ranks wait for it, with 8 more than four times.
    """
    yield_until = time.perf_counter() + _YIELD_SECONDS
    while not request.Test(status):
        if time.perf_counter() < yield_until:
            os.sched_yield()
        else:
            time.sleep(_SLEEP_SECONDS)


def choose(job: Any, node: Any) -> Wait:
    """The wait for all ranks of a job: `give_way` if any of its nodes has more ranks than cores to run them on.

    A node's cores are those that any of its ranks may use: a rank that the launcher bound to a core sees that
    one alone. All ranks get the same answer, because a blocking collective of one rank does not meet the
    non-blocking one of another.

    Args:
        job: the MPI communicator of all ranks; collective over it.
        node: the MPI communicator of those on this rank's node.
    """
    cores: set[int] = set().union(*node.allgather(os.sched_getaffinity(0)))
    return give_way if job.allreduce(node.size > len(cores), MPI.LOR) else hold_core
