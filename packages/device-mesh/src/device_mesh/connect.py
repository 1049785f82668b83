"""Joining the other ranks: from how this process was started to a communicator."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Literal

from device_mesh.communicator import Communicator
from device_mesh.debug import CheckedCommunicator
from device_mesh.single import SingleCommunicator

Backend = Literal["auto", "single", "mpi"]

_MPI_VARIABLES = ("PMI_SIZE", "PMI_PORT", "PMI_FD", "PMIX_RANK", "OMPI_COMM_WORLD_SIZE")


def connect(
    backend: Backend = "auto", *, debug: bool | None = None, debug_timeout_seconds: float = 300.0
) -> Communicator:
    """The communicator of all ranks of this job.

    Args:
        backend: "single" is this process alone; "mpi" is all ranks that mpiexec started (needs the extra
        `mpi`);
            "auto" is "mpi" in a process that an MPI launcher started and "single" in any other.
        debug: before each collective, compare the call between the ranks; calls that differ raise
            `CommunicatorMismatch` on every rank instead of hanging or mixing up data. Default: whether the
            environment variable DEVICE_MESH_DEBUG is set to something other than "" and "0".
        debug_timeout_seconds: with `debug`, how long a rank waits for the others to make the same call.

    Raises:
        ValueError: an unknown backend.
        ModuleNotFoundError: mpi4py is needed and not installed.
        RuntimeError: "auto" in a worker of msrun that no MPI can connect to the other workers.
    """
    if backend not in ("auto", "single", "mpi"):
        raise ValueError(f"unknown backend {backend!r}: use 'auto', 'single' or 'mpi'")
    if backend == "auto":
        backend = _detect(os.environ)
    if debug is None:
        debug = os.environ.get("DEVICE_MESH_DEBUG", "") not in ("", "0")
    communicator = SingleCommunicator() if backend == "single" else _mpi_world()
    return CheckedCommunicator.over(communicator, debug_timeout_seconds) if debug else communicator


def _detect(environment: Mapping[str, str]) -> Literal["single", "mpi"]:
    if any(name in environment for name in _MPI_VARIABLES):
        return "mpi"
    workers = environment.get("MS_WORKER_NUM", "1")
    if workers != "1":
        # Falling back to "single" here would train that many unconnected copies without a word.
        raise RuntimeError(
            f"this process is one of MS_WORKER_NUM={workers} workers that msrun started, but none of "
            f"{', '.join(_MPI_VARIABLES)} is set, so there is no MPI to reach the others: start the ranks "
            "with mpiexec, or set PMI_PORT and PMI_ID to an MPI rendezvous before calling connect()"
        )
    return "single"


def _mpi_world() -> Communicator:
    try:
        from device_mesh import mpi
    except ModuleNotFoundError as error:
        if error.name != "mpi4py":
            raise
        raise ModuleNotFoundError(
            "the mpi backend needs mpi4py, which is not installed: pip install 'device-mesh[mpi]'",
            name="mpi4py",
        ) from error
    return mpi.world()
