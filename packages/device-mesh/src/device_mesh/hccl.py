"""HCCL on Ascend as an engine: each call is one of `mindspore.mint.distributed`, on tensors in device memory.

Arrays are copied to the device, and results back. HCCL works off the messages of a group one after the other, so two
ranks that each send first would wait for each other, unless a send and a receive are started as one. Therefore messages
are collected, and started together by the first `wait`, `done` or collective after them. HCCL carries no tags and no
lengths: messages between two ranks must be received in the order in which they are sent, by arrays of their size.

Importing this module loads MindSpore.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
from attrs import define, field, frozen
from mindspore import Tensor

from device_mesh.communicator import Array, ReduceOp, Request
from device_mesh.engine import Group
from device_mesh.single import DONE


@frozen(eq=False)
class Hccl:
    """HCCL from one process.

    Bytes travel as int8. Unsigned integers are reduced as signed ones of the same bits (for `max` and `min` with the
    first bit turned over, which keeps their order) and bool as int8. HCCL reduces no float64.

    Args:
        opened: names of the groups that need not be opened: the world's.
        distributed: `mindspore.mint.distributed`.
        runtime: `mindspore.runtime`, for streams and events.
        create_group: `mindspore.communication.create_group`.
    """

    _opened: set[str]
    _distributed: Any
    _runtime: Any
    _create_group: Any
    _waiting: dict[str, list[tuple[Any, _Started]]] = field(factory=dict, init=False)

    def open(self, group: Group) -> None:
        if group.name not in self._opened:
            self._create_group(group.name, list(group.members))
            self._opened.add(group.name)

    def check_reduction(self, dtype: np.dtype[Any], call: str) -> None:
        if dtype == np.float64:
            raise TypeError(f"{call} of float64 does not work on HCCL, which reduces no float64: convert to float32")

    def all_reduce(self, x: Array, op: ReduceOp, group: Group) -> None:
        tensor = Tensor(_signed(x, op))
        self._begin(group)
        self._distributed.all_reduce(tensor, op, group=group.name)
        _fill_reduced(x, tensor, op)

    def ireduce_scatter(self, x: Array, out: Array, counts: Sequence[int], op: ReduceOp, group: Group) -> Request:
        source, result = Tensor(_signed(x, op)), Tensor(np.zeros(out.size, _integers(out).dtype))
        options = self._begin(group)
        if min(counts) == max(counts):
            handle = self._distributed.reduce_scatter_tensor(result, source, op, **options)
        else:
            handle = self._distributed.reduce_scatter_tensor_uneven(result, source, list(counts), op, **options)
        return _Started(self, source, partial(_fill_reduced, out, result, op), handle)

    def iall_gather(self, x: Array, out: Array, counts: Sequence[int], group: Group) -> Request:
        source, result = _moved(x), _moved(out)
        options = self._begin(group)
        if min(counts) == max(counts):
            handle = self._distributed.all_gather_into_tensor(result, source, **options)
        else:
            handle = self._distributed.all_gather_into_tensor_uneven(result, source, list(counts), **options)
        return _Started(self, source, partial(_fill, out, result), handle)

    def iall_to_all(self, x: Array, out: Array, sent: Sequence[int], received: Sequence[int], group: Group) -> Request:
        source, result = _moved(x), _moved(out)
        options = self._begin(group)
        handle = self._distributed.all_to_all_single(result, source, list(received), list(sent), **options)
        return _Started(self, source, partial(_fill, out, result), handle)

    def broadcast(self, x: Array, root: int, group: Group) -> None:
        tensor = _moved(x)
        self._begin(group)
        self._distributed.broadcast(tensor, root, group=group.name)
        _fill(x, tensor)

    def barrier(self, group: Group) -> None:
        self._begin(group)
        self._distributed.barrier(group=group.name)

    def isend(self, x: Array, destination: int, tag: int, group: Group) -> Request:
        return self._message("isend", x, None, destination, group)

    def irecv(self, out: Array, source: int, tag: int, group: Group) -> Request:
        received = out.reshape(-1).view(np.uint8)
        return self._message("irecv", received, received, source, group)

    def start_messages(self) -> None:
        """Start all messages that wait for it, those of a carrier together."""
        for queued in self._waiting.values():
            (handle,) = self._distributed.batch_isend_irecv([operation for operation, _ in queued])
            for _, started in queued:
                started.handle = handle
        self._waiting.clear()

    def query(self, handle: Any) -> Any:
        """An event that happens when what the handle stands for is done."""
        with self._runtime.StreamCtx(self._runtime.Stream()):
            handle.wait()
            event = self._runtime.Event()
            event.record()
        return event

    def _begin(self, group: Group) -> dict[str, Any]:
        """Do what comes before a collective in a group; returns the options by which it is started."""
        self.start_messages()
        self.open(group)
        return {"group": group.name, "async_op": True}

    def _message(self, kind: str, x: Array, out: Array | None, peer: int, group: Group) -> Request:
        if not x.size:
            return DONE
        tensor = _moved(x)
        started = _Started(self, tensor, None if out is None else partial(_fill, out, tensor))
        operation = self._distributed.P2POp(kind, tensor, peer, group.carrier)
        self._waiting.setdefault(group.carrier, []).append((operation, started))
        return started


@define(eq=False)
class _Started:
    """A collective or message under way, what it reads or fills, to be kept, and what is left to do once it is done."""

    _engine: Hccl
    _tensor: Tensor
    _then: Callable[[], None] | None
    handle: Any = None
    _event: Any = field(default=None, init=False)
    _finished: bool = field(default=False, init=False)

    def wait(self) -> None:
        if self._finished:
            return
        if self.handle is None:
            self._engine.start_messages()
        self.handle.wait()
        if self._then:
            self._then()
        self._finished = True

    def done(self) -> bool:
        if self._finished:
            return True
        if self.handle is None:
            self._engine.start_messages()
        if self._event is None:
            self._event = self._engine.query(self.handle)
        if self._event.query():
            self.wait()
        return self._finished


def _moved(x: Array) -> Tensor:
    return Tensor(x.view(np.int8))


def _fill(out: Array, tensor: Tensor) -> None:
    out.view(np.int8)[...] = tensor.asnumpy()


def _integers(x: Array) -> Array:
    """`x`, as signed integers of the same bits where it is bool or unsigned."""
    return x.view(f"i{x.itemsize}") if x.dtype.kind in "bu" else x


def _signed(x: Array, op: ReduceOp) -> Array:
    turned = _turned(x, op)
    return _integers(x) if turned is None else _integers(x ^ turned)


def _fill_reduced(out: Array, tensor: Tensor, op: ReduceOp) -> None:
    turned, result = _turned(out, op), tensor.asnumpy().view(out.dtype)
    out[...] = result if turned is None else result ^ turned


def _turned(x: Array, op: ReduceOp) -> Any:
    """The bit by which unsigned numbers are ordered like signed ones; None where there is nothing to turn."""
    return x.dtype.type(1 << (8 * x.itemsize - 1)) if x.dtype.kind == "u" and op != "sum" else None
