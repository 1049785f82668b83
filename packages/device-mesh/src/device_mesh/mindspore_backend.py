"""The `mindspore` backend: a communicator over MindSpore's own communication. Importing this module loads MindSpore.

On Ascend that is HCCL (`hccl.py`), on CPUs mccl (`mccl.py`). Both start under msrun, whose scheduler process is then
MindSpore's.
"""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from itertools import count
from typing import NoReturn

import mindspore
import numpy as np
from attrs import field, frozen
from mindspore import communication
from mindspore.mint import distributed

from device_mesh import buffers
from device_mesh.abort import NOTICE_TAG
from device_mesh.collectives import FollowedUp, PairedCollectives
from device_mesh.communicator import Array, Communicator, ReduceOp, Request
from device_mesh.engine import Engine, Group
from device_mesh.half import wide
from device_mesh.hccl import Hccl
from device_mesh.mccl import Mccl
from device_mesh.single import DONE, SingleCommunicator

_ENGINES = {"Ascend": "hccl", "CPU": "mccl"}


def world() -> Communicator:
    """The communicator of all workers that msrun started. In msrun's scheduler: does not return before the job is over.

    Raises ValueError where MindSpore is set to another device than Ascend or CPU.
    """
    device = mindspore.get_context("device_target")
    if device not in _ENGINES:
        raise ValueError(f"the mindspore backend does not know the device {device!r}: set 'Ascend' or 'CPU'")
    if not communication.GlobalComm.INITED:
        communication.init(_ENGINES[device])
    rank, size = communication.get_rank(), communication.get_group_size()
    if size == 1:
        return SingleCommunicator()
    name = communication.GlobalComm.WORLD_COMM_GROUP
    engine: Engine = (
        Hccl({name}, distributed, mindspore.runtime, communication.create_group)
        if device == "Ascend"
        else Mccl(rank, {name})
    )
    everyone = tuple(range(size))
    return MindSporeCommunicator(engine, Group(name, everyone, name), rank, everyone)


