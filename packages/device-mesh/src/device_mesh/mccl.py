"""MindSpore's own communication on CPUs (mccl) as an engine: the collectives it has, and all else composed of them.

mccl has all_reduce, all_gather, broadcast and barrier. Everything here that is not one of these is made of them, at the
cost of moving more: `reduce_scatter` reduces everything everywhere, `all_to_all` gathers everything everywhere. A
message is a broadcast in a group of the two ranks. mccl keeps what is broadcast until its receiver asks for it, so a
sender never waits; one group for each direction keeps the two apart, and since mccl opens a group without waiting on
the rank that is listed first, the sender, opening one never waits for a rank that does not yet receive.

Importing this module loads MindSpore.
"""

from __future__ import annotations

import zlib
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
from attrs import define, field, frozen
from mindspore import Tensor
from mindspore.communication import create_group
from mindspore.mint import distributed

from device_mesh import buffers
from device_mesh.communicator import Array, ReduceOp, Request
from device_mesh.engine import Group
from device_mesh.single import DONE

_WAIT_SECONDS = 30
_REDUCED = frozenset(np.dtype(name) for name in ("int8", "int16", "int32", "int64", "float32"))
_UFUNCS: dict[str, np.ufunc] = {"sum": np.add, "max": np.maximum, "min": np.minimum}


@frozen(eq=False)
class Mccl:
    """mccl from one process: every collective is made at once.

    Its tensors share memory with the arrays, so that nothing is copied on the way.

    Args:
        rank: this process in the world.
        opened: names of the groups that need not be opened: the world's.
    """

    _rank: int
    _opened: set[str]
    _inboxes: dict[int, _Inbox] = field(factory=dict, init=False)

    def open(self, group: Group) -> None:
        self._open(group.name, list(group.members))

    def check_reduction(self, dtype: np.dtype[Any], call: str) -> None:
        return None

    def all_reduce(self, x: Array, op: ReduceOp, group: Group) -> None:
        if x.dtype not in _REDUCED:
            gathered = np.empty((len(group.members), x.size), x.dtype)
            self._gather(x.view(np.uint8), gathered.view(np.uint8), group)
            _UFUNCS[op].reduce(gathered, axis=0, out=x)
            return
        self.open(group)
        with _explained("all_reduce", group.members):
            tensor = Tensor.from_numpy(x)
            distributed.all_reduce(tensor, op, group=group.name)
            tensor.asnumpy()  # waits for the result

    def ireduce_scatter(self, x: Array, out: Array, counts: Sequence[int], op: ReduceOp, group: Group) -> Request:
        whole = x.copy()
        self.all_reduce(whole, op, group)
        out[...] = _pieces(whole, counts)[group.members.index(self._rank)]
        return DONE

    def iall_gather(self, x: Array, out: Array, counts: Sequence[int], group: Group) -> Request:
        if min(counts) == max(counts):
            self._gather(x, out.reshape(len(counts), -1), group)
            return DONE
        padded = np.zeros(max(counts), np.uint8)
        padded[: x.size] = x
        table = np.empty((len(counts), max(counts)), np.uint8)
        self._gather(padded, table, group)
        np.concatenate([row[:count] for row, count in zip(table, counts, strict=True)], out=out)
        return DONE

    def iall_to_all(self, x: Array, out: Array, sent: Sequence[int], received: Sequence[int], group: Group) -> Request:
        size = len(group.members)
        sizes = np.empty((size, size), np.int64)
        self._gather(np.array(sent, np.int64).view(np.uint8), sizes.view(np.uint8), group)
        totals = sizes.sum(axis=1).tolist()
        everything = np.empty(sum(totals), np.uint8)
        if everything.size:
            self.iall_gather(x, everything, totals, group)
        position = group.members.index(self._rank)
        arriving = [
            _pieces(row, counts)[position]
            for row, counts in zip(_pieces(everything, totals), sizes.tolist(), strict=True)
        ]
        given = [piece.size for piece in arriving]
        if given != list(received):
            raise ValueError(
                f"rank {self._rank} expects {list(received)} bytes from the ranks {group.members}, which send it "
                f"{given}: its receive_sizes must be what their send_sizes say for it"
            )
        np.concatenate(arriving, out=out)
        return DONE

    def broadcast(self, x: Array, root: int, group: Group) -> None:
        self.open(group)
        with _explained("broadcast", group.members):
            _broadcast(x, root, group.name)

    def barrier(self, group: Group) -> None:
        # mint's barrier works, but each call leaves an error in the log: it asks the CPU to synchronize.
        self._gather(np.zeros(1, np.uint8), np.empty((len(group.members), 1), np.uint8), group)

    def isend(self, x: Array, destination: int, tag: int, group: Group) -> Request:
        name = self._open_route(self._rank, destination)
        with _explained("send", (self._rank, destination)):
            _broadcast(np.array([_channel(group), tag, x.size], np.int64).view(np.uint8), self._rank, name)
            if x.size:
                _broadcast(x, self._rank, name)
        return DONE

    def irecv(self, out: Array, source: int, tag: int, group: Group) -> Request:
        if source not in self._inboxes:
            self._inboxes[source] = _Inbox(self, source)
        return self._inboxes[source].expect((_channel(group), tag), out)

    def _receive(self, source: int) -> tuple[_Address, Array]:
        """The next message from a rank, whoever it is for."""
        name = self._open_route(source, self._rank)
        with _explained("recv", (source, self._rank)):
            header = np.empty(3, np.int64)
            _broadcast(header.view(np.uint8), source, name)
            channel, tag, length = header.tolist()
            message = np.empty(length, np.uint8)
            if length:
                _broadcast(message, source, name)
        return (channel, tag), message

    def _gather(self, x: Array, rows: Array, group: Group) -> None:
        self.open(group)
        with _explained("all_gather", group.members):
            tensors = [Tensor.from_numpy(row) for row in rows]
            distributed.all_gather(tensors, Tensor.from_numpy(x), group=group.name)
            for tensor in tensors:
                tensor.asnumpy()

    def _open_route(self, source: int, destination: int) -> str:
        name = f"device_mesh_{source}_to_{destination}"
        self._open(name, [source, destination])
        return name

    def _open(self, name: str, members: list[int]) -> None:
        if name not in self._opened:
            create_group(name, members)
            self._opened.add(name)


