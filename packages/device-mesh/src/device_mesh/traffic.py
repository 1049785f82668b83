"""Counting what a rank receives, and in which order it starts and awaits it: a communicator that writes down calls.

Bytes are those that must come to the rank from others, at least: of an all-gather all pieces but its own; of a
reduce-scatter its own piece from each other rank; of an all-reduce those two, with equal pieces; of an all-to-all all
pieces but its own; of a broadcast the array, except on the root. Counting changes nothing that is sent.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Literal

from attrs import define, field, frozen

from device_mesh.collectives import FollowedUp
from device_mesh.communicator import Array, Communicator, ReduceOp, Request
from device_mesh.forwarding import ForwardingCommunicator


@frozen
class Call:
    """One call of a collective or a transfer.

    group:          the name that the communicator was counted under, such as a mesh axis.
    operation:      "all_reduce" and so on; non-blocking calls have the names of the blocking ones.
    during:         the label of the innermost `Traffic.during`, "" outside; it means what its author says, and two
        pieces of work with one label cannot be told apart.
    received_bytes: what comes to this rank from others, as the module counts it.
    """

    group: str
    operation: str
    during: str
    received_bytes: int


@frozen
class Moment:
    """When a call began, or was known to be done: a blocking call ends where it starts, another where it is awaited."""

    what: Literal["start", "end"]
    call: Call


@define(eq=False)
class Traffic:
    """What this rank's counted communicators did: `calls` in the order in which they were made, and with their ends in
    `moments`.

    >>> import numpy as np
    >>> from device_mesh import Traffic, connect
    >>> traffic = Traffic()
    >>> counted = traffic.count(connect("single"), "world")
    >>> with traffic.during("a step"):
    ...     total = counted.all_reduce(np.ones(4))
    >>> traffic.calls
    [Call(group='world', operation='all_reduce', during='a step', received_bytes=0)]
    """

    calls: list[Call] = field(factory=list)
    moments: list[Moment] = field(factory=list)
    _during: list[str] = field(factory=list)

    def count(self, communicator: Communicator, group: str) -> CountingCommunicator:
        """The same communicator, whose calls are written down under the name `group`."""
        return CountingCommunicator(communicator, group, self)

    @contextmanager
    def during(self, what: str) -> Iterator[None]:
        """Calls made inside are written down with `what`; the innermost counts."""
        self._during.append(what)
        try:
            yield
        finally:
            self._during.pop()

    def received_bytes(self, key: Callable[[Call], str] = lambda call: call.group) -> Counter[str]:
        """Sums of bytes by a property of the calls, the group if left out."""
        sums: Counter[str] = Counter()
        for call in self.calls:
            sums[key(call)] += call.received_bytes
        return sums

    def _start(self, group: str, operation: str, received: float) -> Call:
        call = Call(group, operation, self._during[-1] if self._during else "", round(received))
        self.calls.append(call)
        self.moments.append(Moment("start", call))
        return call

    def _end(self, call: Call) -> None:
        self.moments.append(Moment("end", call))


@frozen(eq=False)
class CountingCommunicator(ForwardingCommunicator):
    """A communicator whose calls a `Traffic` writes down. Made by `Traffic.count`; groups split off are counted too."""

    _name: str
    _traffic: Traffic

    def all_reduce(self, x: Array, op: ReduceOp = "sum", *, out: Array | None = None) -> Array:
        self._write("all_reduce", 2 * x.nbytes * (self.size - 1) / self.size)
        return self._inner.all_reduce(x, op, out=out)

    def all_gather(self, x: Array, *, sizes: Sequence[int] | None = None, out: Array | None = None) -> Array:
        result = self._inner.all_gather(x, sizes=sizes, out=out)
        self._write("all_gather", result.nbytes - x.nbytes)
        return result

    def iall_gather(self, x: Array, *, sizes: Sequence[int] | None = None, out: Array) -> Request:
        return self._under_way("all_gather", out.nbytes - x.nbytes, self._inner.iall_gather(x, sizes=sizes, out=out))

    def reduce_scatter(
        self,
        x: Array,
        op: ReduceOp = "sum",
        *,
        sizes: Sequence[int] | None = None,
        out: Array | None = None,
    ) -> Array:
        result = self._inner.reduce_scatter(x, op, sizes=sizes, out=out)
        self._write("reduce_scatter", result.nbytes * (self.size - 1))
        return result

    def ireduce_scatter(
        self, x: Array, op: ReduceOp = "sum", *, sizes: Sequence[int] | None = None, out: Array
    ) -> Request:
        request = self._inner.ireduce_scatter(x, op, sizes=sizes, out=out)
        return self._under_way("reduce_scatter", out.nbytes * (self.size - 1), request)

    def all_to_all(
        self,
        x: Array,
        *,
        send_sizes: Sequence[int] | None = None,
        receive_sizes: Sequence[int] | None = None,
        out: Array | None = None,
    ) -> Array:
        result = self._inner.all_to_all(x, send_sizes=send_sizes, receive_sizes=receive_sizes, out=out)
        self._write("all_to_all", self._from_others(result, receive_sizes))
        return result

    def iall_to_all(
        self,
        x: Array,
        *,
        send_sizes: Sequence[int] | None = None,
        receive_sizes: Sequence[int] | None = None,
        out: Array,
    ) -> Request:
        request = self._inner.iall_to_all(x, send_sizes=send_sizes, receive_sizes=receive_sizes, out=out)
        return self._under_way("all_to_all", self._from_others(out, receive_sizes), request)

    def broadcast(self, x: Array, root: int = 0, *, out: Array | None = None) -> Array:
        self._write("broadcast", 0 if self.rank == root else x.nbytes)
        return self._inner.broadcast(x, root, out=out)

    def send(self, x: Array, destination: int, *, tag: int = 0) -> None:
        self._write("send", 0)
        self._inner.send(x, destination, tag=tag)

    def recv(self, out: Array, source: int, *, tag: int = 0) -> Array:
        self._write("recv", out.nbytes)
        return self._inner.recv(out, source, tag=tag)

    def isend(self, x: Array, destination: int, *, tag: int = 0) -> Request:
        return self._under_way("send", 0, self._inner.isend(x, destination, tag=tag))

    def irecv(self, out: Array, source: int, *, tag: int = 0) -> Request:
        return self._under_way("recv", out.nbytes, self._inner.irecv(out, source, tag=tag))

    def split(self, color: int, *, key: int | None = None) -> Communicator:
        return self._traffic.count(self._inner.split(color, key=key), self._name)

    def subgroup(self, ranks: Sequence[int], *, tag: int = 0) -> Communicator:
        return self._traffic.count(self._inner.subgroup(ranks, tag=tag), self._name)

    def _write(self, operation: str, received: float) -> None:
        self._traffic._end(self._traffic._start(self._name, operation, received))

    def _under_way(self, operation: str, received: float, request: Request) -> Request:
        return FollowedUp(request, partial(self._traffic._end, self._traffic._start(self._name, operation, received)))

    def _from_others(self, received: Array, sizes: Sequence[int] | None) -> float:
        """Bytes of an all-to-all's result that are not the rank's own."""
        if sizes is None:
            return received.nbytes * (self.size - 1) / self.size
        return received.nbytes - sizes[self.rank] * (received.nbytes / len(received) if len(received) else 0)
