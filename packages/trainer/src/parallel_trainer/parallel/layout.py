"""Which part of a weight each rank holds: one function, for everything that has to know.

Tensor or expert parallelism splits a dimension of a weight; what a rank then holds is laid out as a flat array and cut
once more over the shard group (`fully_shard.py`). Nothing is padded: sizes that do not divide give parts of different
sizes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np
from attrs import frozen
from device_mesh import ParallelMesh

from parallel_trainer.parallel.weights import Weight, initial_rows, shard_sizes, split_evenly

Range = tuple[int, int]
"""Indices `start` to `stop - 1`."""


@frozen
class WeightPart:
    """What one rank of a weight's split axis holds of it.

    weight: the whole weight's declaration.
    ranges: the indices of `weight.split_dim` that the rank holds, in the order in which it holds them.
    copies: how many ranks of the group hold this same part: all of them where the weight is not split, some where there
        are fewer blocks (key/value heads) than ranks, else 1.
    """

    weight: Weight
    ranges: tuple[Range, ...]
    copies: int

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the part."""
        if self.weight.split_dim is None:
            return self.weight.shape
        held = sum(stop - start for start, stop in self.ranges)
        return tuple(held if dim == self.weight.split_dim else size for dim, size in enumerate(self.weight.shape))

    @property
    def size(self) -> int:
        """Elements of the part."""
        return math.prod(self.shape)

    @property
    def index(self) -> tuple[slice | np.ndarray, ...]:
        """What to index the whole weight with to read or write the part."""
        return tuple(
            self._indices if dim == self.weight.split_dim else slice(None) for dim in range(len(self.weight.shape))
        )

    def initial_values(self, *, seed: int, start: int, stop: int) -> np.ndarray:
        """Elements `start` to `stop - 1` of the flattened part as the weight starts, float64."""
        row_size = math.prod(self.shape[1:])
        if stop <= start or not row_size:
            return np.empty(0)
        first, last = start // row_size, -(-stop // row_size)
        rows = np.arange(self.shape[0] if self.shape else 1)
        if self.weight.split_dim == 0:
            rows = self._indices
        values = initial_rows(self.weight, seed=seed, rows=rows[first:last])
        if self.weight.split_dim not in (None, 0):
            values = values.reshape(-1, *self.weight.shape[1:])[self.index]
        return values.reshape(-1)[start - first * row_size : stop - first * row_size]

    @property
    def runs(self) -> Runs:
        """Its elements of the flattened weight."""
        return runs_of(self.weight.shape, self.weight.split_dim, self.ranges)

    @property
    def _indices(self) -> np.ndarray:
        return np.concatenate([np.arange(start, stop) for start, stop in self.ranges])