_Address = tuple[int, int]


@define(eq=False)
class _Inbox:
    """Messages from one rank: they come in the order they were sent and are told apart by group and tag."""

    _engine: Mccl
    _source: int
    _expected: defaultdict[_Address, list[_Receive]] = field(factory=lambda: defaultdict(list), init=False)
    _early: defaultdict[_Address, list[Array]] = field(factory=lambda: defaultdict(list), init=False)

    def expect(self, address: _Address, out: Array) -> _Receive:
        receive = _Receive(self, f"rank {self._engine._rank} from {self._source}", out)
        if self._early[address]:
            receive.take(self._early[address].pop(0))
        else:
            self._expected[address].append(receive)
        return receive

    def next(self) -> None:
        """Wait for one more message and give it to the receive that was started first of those it is for."""
        address, message = self._engine._receive(self._source)
        if self._expected[address]:
            self._expected[address].pop(0).take(message)
        else:
            self._early[address].append(message)


@define(eq=False)
class _Receive:
    _inbox: _Inbox
    _route: str
    _out: Array
    _received: int | None = None

    def take(self, message: Array) -> None:
        self._received = message.size
        if message.size == self._out.nbytes:
            self._out.reshape(-1).view(np.uint8)[...] = message

    def wait(self) -> None:
        while self._received is None:
            self._inbox.next()
        if self._received != self._out.nbytes:
            raise ValueError(buffers.wrong_length(self._route, f"{self._received} bytes", self._out))

    def done(self) -> bool:
        if self._received is None:
            raise NotImplementedError(
                "mccl cannot tell whether a message has come, so done() of a receive does not work before wait(): "
                "call wait(), or connect the ranks by the 'mpi' backend, as debug mode needs"
            )
        self.wait()
        return True


def _broadcast(x: Array, root: int, name: str) -> None:
    tensor = Tensor.from_numpy(x)
    distributed.broadcast(tensor, root, group=name)
    tensor.asnumpy()


def _channel(group: Group) -> int:
    return zlib.crc32(group.name.encode())


def _pieces(x: Array, counts: Sequence[int]) -> list[Array]:
    return np.split(x, np.cumsum(counts)[:-1])


@contextmanager
def _explained(call: str, members: Sequence[int]) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise RuntimeError(
            f"mccl failed in {call} among the ranks {tuple(members)}: all of them must make the same calls on arrays "
            f"of one size, each at most {_WAIT_SECONDS} s after another, for mccl waits no longer"
        ) from error
