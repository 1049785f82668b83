"""The communicator: what ranks can say to each other, whatever carries it.

A communicator is a group of ranks seen from one of them. All arrays are NumPy arrays in host memory; "rows"
are entries along dim 0. Rules that hold for every backend:

- Every rank of the group makes the same collective calls in the same order. Shapes and dtypes agree between
  ranks except where per-rank sizes are given.
- dtypes: bool, signed and unsigned integers of 8 to 64 bits, float16, float32, float64, in native byte order, and
  bfloat16 as a library adds it to NumPy (MindSpore, ml_dtypes). Anything else raises TypeError.
- A C-contiguous input is read where it lies, and `out`, where given, is written where it lies: no copy is
  made on the way. Other inputs are copied to contiguous memory first. `out` must be C-contiguous, writable,
  and of exactly the result's shape and dtype (ValueError). Without `out` a new array is returned. `out` may
  overlap the input.
- Forms that begin with `i` start what their namesakes do and return a `Request`; they count as called when they start.
  Several may be under way, on one group and on different ones, and be waited for in any order. Their results are
  bitwise those of their namesakes.
- Reductions are `sum`, `max` or `min` and give bitwise the same result on every rank. float16 and bfloat16 are
  accumulated in float32. On bool, `max` is "any" and `min` is "all"; `sum` raises TypeError. `max` and `min` of NaN are
  unspecified. A mean is the caller's: `sum` divided by `size`.
- Rank arguments (`root`, `destination`, `source`) are ranks within the group.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NoReturn, Protocol

import numpy.typing as npt

Array = npt.NDArray[Any]
ReduceOp = Literal["sum", "max", "min"]


class Request(Protocol):
    """A message or collective under way. The arrays it reads and fills must not be touched before it is done.

    Both calls raise ValueError, each time, when a message came that is longer or shorter than its array.
    """

    def wait(self) -> None:
        """Return once the message has been sent, or what was asked for has arrived in its array."""

    def done(self) -> bool:
        """Whether `wait` would return at once. Never blocks."""


class Communicator(Protocol):
    """A group of ranks, seen from one of them."""

    @property
    def rank(self) -> int:
        """This process within the group, from 0."""

    @property
    def size(self) -> int:
        """How many ranks the group has."""

    @property
    def ranks(self) -> tuple[int, ...]:
        """The group's members as ranks of the communicator that `connect` returned."""

    def all_reduce(self, x: Array, op: ReduceOp = "sum", *, out: Array | None = None) -> Array:
        """The element-wise reduction of every rank's `x`, of the same shape. `out=x` reduces in place."""

    def all_gather(self, x: Array, *, sizes: Sequence[int] | None = None, out: Array | None = None) -> Array:
        """Every rank's `x` joined along dim 0 in rank order.

        With `sizes`, rank r gives `sizes[r]` rows (0 is allowed) and the result has `sum(sizes)` rows;
        without, all ranks give equally many.
        """

    def iall_gather(self, x: Array, *, sizes: Sequence[int] | None = None, out: Array) -> Request:
        """Start an `all_gather`; `out` is filled when the request is done."""

    def reduce_scatter(
        self,
        x: Array,
        op: ReduceOp = "sum",
        *,
        sizes: Sequence[int] | None = None,
        out: Array | None = None,
    ) -> Array:
        """This rank's rows of the element-wise reduction of every rank's `x`.

        With `sizes`, rank r gets `sizes[r]` rows and `x` has `sum(sizes)` rows; without, the rows of `x`
        are divided equally, and must divide (ValueError).
        """

    def ireduce_scatter(
        self, x: Array, op: ReduceOp = "sum", *, sizes: Sequence[int] | None = None, out: Array
    ) -> Request:
        """Start a `reduce_scatter`; `out` is filled when the request is done."""

    def all_to_all(
        self,
        x: Array,
        *,
        send_sizes: Sequence[int] | None = None,
        receive_sizes: Sequence[int] | None = None,
        out: Array | None = None,
    ) -> Array:
        """Rows exchanged between all pairs: rank j gets the j-th piece of every rank's `x`, joined in rank
        order.

        `send_sizes[j]` rows of `x` go to rank j, `receive_sizes[i]` rows come from rank i; give both or
        neither. Without them the rows are divided equally, and must divide (ValueError).
        """

    def iall_to_all(
        self,
        x: Array,
        *,
        send_sizes: Sequence[int] | None = None,
        receive_sizes: Sequence[int] | None = None,
        out: Array,
    ) -> Request:
        """Start an `all_to_all`; `out` is filled when the request is done."""

    def broadcast(self, x: Array, root: int = 0, *, out: Array | None = None) -> Array:
        """`x` of rank `root`, on every rank.

        The other ranks' `x` says shape and dtype only; with `out=x` it is overwritten.
        """

    def send(self, x: Array, destination: int, *, tag: int = 0) -> None:
        """Send `x` to another rank, which must call `recv` or `irecv`; may wait until it does."""

    def recv(self, out: Array, source: int, *, tag: int = 0) -> Array:
        """Wait for a message of exactly `out`'s size from another rank; fill `out` with it and return it.

        Raises ValueError for a message of another size.
        """

    def isend(self, x: Array, destination: int, *, tag: int = 0) -> Request:
        """Start a `send`; `x` must be left unchanged until the request is done."""

    def irecv(self, out: Array, source: int, *, tag: int = 0) -> Request:
        """Start a `recv`; `out` is filled when the request is done."""

    def barrier(self) -> None:
        """Return once every rank of the group has called it."""

    def split(self, color: int, *, key: int | None = None) -> Communicator:
        """The communicator of the ranks that give the same `color` >= 0, ordered by `key` (by rank if left
        out).

        Collective over this group.
        """

    def subgroup(self, ranks: Sequence[int], *, tag: int = 0) -> Communicator:
        """The communicator of some ranks of this group, in the given order.

        Collective over the listed ranks only; each of them must pass the same list, and `tag` tells apart
        calls that different lists could otherwise confuse.
        """

    def abort(self, exit_code: int) -> NoReturn:
        """End every process of the job at once with this exit code, those outside this group included."""
