"""The collectives that come in two forms, blocking and started: a backend says once how each is made."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from attrs import define

from device_mesh.communicator import Array, ReduceOp, Request

Made = TypeVar("Made")
"""What a backend knows of a collective before anybody waits for it."""


class PairedCollectives(ABC, Generic[Made]):
    """`all_gather`, `reduce_scatter` and `all_to_all` with their `i` forms, out of one method for each pair.

    That method is given the name of the call that was made, for messages.
    """

    def all_gather(self, x: Array, *, sizes: Sequence[int] | None = None, out: Array | None = None) -> Array:
        return self._finish(self._all_gather("all_gather", x, sizes, out))

    def iall_gather(self, x: Array, *, sizes: Sequence[int] | None = None, out: Array) -> Request:
        return self._start(self._all_gather("iall_gather", x, sizes, out))

    def reduce_scatter(
        self,
        x: Array,
        op: ReduceOp = "sum",
        *,
        sizes: Sequence[int] | None = None,
        out: Array | None = None,
    ) -> Array:
        return self._finish(self._reduce_scatter("reduce_scatter", x, op, sizes, out))

    def ireduce_scatter(
        self, x: Array, op: ReduceOp = "sum", *, sizes: Sequence[int] | None = None, out: Array
    ) -> Request:
        return self._start(self._reduce_scatter("ireduce_scatter", x, op, sizes, out))

    def all_to_all(
        self,
        x: Array,
        *,
        send_sizes: Sequence[int] | None = None,
        receive_sizes: Sequence[int] | None = None,
        out: Array | None = None,
    ) -> Array:
        return self._finish(self._all_to_all("all_to_all", x, send_sizes, receive_sizes, out))

    def iall_to_all(
        self,
        x: Array,
        *,
        send_sizes: Sequence[int] | None = None,
        receive_sizes: Sequence[int] | None = None,
        out: Array,
    ) -> Request:
        return self._start(self._all_to_all("iall_to_all", x, send_sizes, receive_sizes, out))

    @abstractmethod
    def _all_gather(self, call: str, x: Array, sizes: Sequence[int] | None, out: Array | None) -> Made: ...

    @abstractmethod
    def _reduce_scatter(
        self, call: str, x: Array, op: ReduceOp, sizes: Sequence[int] | None, out: Array | None
    ) -> Made: ...

    @abstractmethod
    def _all_to_all(
        self,
        call: str,
        x: Array,
        send_sizes: Sequence[int] | None,
        receive_sizes: Sequence[int] | None,
        out: Array | None,
    ) -> Made: ...

    @abstractmethod
    def _finish(self, made: Made) -> Array:
        """The result of a collective, once it is done."""

    @abstractmethod
    def _start(self, made: Made) -> Request:
        """A collective under way."""


@define(eq=False)
class FollowedUp:
    """A request after which something is left to do, once."""

    _request: Request
    _then: Callable[[], object] | None

    def wait(self) -> None:
        self._request.wait()
        self._end()

    def done(self) -> bool:
        done = self._request.done()
        if done:
            self._end()
        return done

    def _end(self) -> None:
        if self._then:
            self._then()
            self._then = None
