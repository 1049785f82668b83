"""Starting MPI in a process that a launcher started, after a look at what would end it without a word of help."""

from __future__ import annotations

import atexit
import os
import sys
import time
from contextlib import suppress

import mpi4py

from device_mesh import shared_memory
from device_mesh.launch import PMIX, Launch, LaunchError

_FLUSH_SECONDS = 0.5
_KILL_SECONDS = 30.0


def start(launch: Launch | None) -> None:
    """Start MPI, which belongs to the first import of `mpi4py.MPI`, if that has not been.

    Raises LaunchError in one process where MPI could not connect the ranks; the others end, or are ended. Open MPI is
    left to itself.
    """
    if "mpi4py.MPI" in sys.modules or (launch is not None and launch.sign.startswith("OMPI")):
        return
    shared_memory.leave_to_mpich(os.environ)
    if launch is not None and launch.kind == "mpi":
        check_memory(launch)
    if launch is not None and launch.sign == PMIX:
        _start_under_pmix(launch)


def check_memory(launch: Launch) -> None:
    """All ranks of a machine look before any of them begins to use memory; the first raises, the others end with it.

    Where no launcher says how many ranks this machine has, nobody looks: the job's may be on several machines.
    """
    try:
        shared_memory.check(launch.local_size or 1)
    except LaunchError:
        if launch.local_rank or (launch.local_rank is None and launch.rank):
            time.sleep(_KILL_SECONDS)
            sys.exit(2)
        atexit.register(_end_job)
        raise
    if "MPI_LOCALNRANKS" in os.environ:
        _meet()


def _meet() -> None:
    """Wait for all ranks that MPICH's mpiexec started, by a barrier of its protocol, PMI-1."""
    with suppress(OSError, KeyError, ValueError):
        descriptor = int(os.environ["PMI_FD"])
        os.write(descriptor, b"cmd=barrier_in\n")
        while os.read(descriptor, 1) not in (b"\n", b""):  # not a byte beyond the answer: MPI reads on
            pass


def _end_job() -> None:
    """Ask mpiexec to end all ranks with exit code 2: one that only ends itself leaves the others waiting."""
    with suppress(OSError, KeyError, ValueError):
        sys.stderr.flush()
        time.sleep(_FLUSH_SECONDS)  # mpiexec drops what it has not read from the pipe when the job ends
        os.write(int(os.environ["PMI_FD"]), b"cmd=abort exitcode=2 message=no_shared_memory\n")
        time.sleep(_KILL_SECONDS)


def _start_under_pmix(launch: Launch) -> None:
    """Start MPI if it knows PMIx. An MPICH that does not would end the process."""
    mpi4py.rc.initialize = False
    mpi4py.rc.finalize = True
    from mpi4py import MPI

    made = MPI.Get_library_version().lower()
    if "mpich" in made and "configure" in made and "pmix" not in made:
        if not launch.speaks:
            launch.leave()
        raise LaunchError(
            "PMIX_RANK says that PMIx started this process, and the MPICH of mpi4py does not know PMIx. If ranks "
            "were meant to start so: srun --mpi=pmi2, or mpiexec. If the variable is left over from the shell: "
            "env -u PMIX_RANK -u PMIX_NAMESPACE, then the command."
        )
    MPI.Init_thread(MPI.THREAD_MULTIPLE)
