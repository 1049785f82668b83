"""The `single` backend: a group of one rank, which needs no library and sends nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

from attrs import frozen

from device_mesh import buffers
from device_mesh.collectives import PairedCollectives
from device_mesh.communicator import Array, Communicator, ReduceOp, Request


@frozen
class SingleCommunicator(PairedCollectives[Array]):
    """A group of one rank; its collectives copy their input. See `device_mesh.Communicator` for each call.

    Args:
        world_rank: what `ranks` says; 0 unless the group was cut out of a larger one.
    """

    world_rank: int = 0

    @property
    def rank(self) -> int:
        return 0

    @property
    def size(self) -> int:
        return 1

    @property
    def ranks(self) -> tuple[int, ...]:
        return (self.world_rank,)

    def all_reduce(self, x: Array, op: ReduceOp = "sum", *, out: Array | None = None) -> Array:
        source = buffers.contiguous(x)
        buffers.check_reduction(source.dtype, op, "all_reduce")
        return _copy(source, out, "all_reduce")

    def _all_gather(self, call: str, x: Array, sizes: Sequence[int] | None, out: Array | None) -> Array:
        source = buffers.contiguous(x)
        buffers.check_rows(source, call)
        buffers.split_sizes(len(source), 1, sizes, call, "sizes")
        return _copy(source, out, call)

    def _reduce_scatter(
        self, call: str, x: Array, op: ReduceOp, sizes: Sequence[int] | None, out: Array | None
    ) -> Array:
        source = buffers.contiguous(x)
        buffers.check_reduction(source.dtype, op, call)
        buffers.check_rows(source, call)
        buffers.split_sizes(len(source), 1, sizes, call, "sizes")
        return _copy(source, out, call)

    def _all_to_all(
        self,
        call: str,
        x: Array,
        send_sizes: Sequence[int] | None,
        receive_sizes: Sequence[int] | None,
        out: Array | None,
    ) -> Array:
        source = buffers.contiguous(x)
        sent, received = buffers.exchange_sizes(source, 1, send_sizes, receive_sizes, call)
        if sent != received:
            raise ValueError(
                f"{call} in a group of one rank sends {sent[0]} rows to itself but expects "
                f"{received[0]}: send_sizes and receive_sizes must be equal"
            )
        return _copy(source, out, call)

    def _finish(self, made: Array) -> Array:
        return made

    def _start(self, made: Array) -> Request:
        return DONE

    def broadcast(self, x: Array, root: int = 0, *, out: Array | None = None) -> Array:
        source = buffers.contiguous(x)
        buffers.check_root(root, 1)
        return _copy(source, out, "broadcast")

    def send(self, x: Array, destination: int, *, tag: int = 0) -> None:
        _no_peer(destination, "send")

    def recv(self, out: Array, source: int, *, tag: int = 0) -> Array:
        _no_peer(source, "recv")

    def isend(self, x: Array, destination: int, *, tag: int = 0) -> Request:
        _no_peer(destination, "isend")

    def irecv(self, out: Array, source: int, *, tag: int = 0) -> Request:
        _no_peer(source, "irecv")

    def barrier(self) -> None:
        return None

    def split(self, color: int, *, key: int | None = None) -> Communicator:
        buffers.check_color(color)
        return self

    def subgroup(self, ranks: Sequence[int], *, tag: int = 0) -> Communicator:
        buffers.check_subgroup(ranks, 0, 1)
        return self

    def abort(self, exit_code: int) -> NoReturn:
        raise SystemExit(exit_code)


@frozen
class _Done:
    def wait(self) -> None:
        return None

    def done(self) -> bool:
        return True


DONE: Request = _Done()
"""What is done already."""


def _copy(source: Array, out: Array | None, call: str) -> Array:
    result = buffers.output(out, source.shape, source.dtype, call)
    result[...] = source
    return result


def _no_peer(peer: int, call: str) -> NoReturn:
    raise ValueError(f"{call} with rank {peer} in a group of one rank: there is no other rank")
