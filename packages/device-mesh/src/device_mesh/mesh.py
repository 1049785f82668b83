"""The mesh: which rank sits where, as arithmetic on degrees.

Ranks are numbered in C order over `pp, dp_replicate, dp_shard, cp, tp`, tp varying fastest. Every named axis,
flattened ones included, joins neighbours of that order, so an axis is fully described by two numbers: its
stride and its size. Nothing ever lists the world unless it is asked to.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Protocol

import numpy as np
import numpy.typing as npt
from attrs import field, frozen

VIEWS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "base": ("pp", "dp_replicate", "dp_shard", "cp", "tp"),
        "dataloading": ("pp", "batch", "cp", "tp"),
        "dense": ("pp", "dp_replicate", "fsdp", "tp"),
        "sparse": ("pp", "dp_replicate", "efsdp", "ep"),
        "loss": ("pp", "loss", "tp"),
        "world": ("world",),
    }
)
"""Each view lays all ranks out row by row over its axes, the last axis varying fastest."""


class Degrees(Protocol):
    """What a mesh needs to know of a plan; `parallel_config.ParallelPlan` is one. All are ints >= 1."""

    @property
    def pp(self) -> int: ...
    @property
    def dp_replicate(self) -> int: ...
    @property
    def dp_shard(self) -> int: ...
    @property
    def cp(self) -> int: ...
    @property
    def tp(self) -> int: ...
    @property
    def ep(self) -> int: ...


@frozen
class Axis:
    """An axis: a group's ranks are `start + i * stride` for i in `range(size)`."""

    size: int
    stride: int

    @property
    def span(self) -> int:
        """Ranks from one repetition of the axis to the next; blocks of this many ranks hold whole groups."""
        return self.size * self.stride

    def index(self, rank: int) -> int:
        """The rank's position on the axis."""
        return rank // self.stride % self.size

    def group(self, number: int) -> range:
        """The ranks of the group with this number, groups being counted in the order of their first rank."""
        start = number // self.stride * self.span + number % self.stride
        return range(start, start + self.span, self.stride)

    def group_number(self, rank: int) -> int:
        """The number of the group that the rank is in."""
        return rank // self.span * self.stride + rank % self.stride


