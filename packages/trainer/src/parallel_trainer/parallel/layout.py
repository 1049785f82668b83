"""Which part of a weight each rank holds: one function, for everything that has to know.

Tensor or expert parallelism splits a dimension of a weight; what a rank then holds is laid out as a flat array and cut
once more over the shard group (`fully_shard.py`). Nothing is padded: sizes that do not divide give parts of different
sizes.
"""

from __future__ import annotations

import math

import numpy as np
from attrs import frozen

from parallel_trainer.parallel.weights import Weight, initial_rows, split_evenly

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
