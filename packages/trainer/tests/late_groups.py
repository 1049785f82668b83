"""Groups of two ranks in one process, whose messages come when they are awaited; functions that tell when they run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
from attrs import frozen
from device_mesh import Array, Request
from mindspore import Tensor
from mindspore.common import _Function

Note = Callable[[str], None]


@frozen(eq=False)
class Late:
    """A message that is not a number until it is awaited, and must not have been changed meanwhile."""

    sent: Array
    as_it_was: Array
    out: Array
    result: Array
    ended: Callable[[], None]

    @classmethod
    def of(cls, sent: Array, out: Array, result: Array, ended: Callable[[], None]) -> Late:
        out[...] = np.nan
        return cls(sent, sent.copy(), out, result, ended)

    def wait(self) -> None:
        np.testing.assert_array_equal(self.sent, self.as_it_was)
        self.out[...] = self.result
        self.ended()

    def done(self) -> bool:
        return False


@frozen(eq=False)
class LatePair:
    """A rank of a group of two, in which the other finds the same gradients; what is sent arrives when it is awaited.

    whole: the values of each weight by its size, which tells what is sent.
    names: of the weights by size.
    note:  is told what starts and what has come.
    """

    rank: int
    whole: dict[int, Array]
    names: dict[int, str]
    note: Note
    size: int = 2

    def iall_gather(self, x: Array, *, sizes: Sequence[int], out: Array) -> Request:
        whole, start = self.whole[len(out)], sum(sizes[: self.rank])
        np.testing.assert_array_equal(x, whole[start : start + sizes[self.rank]])
        return self._start("gather", len(out), x, out, whole)

    def ireduce_scatter(self, x: Array, op: str = "sum", *, sizes: Sequence[int], out: Array) -> Request:
        start = sum(sizes[: self.rank])
        return self._start("reduce", len(x), x, out, 2 * x[start : start + sizes[self.rank]])

    def _start(self, what: str, size: int, x: Array, out: Array, result: Array) -> Request:
        name = f"{what} {self.names[size]}"
        self.note(name)
        return Late.of(x, out, result, lambda: self.note(f"{name} done"))


@frozen(eq=False)
class LateMirror:
    """Rank 0 of two, of which the other does the same with the ranks changed over: it sends what it is sent."""

    note: Note
    rank: int = 0
    size: int = 2

    def iall_to_all(
        self,
        x: Array,
        *,
        send_sizes: Sequence[int] | None = None,
        receive_sizes: Sequence[int] | None = None,
        out: Array,
    ) -> Request:
        assert send_sizes == receive_sizes
        if x.dtype != np.float64:  # how many rows come is known before they do
            out[...] = x
            return SimpleNamespace(wait=lambda: None)
        self.note("send")
        return Late.of(x, out, x.copy(), lambda: self.note("arrived"))


class Noted(_Function):
    """The same tensor; tells when it passes forward and backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, note: Note, name: str) -> Tensor:
        note(name)
        ctx.note, ctx.name = note, name
        return Tensor.from_numpy(x.asnumpy().copy())

    @staticmethod
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor, None, None]:
        ctx.note(f"{ctx.name} backward")
        return d_out, None, None
