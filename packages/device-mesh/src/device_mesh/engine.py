"""What the `mindspore` backend asks of a communication library: few calls, on flat arrays, ranks in ascending order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
from attrs import frozen

from device_mesh.communicator import Array, ReduceOp, Request


@frozen
class Group:
    """Ranks that call together, as an engine knows them.

    name: the same on all members, and no other group's.
    members: their ranks in the world, ascending: the order in which an engine joins and divides arrays.
    carrier: the group on whose connections messages between two members travel, which its members opened together:
        itself, or the group that a subgroup was cut out of. Every message of a carrier comes in the order it was sent.
    """

    name: str
    members: tuple[int, ...]
    carrier: str


class Engine(Protocol):
    """A communication library. Arrays are flat and C-contiguous; "bytes" are arrays of uint8.

    A group that its members have not opened before is opened by its first collective. No collective is called for an
    array that is empty on all ranks. Those that begin with `i` may be done at once.
    """

    def open(self, group: Group) -> None:
        """Connect the members of a group; collective over them. Does nothing for a group that is open."""

    def check_reduction(self, dtype: np.dtype[Any], call: str) -> None:
        """Raises TypeError, which names `call`, for a dtype that the library cannot reduce."""

    def all_reduce(self, x: Array, op: ReduceOp, group: Group) -> None:
        """Replace `x` by the reduction over the group."""

    def ireduce_scatter(self, x: Array, out: Array, counts: Sequence[int], op: ReduceOp, group: Group) -> Request:
        """Start to fill `out` with this rank's piece of the reduction; that of member i has `counts[i]` elements."""

    def iall_gather(self, x: Array, out: Array, counts: Sequence[int], group: Group) -> Request:
        """Start to fill `out` with every member's bytes, `counts[i]` from member i."""

    def iall_to_all(self, x: Array, out: Array, sent: Sequence[int], received: Sequence[int], group: Group) -> Request:
        """Start to exchange bytes: `sent[i]` to member i, `received[i]` from it."""

    def broadcast(self, x: Array, root: int, group: Group) -> None:
        """Replace the bytes `x` by those of `root`, a rank of the world."""

    def barrier(self, group: Group) -> None:
        """Return once all members have called it."""

    def isend(self, x: Array, destination: int, tag: int, group: Group) -> Request:
        """Start sending bytes to a rank of the world."""

    def irecv(self, out: Array, source: int, tag: int, group: Group) -> Request:
        """Start receiving `out`, of any shape and dtype, from a rank of the world.

        The request raises ValueError for another number of bytes where the engine can tell.
        """
