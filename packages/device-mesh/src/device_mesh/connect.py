"""Joining the other ranks: from how this process was started to a communicator."""

from __future__ import annotations

import os
from typing import Literal

from device_mesh.communicator import Communicator
from device_mesh.debug import CheckedCommunicator
from device_mesh.launch import Launch, LaunchError, launched
from device_mesh.single import SingleCommunicator

Backend = Literal["auto", "single", "mpi", "mindspore"]


def connect(
    backend: Backend = "auto", *, debug: bool | None = None, debug_timeout_seconds: float = 300.0
) -> Communicator:
    """The communicator of all ranks of this job.

    Args:
        backend: "single" is this process alone; "mpi" is all ranks that mpiexec or msrun started (needs the
        extra `mpi`); "mindspore" is all ranks that msrun started, over MindSpore's own communication, HCCL on
        Ascend and mccl on CPUs (needs the extra `mindspore`), and "single" without a launcher; "auto" is "mpi" in a
        process that a launcher started and "single" in any other.
        debug: before each collective, compare the call between the ranks; calls that differ raise
            `CommunicatorMismatch` on every rank instead of hanging or mixing up data. Default: whether the
            environment variable DEVICE_MESH_DEBUG is set to something other than "" and "0".
        debug_timeout_seconds: with `debug`, how long a rank waits for the others to make the same call.

    Raises:
        ValueError: an unknown backend.
        ModuleNotFoundError: mpi4py or MindSpore is needed and not installed.
        LaunchError: the workers of msrun do not find each other; /dev/shm is too small for the ranks of this
        machine; PMIx started the ranks and MPI does not know it; "mindspore" under mpiexec.
        SystemExit: in the process that msrun starts as scheduler, when the job is over: it has no rank.
    """
    if backend not in ("auto", "single", "mpi", "mindspore"):
        raise ValueError(f"unknown backend {backend!r}: use 'auto', 'single', 'mpi' or 'mindspore'")
    launch = launched()
    if backend == "auto":
        backend = "single" if launch is None else "mpi"
    if backend == "mpi" and launch is not None and launch.kind == "mpi" and launch.size == 1:
        backend = "single"  # without MPI, which would make shared memory for nobody
    if backend == "mpi" and launch is not None and launch.kind != "mpi":
        from device_mesh import msrun, msrun_scheduler  # and with them asyncio, which others do without

        if launch.kind == "msrun-scheduler":
            raise SystemExit(msrun_scheduler.schedule())
        msrun.join()
    if debug is None:
        debug = os.environ.get("DEVICE_MESH_DEBUG", "") not in ("", "0")
    if backend == "mpi":
        communicator = _mpi_world(launch)
    else:
        communicator = SingleCommunicator() if backend == "single" or launch is None else _mindspore_world(launch)
    return CheckedCommunicator.over(communicator, debug_timeout_seconds) if debug else communicator


def _mpi_world(launch: Launch | None) -> Communicator:
    try:
        from device_mesh import mpi_start
    except ModuleNotFoundError as error:
        if error.name != "mpi4py":
            raise
        raise ModuleNotFoundError(
            "the mpi backend needs mpi4py, which is not installed: pip install 'device-mesh[mpi]'",
            name="mpi4py",
        ) from error
    mpi_start.start(launch)
    from device_mesh import mpi

    return mpi.world()


def _mindspore_world(launch: Launch) -> Communicator:
    if launch.kind == "mpi":
        raise LaunchError(
            "the mindspore backend cannot connect ranks that mpiexec started: start them with msrun, or use the mpi "
            "backend"
        )
    try:
        from device_mesh import mindspore_backend
    except ModuleNotFoundError as error:
        if error.name != "mindspore":
            raise
        raise ModuleNotFoundError(
            "the mindspore backend needs MindSpore, which is not installed: pip install 'device-mesh[mindspore]'",
            name="mindspore",
        ) from error
    world = mindspore_backend.world()
    if launch.kind == "msrun-scheduler":
        raise SystemExit(0)
    return world