def weight_part(weight: Weight, ranks: int, rank: int) -> WeightPart:
    """What rank `rank` of the `ranks` on `weight.split_axis` holds.

    The split dimension consists of `weight.tp_fused` pieces, one after the other; each is split by itself in whole
    blocks of `weight.tp_block`, so that a head, and in a fused weight the heads of query, key and value, stay together.
    Blocks that do not divide go to the first ranks. Fewer blocks than ranks are each held by equally many neighbours.

    Raises ValueError for blocks that the ranks can neither share out nor copy evenly.
    """
    if weight.split_dim is None or ranks == 1:
        whole = (0, weight.shape[weight.split_dim]) if weight.split_dim is not None else (0, 0)
        return WeightPart(weight, (whole,), ranks)
    size = weight.shape[weight.split_dim]
    pieces = weight.tp_fused or (size,)
    shares = [_share(piece // weight.tp_block, ranks, rank, weight) for piece in pieces]
    copies = {count for _, count in shares}
    if len(copies) > 1:
        raise ValueError(f"{weight.name}: pieces {pieces} over {ranks} ranks: some would be split and others copied")
    starts = np.cumsum([0, *pieces]).tolist()
    ranges = tuple(
        (start + first * weight.tp_block, start + stop * weight.tp_block)
        for start, ((first, stop), _) in zip(starts, shares, strict=False)
    )
    return WeightPart(weight, ranges, copies.pop())


def _share(blocks: int, ranks: int, rank: int, weight: Weight) -> tuple[Range, int]:
    """The blocks of a rank, and how many ranks hold them."""
    if blocks >= ranks or blocks == 0:
        return split_evenly(blocks, ranks, rank), 1
    if ranks % blocks or weight.tp_block == 1:
        raise ValueError(
            f"{weight.name}: {blocks} blocks of {weight.tp_block} over {ranks} ranks: there must be at least {ranks}, "
            f"or, of blocks that are held together, a number that divides {ranks}"
        )
    copies = ranks // blocks
    return (rank // copies, rank // copies + 1), copies


@frozen(eq=False)
class Runs:
    """Elements of a flattened weight as intervals: ascending and apart, in the order in which a rank holds them.

    starts, lengths: int64 (n,), in elements of the whole weight.
    """

    starts: np.ndarray
    lengths: np.ndarray

    @property
    def size(self) -> int:
        """Elements in all."""
        return int(self.lengths.sum())

    @property
    def stops(self) -> np.ndarray:
        """Where each interval ends, int64 (n,)."""
        return self.starts + self.lengths

    @property
    def offsets(self) -> np.ndarray:
        """How many elements are held before each interval, int64 (n,)."""
        return np.cumsum(self.lengths) - self.lengths

    def cut(self, first: int, last: int) -> Runs:
        """The held elements number `first` to `last - 1`."""
        begins = np.clip(first - self.offsets, 0, self.lengths)
        ends = np.clip(last - self.offsets, 0, self.lengths)
        some = ends > begins
        return Runs((self.starts + begins)[some], (ends - begins)[some])

    def common(self, other: Runs) -> Common:
        """The elements that both hold, in ascending order."""
        if self._ends_before(other) or other._ends_before(self):  # so it is for most blocks and most ranks
            return Common(slice(0), slice(0), 0)
        first = np.searchsorted(other.stops, self.starts, side="right")
        counts = np.maximum(np.searchsorted(other.starts, self.stops, side="left") - first, 0)
        own = np.repeat(np.arange(len(counts)), counts)
        others = _aranges(first, counts)
        starts = np.maximum(self.starts[own], other.starts[others])
        lengths = np.minimum(self.stops[own], other.stops[others]) - starts
        return Common(
            _places(starts - self.starts[own] + self.offsets[own], lengths),
            _places(starts - other.starts[others] + other.offsets[others], lengths),
            int(lengths.sum()),
        )

    def _ends_before(self, other: Runs) -> bool:
        """Whether one of them is empty, or these end before the others begin."""
        if not (len(self.starts) and len(other.starts)):
            return True
        return bool(self.starts[-1] + self.lengths[-1] <= other.starts[0])


def runs_of(shape: Sequence[int], dim: int | None, ranges: Sequence[Range]) -> Runs:
    """The elements of a flattened array with these indices of dimension `dim`; all of them where that is None."""
    if dim is None:
        return Runs(np.zeros(1, np.int64), np.array([math.prod(shape)], np.int64))
    before, after = math.prod(shape[:dim]), math.prod(shape[dim + 1 :])
    bounds = np.array(ranges, np.int64).reshape(-1, 2) * after
    bounds = bounds[bounds[:, 0] < bounds[:, 1]]
    starts = np.arange(before, dtype=np.int64)[:, None] * (shape[dim] * after) + bounds[:, 0]
    lengths = np.broadcast_to(bounds[:, 1] - bounds[:, 0], starts.shape)
    return Runs(starts.reshape(-1), lengths.reshape(-1))


@frozen(eq=False)
class Common:
    """Elements that two hold, in the same order: what to index the values of each with, and how many there are."""

    here: slice | np.ndarray
    there: slice | np.ndarray
    size: int


def _places(starts: np.ndarray, lengths: np.ndarray) -> slice | np.ndarray:
    """What to index with for these intervals; a slice, which copies ten times as fast, where they are one."""
    if len(starts) == 1:
        return slice(int(starts[0]), int(starts[0] + lengths[0]))
    return _aranges(starts, lengths)


def _aranges(starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """`arange(start, start + length)` of each pair, one after the other."""
    before = np.cumsum(lengths) - lengths
    return np.repeat(starts - before, lengths) + np.arange(int(lengths.sum()))


class Place(Protocol):
    """A rank's place on a mesh axis; a communicator is one."""

    @property
    def size(self) -> int:
        """Ranks on the axis."""

    @property
    def rank(self) -> int:
        """Which of them this is."""


class Places(Protocol):
    """A rank's place on each mesh axis: its communicators, or `MeshPlaces`."""

    def __getitem__(self, axis: str, /) -> Place: ...


@frozen
class Holding:
    """What one rank holds of a weight: elements of the part that tensor or expert parallelism leaves to it.

    part:    the part of its rank of the split axis.
    sizes:   elements of the flattened part on each rank of the shard axis; the last ranks may have fewer, or none.
    shard:   which rank of the shard axis this is.
    is_first: whether no rank of this stage with a lower number holds the same elements.
    """

    part: WeightPart
    sizes: tuple[int, ...]
    shard: int
    is_first: bool

    @property
    def start(self) -> int:
        """Number within the part of the first element."""
        return sum(self.sizes[: self.shard])

    @property
    def size(self) -> int:
        """Elements held."""
        return self.sizes[self.shard]

    @property
    def runs(self) -> Runs:
        """Those elements of the flattened weight."""
        return self.part.runs.cut(self.start, self.start + self.size)


def holding(weight: Weight, places: Places) -> Holding:
    """What the rank with these places holds of a weight of its stage: the one answer for everything that has to know.

    Initial values, gathering, saving, loading, resharding and the plan's memory all follow from it.
    """
    split, shards = places[weight.split_axis], places[weight.shard_axis]
    part = weight_part(weight, split.size, split.rank)
    is_first = split.rank % part.copies == 0 and places["dp_replicate"].rank == 0
    return Holding(part, shard_sizes(part.size, shards.size), shards.rank, is_first)


@frozen
class _MeshPlace:
    size: int
    rank: int


@frozen
class MeshPlaces:
    """The place of a rank on every axis of a mesh."""

    mesh: ParallelMesh
    rank: int

    def __getitem__(self, axis: str) -> Place:
        found = self.mesh.axis(axis)
        return _MeshPlace(found.size, found.index(self.rank))


@frozen(eq=False)
class ModelLayout:
    """Which rank of a plan holds which elements of which weight.

    weights: by name, in the order of the model.
    mesh:    the ranks.
    stages:  by name of a weight the pipeline ranks that use it, that of its first stage first.
    """

    weights: Mapping[str, Weight]
    mesh: ParallelMesh
    stages: Mapping[str, tuple[int, ...]]

    def holding(self, name: str, rank: int) -> Holding | None:
        """What a rank of the world holds of a weight; None where its stages do not use it."""
        if self.mesh.axis("pp").index(rank) not in self.stages[name]:
            return None
        return holding(self.weights[name], MeshPlaces(self.mesh, rank))

    def stored(self, rank: int) -> dict[str, Holding]:
        """What a rank writes into a checkpoint, by name of the weight: each element is written by one rank."""
        stage = self.mesh.axis("pp").index(rank)
        found = {name: holding for name in self.weights if (holding := self.holding(name, rank)) is not None}
        return {
            name: holding
            for name, holding in found.items()
            if holding.is_first and holding.size and self.stages[name][0] == stage
        }
