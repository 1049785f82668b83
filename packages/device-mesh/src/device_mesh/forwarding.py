"""A communicator around another one: the base of those that add something to calls, which passes on all others."""

from __future__ import annotations

from typing import NoReturn

from attrs import frozen

from device_mesh.communicator import Array, Communicator, Request


@frozen(eq=False)
class ForwardingCommunicator:
    """The identity, messages, barrier and abort of the communicator inside. Subclasses have the collectives."""

    _inner: Communicator

    @property
    def rank(self) -> int:
        return self._inner.rank

    @property
    def size(self) -> int:
        return self._inner.size

    @property
    def ranks(self) -> tuple[int, ...]:
        return self._inner.ranks

    def send(self, x: Array, destination: int, *, tag: int = 0) -> None:
        self._inner.send(x, destination, tag=tag)

    def recv(self, out: Array, source: int, *, tag: int = 0) -> Array:
        return self._inner.recv(out, source, tag=tag)

    def isend(self, x: Array, destination: int, *, tag: int = 0) -> Request:
        return self._inner.isend(x, destination, tag=tag)

    def irecv(self, out: Array, source: int, *, tag: int = 0) -> Request:
        return self._inner.irecv(out, source, tag=tag)

    def barrier(self) -> None:
        self._inner.barrier()

    def abort(self, exit_code: int) -> NoReturn:
        self._inner.abort(exit_code)
