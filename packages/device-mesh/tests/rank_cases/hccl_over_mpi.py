"""HCCL as the cases meet it: the calls that the mindspore backend makes on Ascend, carried by MPI.

It is as strict as HCCL where that matters: a group is made by all its members or none goes on, messages of a group are
worked off batch by batch, a sent one when it is received, and what it cannot reduce is refused.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import numpy as np
from device_mesh import Communicator
from device_mesh.engine import Group
from device_mesh.hccl import Hccl
from device_mesh.mindspore_backend import MindSporeCommunicator
from mindspore import Tensor
from mpi4py import MPI

WORLD = "hccl_world_group"
OPS = {"sum": MPI.SUM, "max": MPI.MAX, "min": MPI.MIN}


def over(comm: Any) -> Communicator:
    """The mindspore backend on Ascend, over an MPI communicator."""
    fake = HcclOverMpi(comm)
    everyone = tuple(range(comm.size))
    engine = Hccl({WORLD}, fake, fake, fake.create_group)
    return MindSporeCommunicator(engine, Group(WORLD, everyone, WORLD), comm.rank, everyone)


class Handle:
    """Work under way; a stream that waits for it goes on without blocking its process."""

    def __init__(self, hccl: HcclOverMpi, requests: list[MPI.Request], tensors: list[Tensor]) -> None:
        self.hccl, self.requests, self.tensors = hccl, requests, tensors

    def wait(self) -> None:
        if self.hccl.stream is None:
            MPI.Request.Waitall(self.requests)
        else:
            self.hccl.stream.append(self)


class HcclOverMpi:
    """`mint.distributed` and `mindspore.runtime`, as far as they are used."""

    def __init__(self, comm: Any) -> None:
        self.groups = {WORLD: (tuple(range(comm.size)), comm)}
        self.batches: dict[str, Handle] = {}
        self.stream: list[Handle] | None = None

    def create_group(self, name: str, members: list[int]) -> None:
        assert members == sorted(members)
        assert name not in self.groups
        world = self.groups[WORLD][1]
        self.groups[name] = tuple(members), world.Create_group(world.Get_group().Incl(members))

    def all_reduce(self, tensor: Tensor, op: str, group: str) -> None:
        self.groups[group][1].Allreduce(MPI.IN_PLACE, reducible(tensor), OPS[op])

    def reduce_scatter_tensor(self, out: Tensor, x: Tensor, op: str, *, group: str, async_op: Literal[True]) -> Handle:
        sides = reducible(x), out.asnumpy()
        return Handle(self, [self.groups[group][1].Ireduce_scatter_block(*sides, OPS[op])], [out, x])

    def reduce_scatter_tensor_uneven(
        self, out: Tensor, x: Tensor, counts: list[int], op: str, *, group: str, async_op: Literal[True]
    ) -> Handle:
        sides = reducible(x), out.asnumpy()
        return Handle(self, [self.groups[group][1].Ireduce_scatter(*sides, counts, OPS[op])], [out, x])

    def all_gather_into_tensor(self, out: Tensor, x: Tensor, *, group: str, async_op: Literal[True]) -> Handle:
        return Handle(self, [self.groups[group][1].Iallgather(x.asnumpy(), out.asnumpy())], [out, x])

    def all_gather_into_tensor_uneven(
        self, out: Tensor, x: Tensor, counts: list[int], *, group: str, async_op: Literal[True]
    ) -> Handle:
        return Handle(self, [self.groups[group][1].Iallgatherv(x.asnumpy(), [out.asnumpy(), counts])], [out, x])

    def all_to_all_single(
        self, out: Tensor, x: Tensor, received: list[int], sent: list[int], *, group: str, async_op: Literal[True]
    ) -> Handle:
        sides = [x.asnumpy(), sent], [out.asnumpy(), received]
        return Handle(self, [self.groups[group][1].Ialltoallv(*sides)], [out, x])

    def broadcast(self, tensor: Tensor, root: int, group: str) -> None:
        members, comm = self.groups[group]
        comm.Bcast(tensor.asnumpy(), members.index(root))

    def barrier(self, group: str) -> None:
        self.groups[group][1].Barrier()

    @staticmethod
    def P2POp(*operation: Any) -> tuple[Any, ...]:
        return operation

    def batch_isend_irecv(self, operations: list[tuple[str, Tensor, int, str]]) -> list[Handle]:
        (group,) = {operation[3] for operation in operations}
        members, comm = self.groups[group]
        if group in self.batches:
            self.batches[group].wait()
        calls = {"isend": comm.Issend, "irecv": comm.Irecv}
        requests = [calls[kind](tensor.asnumpy(), members.index(peer)) for kind, tensor, peer, _ in operations]
        self.batches[group] = Handle(self, requests, [tensor for _, tensor, _, _ in operations])
        return [self.batches[group]]

    @staticmethod
    def Stream() -> None:
        return None

    @contextmanager
    def StreamCtx(self, stream: None) -> Iterator[None]:
        self.stream = []
        yield
        self.stream = None

    def Event(self) -> Event:
        return Event(self)


class Event:
    def __init__(self, hccl: HcclOverMpi) -> None:
        self.hccl, self.handles = hccl, []

    def record(self) -> None:
        self.handles = list(self.hccl.stream or ())

    def query(self) -> bool:
        return all(MPI.Request.Testall(handle.requests) for handle in self.handles)


def reducible(tensor: Tensor) -> np.ndarray:
    array = tensor.asnumpy()
    assert array.dtype.name in ("int8", "int16", "int32", "int64", "float32"), array.dtype
    return array
