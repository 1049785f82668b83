"""Which rank sits where in a parallel plan, and how the ranks talk: a mesh by arithmetic, and communicators.

Importing this package imports neither mpi4py nor MindSpore: the backends that need them are loaded by `connect`, the
differentiable collectives are in `device_mesh.autograd`.
"""

from __future__ import annotations

from device_mesh.abort import abort_on_error
from device_mesh.axes import AxisCommunicators
from device_mesh.communicator import Array, Communicator, ReduceOp, Request
from device_mesh.connect import Backend, connect
from device_mesh.debug import CommunicatorMismatch
from device_mesh.launch import Launch, LaunchError, launched
from device_mesh.mesh import Degrees, ParallelMesh
from device_mesh.traffic import Traffic

__all__ = [
    "Array",
    "AxisCommunicators",
    "Backend",
    "Communicator",
    "CommunicatorMismatch",
    "Degrees",
    "Launch",
    "LaunchError",
    "ParallelMesh",
    "ReduceOp",
    "Request",
    "Traffic",
    "abort_on_error",
    "connect",
    "launched",
]
