"""Debug mode: before each collective, the ranks compare what they are about to call.

Ranks that call different things hang, or take each other's bytes for their own. In debug mode every rank
first tells every other which call it makes, so that all of them can raise the same error instead. Messages
between two ranks (`send`, `recv`) are not compared here; the mpi backend checks their length always.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from collections.abc import Sequence
from typing import NoReturn

import numpy as np
from attrs import field, frozen

from device_mesh import buffers
from device_mesh.communicator import Array, Communicator, ReduceOp, Request
from device_mesh.forwarding import ForwardingCommunicator

_MESSAGE_BYTES = 2048
_TEXT_CHARACTERS = 200
_RULE = (
    "Every rank of a group must make the same calls in the same order, with the same shapes and dtypes; "
    "where ranks hold different numbers of rows, say so with sizes= (all_gather, reduce_scatter) or with "
    "send_sizes= and receive_sizes= (all_to_all)"
)


class CommunicatorMismatch(RuntimeError):
    """Ranks of one group made different collective calls, or one of them made none in time."""


@frozen(eq=False)
class CheckedCommunicator(ForwardingCommunicator):
    """A communicator that compares every collective call between the ranks before it makes it.

    Every collective raises `CommunicatorMismatch`, on all ranks of the group, when two ranks differ in the
    call, shape, dtype, operation, root or sizes. Nothing has been sent then, so the communicator can be used
    further.

    It also raises on the ranks that wait when others make no call in time. The ranks no longer agree then on
    which calls were made: every further collective raises the same error on those that waited.
    """

    _control: Communicator
    _timeout_seconds: float
    _given_up: list[_GivenUp] = field(factory=list, init=False, repr=False)

    @classmethod
    def over(cls, inner: Communicator, timeout_seconds: float) -> CheckedCommunicator:
        """Collective over `inner`: the comparisons get a communicator of their own."""
        return cls(inner, inner.split(0), timeout_seconds)

    def all_reduce(self, x: Array, op: ReduceOp = "sum", *, out: Array | None = None) -> Array:
        self._compare("all_reduce", x, {"op": op})
        return self._inner.all_reduce(x, op, out=out)

    def all_gather(self, x: Array, *, sizes: Sequence[int] | None = None, out: Array | None = None) -> Array:
        self._compare_gathers("all_gather", x, sizes)
        return self._inner.all_gather(x, sizes=sizes, out=out)

    def iall_gather(self, x: Array, *, sizes: Sequence[int] | None = None, out: Array) -> Request:
        self._compare_gathers("iall_gather", x, sizes)
        return self._inner.iall_gather(x, sizes=sizes, out=out)

    def reduce_scatter(
        self,
        x: Array,
        op: ReduceOp = "sum",
        *,
        sizes: Sequence[int] | None = None,
        out: Array | None = None,
    ) -> Array:
        self._compare("reduce_scatter", x, {"op": op, "sizes": _ints(sizes)})
        return self._inner.reduce_scatter(x, op, sizes=sizes, out=out)

    def ireduce_scatter(
        self, x: Array, op: ReduceOp = "sum", *, sizes: Sequence[int] | None = None, out: Array
    ) -> Request:
        self._compare("ireduce_scatter", x, {"op": op, "sizes": _ints(sizes)})
        return self._inner.ireduce_scatter(x, op, sizes=sizes, out=out)

    def all_to_all(
        self,
        x: Array,
        *,
        send_sizes: Sequence[int] | None = None,
        receive_sizes: Sequence[int] | None = None,
        out: Array | None = None,
    ) -> Array:
        self._compare_exchanges("all_to_all", x, send_sizes, receive_sizes)
        return self._inner.all_to_all(x, send_sizes=send_sizes, receive_sizes=receive_sizes, out=out)

    def iall_to_all(
        self,
        x: Array,
        *,
        send_sizes: Sequence[int] | None = None,
        receive_sizes: Sequence[int] | None = None,
        out: Array,
    ) -> Request:
        self._compare_exchanges("iall_to_all", x, send_sizes, receive_sizes)
        return self._inner.iall_to_all(x, send_sizes=send_sizes, receive_sizes=receive_sizes, out=out)

    def broadcast(self, x: Array, root: int = 0, *, out: Array | None = None) -> Array:
        self._compare("broadcast", x, {"root": int(root)})
        return self._inner.broadcast(x, root, out=out)

    def barrier(self) -> None:
        self._compare("barrier", None, {})
        self._inner.barrier()

    def split(self, color: int, *, key: int | None = None) -> Communicator:
        self._compare("split", None, {})
        return CheckedCommunicator.over(self._inner.split(color, key=key), self._timeout_seconds)

    def subgroup(self, ranks: Sequence[int], *, tag: int = 0) -> Communicator:
        return CheckedCommunicator.over(self._inner.subgroup(ranks, tag=tag), self._timeout_seconds)

    def _compare(
        self,
        name: str,
        x: Array | None,
        agreed: dict[str, object],
        *,
        rows_differ: bool = False,
        text: dict[str, object] | None = None,
    ) -> list[_Call]:
        """Tell all ranks of this call and return everybody's, by rank. Raises CommunicatorMismatch.

        All ranks must agree on `name`, the dtype and shape of `x` (except its rows if `rows_differ`), and
        `agreed`. Messages show `text` where it is given, and else `agreed`.
        """
        if x is not None:
            buffers.check_array(x, "x")
        arguments = [] if x is None else [f"x of shape {x.shape} and dtype {x.dtype}"]
        shown = agreed if text is None else text
        arguments += [f"{key}={value!r}" for key, value in shown.items() if value is not None]
        form = None if x is None else (str(x.dtype), x.shape[1:] if rows_differ else x.shape)
        key = repr((name, form, agreed))
        mine = _Call(
            text=_shorten(f"{name}({', '.join(arguments)})"),
            where=_call_site()[-_TEXT_CHARACTERS:],
            key=hashlib.sha256(key.encode()).hexdigest(),
            rows=0 if x is None or x.ndim == 0 else len(x),
        )
        calls = self._exchange(mine)
        for rank, call in enumerate(calls):
            if call.key != calls[0].key:
                self._fail(calls, 0, rank, "the ranks of a group made different collective calls")
        return calls

    def _compare_gathers(self, name: str, x: Array, sizes: Sequence[int] | None) -> None:
        calls = self._compare(name, x, {"sizes": _ints(sizes)}, rows_differ=sizes is not None)
        if sizes is not None:
            self._check_rows(calls, sizes)

    def _compare_exchanges(
        self, name: str, x: Array, send_sizes: Sequence[int] | None, receive_sizes: Sequence[int] | None
    ) -> None:
        sent, received = _ints(send_sizes), _ints(receive_sizes)
        calls = self._compare(
            name,
            x,
            {"lengths": [sizes and len(sizes) for sizes in (sent, received)]},
            rows_differ=sent is not None,
            text={"send_sizes": sent, "receive_sizes": received},
        )
        if sent is not None and received is not None:
            self._check_exchange(calls, name, sent, received)

    def _exchange(self, mine: _Call) -> list[_Call]:
        if self._given_up:
            raise CommunicatorMismatch(f"{self._given_up[0].message} (an earlier call; now it called {mine.text})")
        peers = [peer for peer in range(self.size) if peer != self.rank]
        received = np.zeros((self.size, _MESSAGE_BYTES), np.uint8)
        received[self.rank] = mine.pack()
        receiving = {peer: self._control.irecv(received[peer], peer) for peer in peers}
        sending = [self._control.isend(received[self.rank], peer) for peer in peers]
        deadline = time.monotonic() + self._timeout_seconds
        pause = 0.0
        while receiving := {peer: request for peer, request in receiving.items() if not request.done()}:
            if time.monotonic() > deadline:
                silent = ", ".join(str(self.ranks[peer]) for peer in receiving)
                message = (
                    f"rank {self.ranks[self.rank]} called {mine.text} at {mine.where}, but rank {silent} of "
                    f"its group {self.ranks} made no call within {self._timeout_seconds:g} s. {_RULE}. If "
                    "they are only slow, give connect() a larger debug_timeout_seconds"
                )
                self._given_up.append(_GivenUp(message, received, (*receiving.values(), *sending)))
                raise CommunicatorMismatch(message)
            time.sleep(pause)
            pause = min(pause + 1e-5, 1e-3)  # short calls stay quick, long waits leave the core to others
        for request in sending:
            request.wait()
        return [_Call.unpack(row) for row in received]

    def _check_rows(self, calls: list[_Call], sizes: Sequence[int]) -> None:
        for rank, call in enumerate(calls):
            if rank < len(sizes) and call.rows != sizes[rank]:
                other = min(1, self.size - 1) if rank == 0 else 0
                self._fail(
                    calls,
                    other,
                    rank,
                    f"rank {self.ranks[rank]} gives {call.rows} rows, not the {sizes[rank]} of sizes",
                )

    def _check_exchange(self, calls: list[_Call], name: str, sent: list[int], received: list[int]) -> None:
        mine = np.empty((1, 2, self.size), np.int64)
        mine[0, 0] = buffers.check_sizes(self.size, sent, name, "send_sizes")
        mine[0, 1] = buffers.check_sizes(self.size, received, name, "receive_sizes")
        table = self._control.all_gather(mine)
        given, expected = table[:, 0], table[:, 1].T
        for source, destination in np.argwhere(given != expected):
            self._fail(
                calls,
                int(source),
                int(destination),
                f"rank {self.ranks[source]} sends {given[source, destination]} rows to rank "
                f"{self.ranks[destination]}, which expects {expected[source, destination]}",
            )

    def _fail(self, calls: list[_Call], first: int, second: int, what: str) -> NoReturn:
        lines = "".join(
            f"\n  rank {self.ranks[rank]} called {calls[rank].text} at {calls[rank].where}"
            for rank in dict.fromkeys((first, second))
        )
        raise CommunicatorMismatch(f"{what}:{lines}\n{_RULE}.")


@frozen(eq=False)
class _GivenUp:
    """A comparison that timed out. A late rank's message is still written into `buffer`, so it is kept."""

    message: str
    buffer: Array
    requests: tuple[Request, ...]


@frozen
class _Call:
    text: str
    where: str
    key: str
    rows: int

    def pack(self) -> Array:
        encoded = json.dumps([self.text, self.where, self.key, self.rows], ensure_ascii=False).encode()
        return np.frombuffer(encoded.ljust(_MESSAGE_BYTES), np.uint8)

    @classmethod
    def unpack(cls, message: Array) -> _Call:
        return cls(*json.loads(message.tobytes()))


def _ints(sizes: Sequence[int] | None) -> list[int] | None:
    # Ranks may give the same sizes as a list, a tuple or an array.
    return None if sizes is None else [int(size) for size in sizes]


def _shorten(text: str) -> str:
    return text if len(text) <= _TEXT_CHARACTERS else text[: _TEXT_CHARACTERS - 1] + "…"


def _call_site() -> str:
    here = os.path.dirname(__file__)
    frame = sys._getframe(1)
    while os.path.dirname(frame.f_code.co_filename) == here and frame.f_back is not None:
        frame = frame.f_back
    return f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"
