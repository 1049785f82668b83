"""Tensors of which each rank of a mesh holds a part, and how parts become other parts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from attrs import frozen
from device_mesh import autograd
from mindspore import Tensor, mint

from hyperparallel_stand_in.meshes import DeviceMesh


class Placement:
    """What a rank of an axis holds."""

    def is_shard(self) -> bool:
        return isinstance(self, Shard)

    def is_replicate(self) -> bool:
        return isinstance(self, Replicate)

    def is_partial(self) -> bool:
        return isinstance(self, Partial)


@frozen
class Shard(Placement):
    """One of equal parts along a dimension."""

    dim: int


@frozen
class Replicate(Placement):
    """All of it."""


@frozen
class Partial(Placement):
    """A summand."""

    reduce_op: str = "sum"

    def __attrs_post_init__(self) -> None:
        if self.reduce_op != "sum":
            raise NotImplementedError(f"Partial({self.reduce_op!r}): only sums")


class DTensor(Tensor):
    """A rank's part with the mesh and one placement for each of its axes.

    It shares the memory and the gradient of the local tensor, as the library's does. Operators on it are not modelled.
    """

    def __new__(
        cls, local_tensor: Tensor, device_mesh: DeviceMesh | None = None, placements: Sequence[Placement] | None = None
    ) -> Any:
        if isinstance(local_tensor, DTensor):  # a parameter made of one
            device_mesh, placements = local_tensor.device_mesh, local_tensor.placements
            local_tensor = local_tensor.to_local()
        if device_mesh is None or placements is None or len(placements) != device_mesh.ndim:
            raise ValueError(f"placements {placements} on a mesh of {device_mesh and device_mesh.mesh_dim_names}")
        for placement in placements:
            if not isinstance(placement, Placement):
                raise TypeError(f"{placement!r} is no placement")
            if isinstance(placement, Shard) and not 0 <= placement.dim < local_tensor.ndim:
                raise ValueError(f"{placement} of a tensor of {local_tensor.ndim} dimensions")
        made = Tensor._make_subclass(cls, local_tensor)
        made._local_tensor, made.device_mesh, made.placements = local_tensor, device_mesh, tuple(placements)
        return made

    @staticmethod
    def from_local(local_tensor: Tensor, device_mesh: DeviceMesh, placements: Sequence[Placement]) -> DTensor:
        if isinstance(local_tensor, DTensor):
            raise TypeError("from_local of a DTensor")
        return DTensor(local_tensor, device_mesh, placements)

    def to_local(self) -> Tensor:
        return self._local_tensor

    @property
    def local_shape(self) -> tuple[int, ...]:
        return tuple(self._local_tensor.shape)

    @property
    def shape(self) -> tuple[int, ...]:
        """That of the whole tensor."""
        found = list(self._local_tensor.shape)
        for axis, placement in enumerate(self.placements):
            if isinstance(placement, Shard):
                found[placement.dim] *= self.device_mesh.size(axis)
        return tuple(found)

    def asnumpy(self) -> Any:
        return self._local_tensor.asnumpy()

    def redistribute(self, device_mesh: DeviceMesh, placements: Sequence[Placement]) -> DTensor:
        """The same tensor in other parts of the same mesh, axis by axis."""
        if device_mesh.rank_list != self.device_mesh.rank_list or device_mesh.mesh_shape != self.device_mesh.mesh_shape:
            raise ValueError(f"from ranks {self.device_mesh.rank_list} to ranks {device_mesh.rank_list}")
        local = self._local_tensor
        for axis, (before, after) in enumerate(zip(self.placements, placements, strict=True)):
            if before != after:
                local = _moved(local, device_mesh, axis, before, after)
        return DTensor.from_local(local, device_mesh, placements)

    def __fallback__(self, function: Any, arguments: Any = (), keywords: Any = None) -> Any:
        name = getattr(function, "name", function)
        raise NotImplementedError(f"operator {name} on a DTensor: this double has none, take to_local()")


def _moved(local: Tensor, mesh: DeviceMesh, axis: int, before: Placement, after: Placement) -> Tensor:
    group = mesh.communicator(axis)
    if isinstance(before, Shard) and isinstance(after, Replicate):
        return autograd.all_gather(local, group, dim=before.dim)
    if isinstance(before, Shard) and isinstance(after, Shard):
        return autograd.all_to_all(local, group, split_dim=after.dim, concat_dim=before.dim)
    if isinstance(before, Partial) and isinstance(after, Replicate):
        return autograd.all_reduce(local, group)
    if isinstance(before, Partial) and isinstance(after, Shard):
        return autograd.reduce_scatter(local, group, dim=after.dim)
    if isinstance(before, Replicate) and isinstance(after, Shard):
        if local.shape[after.dim] % group.size:
            raise ValueError(f"{after} of shape {tuple(local.shape)} over {group.size} ranks: parts have to be equal")
        return mint.chunk(local, group.size, after.dim)[group.rank]
    raise NotImplementedError(f"from {before} to {after}")


def local_part(value: Any) -> Any:
    """This rank's part of a tensor that may be distributed."""
    return value.to_local() if isinstance(value, DTensor) else value
