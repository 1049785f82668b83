"""Ranks on named axes, and the communicators of their groups."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt
from attrs import define, field
from device_mesh import Communicator
from mindspore import Tensor

Ranks = npt.NDArray[np.int64]


@define(eq=False)
class Groups:
    """The communicators of a job, one for each list of ranks; HyperParallel's groups on MindSpore are names."""

    world: Communicator
    _made: dict[str, Communicator] = field(factory=dict)

    def name(self, ranks: Sequence[int]) -> str:
        """The group of these ranks, in their order. All of them have to ask for it."""
        name = f"ranks {','.join(map(str, ranks))}"
        if name not in self._made:
            self._made[name] = self.world.subgroup(list(ranks))
        return name

    def of(self, name: str | None) -> Communicator:
        """The communicator of a group, or of the world for None. Raises KeyError for a group that was not made."""
        return self.world if name is None else self._made[name]


class DeviceMesh:
    """Ranks as an array with named axes. A part of a mesh is the one that holds the current rank."""

    def __init__(
        self, groups: Groups, ranks: Ranks, mesh_dim_names: tuple[str, ...], fake: frozenset[str] = frozenset()
    ) -> None:
        if len(mesh_dim_names) != ranks.ndim:
            raise ValueError(
                f"mesh of shape {ranks.shape} with names {mesh_dim_names}: one name for each axis is needed"
            )
        self.groups, self.ranks, self.mesh_dim_names, self._fake = groups, ranks, tuple(mesh_dim_names), fake
        self._place = tuple(int(at) for at in np.argwhere(ranks == groups.world.rank)[0])

    @property
    def device_type(self) -> str:
        return "npu"

    @property
    def mesh(self) -> Tensor:
        return Tensor(self.ranks)

    @property
    def mesh_shape(self) -> tuple[int, ...]:
        return self.ranks.shape

    @property
    def rank_list(self) -> tuple[int, ...]:
        return tuple(self.ranks.reshape(-1).tolist())

    @property
    def ndim(self) -> int:
        return self.ranks.ndim

    @property
    def rank(self) -> int:
        return self.groups.world.rank

    def size(self, mesh_dim: int | str | None = None) -> int:
        return self.ranks.size if mesh_dim is None else self.ranks.shape[self._axis(mesh_dim)]

    def get_local_rank(self, mesh_dim: int | str | None = None) -> int:
        return self._place[self._axis(mesh_dim)]

    def get_coordinate(self) -> tuple[int, ...]:
        return self._place

    def get_group(self, mesh_dim: int | str | None = None) -> str:
        axis = self._axis(mesh_dim)
        name = self.mesh_dim_names[axis]
        if name in self._fake:
            raise RuntimeError(f"axis {name} of {self.mesh_dim_names} was given the backend fake: it has no group")
        place = (*self._place[:axis], slice(None), *self._place[axis + 1 :])
        return self.groups.name(self.ranks[place].tolist())

    def communicator(self, mesh_dim: int | str | None = None) -> Communicator:
        return self.groups.of(self.get_group(mesh_dim))

    def __getitem__(self, names: str | tuple[str, ...]) -> DeviceMesh:
        wanted = (names,) if isinstance(names, str) else tuple(names)
        for name in wanted:
            if name not in self.mesh_dim_names:
                raise KeyError(f"mesh of {self.mesh_dim_names} has no axis {name}")
        if list(wanted) != [name for name in self.mesh_dim_names if name in wanted]:
            raise KeyError(f"{wanted} of a mesh of {self.mesh_dim_names}: names have to follow the order of the mesh")
        index = tuple(
            slice(None) if name in wanted else at for name, at in zip(self.mesh_dim_names, self._place, strict=True)
        )
        return DeviceMesh(self.groups, self.ranks[index], wanted, self._fake & set(wanted))

    def _flatten(self, name: str | None = None, backend_override: None = None) -> DeviceMesh:
        if backend_override is not None:
            raise NotImplementedError("_flatten with backend_override")
        return DeviceMesh(self.groups, self.ranks.reshape(-1), (name or "_".join(self.mesh_dim_names),))

    def _unflatten(
        self,
        dim: int,
        mesh_sizes: tuple[int, ...],
        mesh_dim_names: tuple[str, ...],
        backend_override: Mapping[str, str] | None = None,
    ) -> DeviceMesh:
        if self.ndim != 1 or dim != 0:
            raise NotImplementedError(f"_unflatten of axis {dim} of {self.ndim}: only of a flat mesh")
        if math.prod(mesh_sizes) != self.ranks.size:
            raise ValueError(f"sizes {mesh_sizes} make {math.prod(mesh_sizes)} ranks of {self.ranks.size}")
        override = dict(backend_override or {})
        if set(override.values()) - {"fake"} or set(override) - set(mesh_dim_names):
            raise NotImplementedError(f"backend_override {override} for axes {mesh_dim_names}")
        return DeviceMesh(self.groups, self.ranks.reshape(mesh_sizes), tuple(mesh_dim_names), frozenset(override))

    def _axis(self, mesh_dim: int | str | None) -> int:
        if mesh_dim is None:
            if self.ndim != 1:
                raise ValueError(f"a mesh of {self.mesh_dim_names}: the axis may be left out of a flat mesh only")
            return 0
        if isinstance(mesh_dim, str):
            if mesh_dim not in self.mesh_dim_names:
                raise KeyError(f"mesh of {self.mesh_dim_names} has no axis {mesh_dim}")
            return self.mesh_dim_names.index(mesh_dim)
        return mesh_dim


def make_init_device_mesh(groups: Groups):
    """`hyper_parallel.init_device_mesh` for the ranks of these groups."""

    def init_device_mesh(device_type, mesh_shape, *, mesh_dim_names=None, rank_list=None, init_backend=True):
        if rank_list is not None or not init_backend or mesh_dim_names is None or device_type != "npu":
            raise NotImplementedError("init_device_mesh: only device npu, with names, over all ranks")
        if math.prod(mesh_shape) != groups.world.size:
            raise ValueError(f"a mesh of {mesh_shape} for {groups.world.size} ranks")
        return DeviceMesh(groups, np.arange(groups.world.size).reshape(mesh_shape), tuple(mesh_dim_names))

    return init_device_mesh