@frozen(init=False)
class ParallelMesh:
    """The ranks of a parallel plan on named axes.

    Base axes, slowest first:

    - `pp`: pipeline stages.
    - `dp_replicate`: copies of the sharded model (HSDP).
    - `dp_shard`: data-parallel ranks among which parameters are sharded.
    - `cp`: pieces of the sequence.
    - `tp`: pieces of a weight matrix; neighbouring ranks.

    Axes that join or regroup them:

    - `batch` = dp_replicate x dp_shard: ranks that read different samples.
    - `fsdp` = dp_shard x cp: ranks among which a dense parameter is sharded.
    - `ep`, `efsdp`: the dp_shard x cp x tp ranks of one replica of one stage, seen as experts (`ep`,
      neighbouring ranks) times shards of an expert (`efsdp`).
    - `loss` = batch x cp: ranks holding different tokens, over which the loss is averaged.
    - `world`: all ranks.

    `views` says which axes make up a full layout of the world. Two meshes of the same degrees are equal.

    Args:
        plan: the degrees; `ep` must divide dp_shard x cp x tp.
        ranks_per_node: ranks that share a node (rank r is on node `r // ranks_per_node`); needed by
            `within_node` only.

    Raises:
        ValueError: a degree below 1, or `ep` that does not divide dp_shard x cp x tp.
        TypeError: a degree that is not an int.
    """

    world_size: int
    ranks_per_node: int | None
    _axes: dict[str, Axis] = field(repr=False, hash=False)

    def __init__(self, plan: Degrees, *, ranks_per_node: int | None = None) -> None:
        degrees = {name: _positive(name, getattr(plan, name)) for name in (*VIEWS["base"], "ep")}
        if ranks_per_node is not None:
            _positive("ranks_per_node", ranks_per_node)
        pp, dp_replicate, dp_shard, cp, tp, ep = degrees.values()
        replica = dp_shard * cp * tp
        if replica % ep:
            raise ValueError(
                f"ep = {ep} does not fit the mesh: it must divide dp_shard x cp x tp = "
                f"{dp_shard} x {cp} x {tp} = {replica}; use one of {_divisors(replica)}"
            )
        sizes = {
            **degrees,
            "batch": dp_replicate * dp_shard,
            "fsdp": dp_shard * cp,
            "efsdp": replica // ep,
            "loss": dp_replicate * dp_shard * cp,
            "world": pp * dp_replicate * replica,
        }
        axes: dict[str, Axis] = {}
        for view in VIEWS.values():
            stride = 1
            for name in reversed(view):
                axes[name] = Axis(size=sizes[name], stride=stride)
                stride *= sizes[name]
        ordered = {name: axes[name] for view in VIEWS.values() for name in view}
        self.__attrs_init__(world_size=sizes["world"], ranks_per_node=ranks_per_node, axes=ordered)

    @property
    def views(self) -> Mapping[str, tuple[str, ...]]:
        """View name to its axes, slowest first. The sizes of a view's axes multiply to `world_size`."""
        return VIEWS

    @property
    def axes(self) -> tuple[str, ...]:
        """The names of all axes."""
        return tuple(self._axes)

    def axis(self, name: str) -> Axis:
        """Size and stride of an axis. Raises ValueError for a name that is not an axis."""
        try:
            return self._axes[name]
        except (KeyError, TypeError):
            raise ValueError(f"unknown mesh axis {name!r}: a mesh has the axes {', '.join(self._axes)}") from None

    def size(self, axis: str) -> int:
        """How many ranks a group of this axis has."""
        return self.axis(axis).size

    def coordinate(self, rank: int) -> dict[str, int]:
        """The position of a rank on every axis. Raises ValueError for a rank outside the world."""
        self._check_rank(rank)
        return {name: axis.index(rank) for name, axis in self._axes.items()}

    def group(self, axis: str, rank: int) -> tuple[int, ...]:
        """The group of this axis that `rank` is in: global ranks, ascending. Costs O(group size) at any
        world size.

        Raises ValueError for an unknown axis or a rank outside the world.
        """
        found = self.axis(axis)
        self._check_rank(rank)
        return tuple(found.group(found.group_number(rank)))

    def groups(self, axis: str) -> npt.NDArray[np.int64]:
        """All groups of an axis as an int64 array of shape (world_size / size, size).

        Each row is one group, ascending; rows are ordered by their first rank.
        """
        found = self.axis(axis)
        blocks = np.arange(self.world_size, dtype=np.int64).reshape(-1, found.size, found.stride)
        return blocks.swapaxes(1, 2).reshape(-1, found.size)

    def shard_index(self, rank: int) -> int:
        """Which shard of the data a rank reads, of `size("batch")`: its `batch` coordinate.

        Ranks that differ only in pp, cp or tp read the same samples.
        """
        self._check_rank(rank)
        return self._axes["batch"].index(rank)

    def within_node(self, axis: str) -> bool:
        """Whether every group of this axis stays within one node of `ranks_per_node` ranks.

        Raises ValueError when the mesh was made without `ranks_per_node`.
        """
        if self.ranks_per_node is None:
            raise ValueError(
                f"within_node({axis!r}) needs to know how many ranks share a node: "
                "make the mesh with ParallelMesh(plan, ranks_per_node=8), for example"
            )
        found = self.axis(axis)
        if found.size == 1 or self.ranks_per_node >= self.world_size:
            return True
        # A node boundary strictly inside a block of `span` ranks always separates two ranks of some group
        # in it.
        return self.ranks_per_node % found.span == 0

    def _check_rank(self, rank: int) -> None:
        if not 0 <= rank < self.world_size:
            raise ValueError(
                f"rank {rank} is outside the mesh: ranks go from 0 to {self.world_size - 1} "
                f"(world size {self.world_size})"
            )


def _positive(name: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        raise TypeError(f"{name} = {value!r} must be an int, but is a {type(value).__name__}")
    if value < 1:
        raise ValueError(f"{name} = {value} must be at least 1; 1 means that this dimension is not split")
    return int(value)


def _divisors(number: int) -> str:
    small = [i for i in range(1, math.isqrt(number) + 1) if number % i == 0]
    return ", ".join(map(str, sorted({*small, *(number // i for i in small)})))