@frozen(eq=False)
class MindSporeCommunicator(PairedCollectives["_Collective"]):
    """A group of ranks over HCCL or mccl. See `device_mesh.Communicator` for each call.

    Arrays are NumPy arrays in host memory: for HCCL they are copied to the device and back.

    `subgroup` sends nothing. MindSpore's group is made by the first collective in it, so that ranks that make several
    in different orders do not wait for each other there; messages in it travel on the group it was cut out of.
    """

    _engine: Engine
    _group: Group
    _world_rank: int
    ranks: tuple[int, ...]
    _splits: Iterator[int] = field(factory=count, init=False, repr=False)

    @property
    def rank(self) -> int:
        return self.ranks.index(self._world_rank)

    @property
    def size(self) -> int:
        return len(self.ranks)

    def all_reduce(self, x: Array, op: ReduceOp = "sum", *, out: Array | None = None) -> Array:
        source = buffers.contiguous(x)
        self._check_reduction(source, op, "all_reduce")
        result = buffers.output(out, source.shape, source.dtype, "all_reduce")
        added = wide(source)
        if added is not source:
            return buffers.narrow(self.all_reduce(added, op), result)
        if source.ctypes.data != result.ctypes.data:
            result[...] = source
        if result.size:
            self._engine.all_reduce(result.reshape(-1), op, self._group)
        return result

    def _all_gather(self, call: str, x: Array, sizes: Sequence[int] | None, out: Array | None) -> _Collective:
        source = buffers.contiguous(x)
        buffers.check_rows(source, call)
        rows = buffers.own_sizes(len(source), self.rank, self.size, sizes, call)
        result = buffers.output(out, (sum(rows), *source.shape[1:]), source.dtype, call)
        if not result.size:
            return _Collective(DONE, result)
        given, arriving = _bytes(buffers.apart(source, result)), _bytes(result)
        counts = self._ascending(buffers.counts(rows, source, source.itemsize))
        request = self._engine.iall_gather(given, arriving, counts, self._group)
        return _Collective(request, result, partial(self._reorder, arriving, counts))

    def _reduce_scatter(
        self, call: str, x: Array, op: ReduceOp, sizes: Sequence[int] | None, out: Array | None
    ) -> _Collective:
        source = buffers.contiguous(x)
        self._check_reduction(source, op, call)
        buffers.check_rows(source, call)
        rows = buffers.split_sizes(len(source), self.size, sizes, call, "sizes")
        result = buffers.output(out, (rows[self.rank], *source.shape[1:]), source.dtype, call)
        if not source.size:
            return _Collective(DONE, result)
        source = wide(source)
        received = result if source.dtype == result.dtype else np.empty(result.shape, source.dtype)
        counts = buffers.counts(rows, source)
        given = self._pieces_ascending(buffers.apart(source, received).reshape(-1), counts)
        request = self._engine.ireduce_scatter(given, received.reshape(-1), self._ascending(counts), op, self._group)
        return _Collective(request, result, None if received is result else partial(buffers.narrow, received, result))

    def _all_to_all(
        self,
        call: str,
        x: Array,
        send_sizes: Sequence[int] | None,
        receive_sizes: Sequence[int] | None,
        out: Array | None,
    ) -> _Collective:
        source = buffers.contiguous(x)
        rows = buffers.exchange_sizes(source, self.size, send_sizes, receive_sizes, call)
        result = buffers.output(out, (sum(rows[1]), *source.shape[1:]), source.dtype, call)
        if send_sizes is None and not source.size:
            return _Collective(DONE, result)
        sent, received = (buffers.counts(each, source, source.itemsize) for each in rows)
        given, arriving = self._pieces_ascending(_bytes(buffers.apart(source, result)), sent), _bytes(result)
        counts = self._ascending(received)
        request = self._engine.iall_to_all(given, arriving, self._ascending(sent), counts, self._group)
        return _Collective(request, result, partial(self._reorder, arriving, counts))

    def broadcast(self, x: Array, root: int = 0, *, out: Array | None = None) -> Array:
        source = buffers.contiguous(x)
        buffers.check_root(root, self.size)
        result = buffers.output(out, source.shape, source.dtype, "broadcast")
        if self.rank == root and source.ctypes.data != result.ctypes.data:
            result[...] = source
        if result.size:
            self._engine.broadcast(_bytes(result), self.ranks[root], self._group)
        return result

    def send(self, x: Array, destination: int, *, tag: int = 0) -> None:
        buffers.check_peer(destination, self.rank, self.size, "send")
        self.isend(x, destination, tag=tag).wait()

    def recv(self, out: Array, source: int, *, tag: int = 0) -> Array:
        buffers.check_peer(source, self.rank, self.size, "recv")
        self.irecv(out, source, tag=tag).wait()
        return out

    def isend(self, x: Array, destination: int, *, tag: int = 0) -> Request:
        buffers.check_peer(destination, self.rank, self.size, "isend")
        _refuse_notices(tag)
        return self._engine.isend(_bytes(buffers.contiguous(x)), self.ranks[destination], tag, self._group)

    def irecv(self, out: Array, source: int, *, tag: int = 0) -> Request:
        buffers.check_peer(source, self.rank, self.size, "irecv")
        _refuse_notices(tag)
        buffers.writable(out)
        return self._engine.irecv(out, self.ranks[source], tag, self._group)

    def barrier(self) -> None:
        self._engine.barrier(self._group)

    def split(self, color: int, *, key: int | None = None) -> Communicator:
        buffers.check_color(color)
        choices = self.all_gather(np.array([[color, self.rank if key is None else key]], np.int64)).tolist()
        members = [member for member in range(self.size) if choices[member][0] == color]
        members.sort(key=lambda member: (choices[member][1], member))
        split = self._cut(members, f"split {next(self._splits)}")
        if isinstance(split, MindSporeCommunicator):
            # Every rank is in one of the groups alone, and all make them at the same time: no order could be wrong.
            self._engine.open(split._group)
        return split

    def subgroup(self, ranks: Sequence[int], *, tag: int = 0) -> Communicator:
        buffers.check_subgroup(ranks, self.rank, self.size)
        return self._cut(ranks, f"subgroup {tag}", carrier=self._group.carrier)

    def abort(self, exit_code: int) -> NoReturn:
        # msrun ends the other workers when one has ended.
        for stream in (sys.stdout, sys.stderr):
            with suppress(Exception):
                stream.flush()
        os._exit(exit_code)

    def _cut(self, members: Sequence[int], how: str, carrier: str | None = None) -> Communicator:
        """The communicator of some ranks of this group; `how` tells it from others of the same ranks."""
        ranks = tuple(self.ranks[member] for member in members)
        if len(ranks) == 1:
            return SingleCommunicator(ranks[0])
        ascending = tuple(sorted(ranks))
        path = f"{self._group.name} {how} {ascending}"
        name = f"device_mesh_{len(ranks)}_{hashlib.sha256(path.encode()).hexdigest()[:32]}"
        return MindSporeCommunicator(self._engine, Group(name, ascending, carrier or name), self._world_rank, ranks)

    def _finish(self, made: _Collective) -> Array:
        self._start(made).wait()
        return made.result

    def _start(self, made: _Collective) -> Request:
        return FollowedUp(made.request, made.then)

    def _check_reduction(self, x: Array, op: ReduceOp, call: str) -> None:
        buffers.check_reduction(x.dtype, op, call)
        self._engine.check_reduction(x.dtype, call)

    @property
    def _is_ascending(self) -> bool:
        return self.ranks == self._group.members

    def _ascending(self, counts: Sequence[int]) -> list[int]:
        """What belongs to each rank, in the engine's order."""
        return [counts[self.ranks.index(member)] for member in self._group.members]

    def _pieces_ascending(self, x: Array, counts: Sequence[int]) -> Array:
        """`x`, of `counts` elements for each rank, in the engine's order."""
        if self._is_ascending:
            return x
        pieces = np.split(x, np.cumsum(counts)[:-1])
        return np.concatenate([pieces[self.ranks.index(member)] for member in self._group.members])

    def _reorder(self, x: Array, counts: Sequence[int]) -> None:
        """Put what is in the engine's order, `counts` elements for each, into the order of this group, in place."""
        if not self._is_ascending:
            pieces = np.split(x, np.cumsum(counts)[:-1])
            x[...] = np.concatenate([pieces[self._group.members.index(rank)] for rank in self.ranks])


@frozen(eq=False)
class _Collective:
    """A collective under way, where its result goes, and what is left to do once it is done."""

    request: Request
    result: Array
    then: Callable[[], object] | None = None


def _bytes(x: Array) -> Array:
    return x.reshape(-1).view(np.uint8)


def _refuse_notices(tag: int) -> None:
    """Raise for the messages by which `abort_on_error` finds one rank to speak for all; without them each speaks."""
    if tag == NOTICE_TAG:
        raise NotImplementedError(
            f"messages of tag {NOTICE_TAG} tell of a failure, but HCCL has no tags to keep them apart from others, and "
            "mccl cannot tell whether one has come: use another tag"
        )
