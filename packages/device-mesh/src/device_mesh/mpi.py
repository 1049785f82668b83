"""The `mpi` backend: a communicator over mpi4py. Importing this module starts MPI."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NoReturn

import numpy as np
from attrs import define, frozen
from mpi4py import MPI

from device_mesh import buffers
from device_mesh.collectives import FollowedUp, PairedCollectives
from device_mesh.communicator import Array, Communicator, ReduceOp, Request
from device_mesh.half import is_bfloat16, wide
from device_mesh.shared_memory import unlink_segments
from device_mesh.single import SingleCommunicator
from device_mesh.waiting import Wait, choose, hold_core

_OPS = {"sum": MPI.SUM, "max": MPI.MAX, "min": MPI.MIN}


def world() -> Communicator:
    """The communicator of all ranks that the launcher started."""
    comm = MPI.COMM_WORLD
    if comm.size == 1:
        unlink_segments()
        return SingleCommunicator()
    here = comm.Split_type(MPI.COMM_TYPE_SHARED)
    wait = choose(comm, here)
    if here.rank == 0:
        unlink_segments()
    here.Free()
    return MpiCommunicator(comm, tuple(range(comm.size)), wait)


@frozen(eq=False)
class MpiCommunicator(PairedCollectives["_Collective"]):
    """A group of ranks over an MPI communicator. See `device_mesh.Communicator` for each call.

    Counts are passed to MPI as 64-bit integers, so arrays of more than 2**31 elements work.
    """

    _comm: Any
    ranks: tuple[int, ...]
    _wait: Wait

    @property
    def rank(self) -> int:
        return int(self._comm.rank)

    @property
    def size(self) -> int:
        return len(self.ranks)

    def all_reduce(self, x: Array, op: ReduceOp = "sum", *, out: Array | None = None) -> Array:
        source = buffers.contiguous(x)
        buffers.check_reduction(source.dtype, op, "all_reduce")
        result = buffers.output(out, source.shape, source.dtype, "all_reduce")
        added = wide(source)
        if added is not source:
            return buffers.narrow(self.all_reduce(added, op), result)
        in_place = source.ctypes.data == result.ctypes.data
        sent = MPI.IN_PLACE if in_place else _bytes_if_bool(buffers.apart(source, result))
        self._collective("Allreduce", sent, _bytes_if_bool(result), op=_OPS[op])
        return result

    def _all_gather(self, call: str, x: Array, sizes: Sequence[int] | None, out: Array | None) -> _Collective:
        source = buffers.contiguous(x)
        buffers.check_rows(source, call)
        rows = buffers.own_sizes(len(source), self.rank, self.size, sizes, call)
        result = buffers.output(out, (sum(rows), *source.shape[1:]), source.dtype, call)
        source, filled = _carried(buffers.apart(source, result)), _carried(result)
        if sizes is None:
            return _Collective("Allgather", (source, filled), result)
        return _Collective("Allgatherv", (source, [filled, buffers.counts(rows, source)]), result)

    def _reduce_scatter(
        self, call: str, x: Array, op: ReduceOp, sizes: Sequence[int] | None, out: Array | None
    ) -> _Collective:
        source = buffers.contiguous(x)
        buffers.check_reduction(source.dtype, op, call)
        buffers.check_rows(source, call)
        rows = buffers.split_sizes(len(source), self.size, sizes, call, "sizes")
        result = buffers.output(out, (rows[self.rank], *source.shape[1:]), source.dtype, call)
        source = wide(source)
        received = result if source.dtype == result.dtype else np.empty(result.shape, source.dtype)
        counts = () if sizes is None else (buffers.counts(rows, source),)
        arrays = _bytes_if_bool(buffers.apart(source, received)), _bytes_if_bool(received)
        name = "Reduce_scatter_block" if sizes is None else "Reduce_scatter"
        then = None if received is result else partial(buffers.narrow, received, result)
        return _Collective(name, (*arrays, *counts, _OPS[op]), result, then)

    def _all_to_all(
        self,
        call: str,
        x: Array,
        send_sizes: Sequence[int] | None,
        receive_sizes: Sequence[int] | None,
        out: Array | None,
    ) -> _Collective:
        source = buffers.contiguous(x)
        sent, received = buffers.exchange_sizes(source, self.size, send_sizes, receive_sizes, call)
        result = buffers.output(out, (sum(received), *source.shape[1:]), source.dtype, call)
        source, filled = _carried(buffers.apart(source, result)), _carried(result)
        if send_sizes is None:
            return _Collective("Alltoall", (source, filled), result)
        sides = [source, buffers.counts(sent, source)], [filled, buffers.counts(received, source)]
        return _Collective("Alltoallv", sides, result)

    def broadcast(self, x: Array, root: int = 0, *, out: Array | None = None) -> Array:
        source = buffers.contiguous(x)
        buffers.check_root(root, self.size)
        result = buffers.output(out, source.shape, source.dtype, "broadcast")
        if self.rank == root and source.ctypes.data != result.ctypes.data:
            result[...] = source
        self._collective("Bcast", _carried(result), root)
        return result

    def send(self, x: Array, destination: int, *, tag: int = 0) -> None:
        buffers.check_peer(destination, self.rank, self.size, "send")
        self.isend(x, destination, tag=tag).wait()

    def recv(self, out: Array, source: int, *, tag: int = 0) -> Array:
        self.irecv(out, source, tag=tag).wait()
        return out

    def isend(self, x: Array, destination: int, *, tag: int = 0) -> Request:
        buffers.check_peer(destination, self.rank, self.size, "isend")
        return _Started(self._comm.Isend(_carried(buffers.contiguous(x)), destination, tag), self._wait)

    def irecv(self, out: Array, source: int, *, tag: int = 0) -> Request:
        buffers.check_peer(source, self.rank, self.size, "irecv")
        buffers.writable(out)
        request = self._comm.Irecv(_carried(out), source, tag)
        return _Receive(request, self._wait, out, f"rank {self.ranks[self.rank]} from {self.ranks[source]}")

    def barrier(self) -> None:
        self._collective("Barrier")

    def split(self, color: int, *, key: int | None = None) -> Communicator:
        buffers.check_color(color)
        return self._group(self._comm.Split(color, self.rank if key is None else key))

    def subgroup(self, ranks: Sequence[int], *, tag: int = 0) -> Communicator:
        buffers.check_subgroup(ranks, self.rank, self.size)
        if len(ranks) == 1:
            return SingleCommunicator(self.ranks[self.rank])
        # Unlike Split, Create_group involves the members alone: ranks of other groups need not take part.
        return self._group(self._comm.Create_group(self._comm.Get_group().Incl(list(ranks)), tag))

    def abort(self, exit_code: int) -> NoReturn:
        # MPICH reports an abort on stderr, below the traceback that says why.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        MPI.COMM_WORLD.Abort(exit_code)
        os._exit(exit_code)  # a launcher that answers PMI alone cannot end us

    def _collective(self, name: str, *arguments: Any, **options: Any) -> None:
        """Call a collective of mpi4py."""
        if self._wait is hold_core:
            getattr(self._comm, name)(*arguments, **options)
        else:
            self._wait(self._call(name, *arguments, **options), None)

    def _finish(self, made: _Collective) -> Array:
        self._collective(made.name, *made.arguments)
        if made.then:
            made.then()
        return made.result

    def _start(self, made: _Collective) -> Request:
        return FollowedUp(_Started(self._call(made.name, *made.arguments), self._wait), made.then)

    def _call(self, name: str, *arguments: Any, **options: Any) -> Any:
        """Start a collective of mpi4py."""
        return getattr(self._comm, f"I{name.lower()}")(*arguments, **options)

    def _group(self, comm: Any) -> Communicator:
        members = MPI.Group.Translate_ranks(comm.Get_group(), list(range(comm.size)), self._comm.Get_group())
        ranks = tuple(self.ranks[member] for member in members)
        return SingleCommunicator(ranks[0]) if len(ranks) == 1 else MpiCommunicator(comm, ranks, self._wait)


@frozen(eq=False)
class _Collective:
    """A collective of mpi4py by its blocking name, where its result goes, and what is left to do once it is done."""

    name: str
    arguments: tuple[Any, ...]
    result: Array
    then: Callable[[], object] | None = None


@frozen(eq=False)
class _Started:
    """A message being sent, or a collective."""

    _request: Any
    _wait: Wait

    def wait(self) -> None:
        self._wait(self._request, None)

    def done(self) -> bool:
        return bool(self._request.Test())


@define(eq=False)
class _Receive:
    _request: Any
    _wait: Wait
    _out: Array
    _route: str
    _finished: bool = False
    _problem: str | None = None

    def wait(self) -> None:
        if not self._finished:
            self._look(self._wait)
        self._report()

    def done(self) -> bool:
        if not self._finished:
            self._look(lambda request, status: request.Test(status))
        self._report()
        return self._finished

    def _look(self, look: Callable[[Any, Any], object]) -> None:
        # MPI tells a finished message's length once; after that its request says nothing.
        status = MPI.Status()
        try:
            look(self._request, status)
        except MPI.Exception as error:
            if error.Get_error_class() != MPI.ERR_TRUNCATE:
                raise
            # MPI does not say how long a message was that did not fit.
            self._finished, self._problem = True, f"more than {self._out.nbytes} bytes"
            return
        self._finished = self._request == MPI.REQUEST_NULL
        if self._finished and (received := status.Get_count(MPI.BYTE)) != self._out.nbytes:
            self._problem = f"{received} bytes"

    def _report(self) -> None:
        if self._problem is not None:
            raise ValueError(buffers.wrong_length(self._route, self._problem, self._out))


def _carried(x: Array) -> Array:
    # MPI knows no bfloat16, and needs to know nothing of what it moves.
    return x.view(np.uint16) if is_bfloat16(x.dtype) else x


def _bytes_if_bool(x: Array) -> Array:
    # MPI defines no max and min on its bool; on 0 and 1 as bytes they are any and all.
    return x.view(np.uint8) if x.dtype == np.bool_ else x
