"""Context parallelism: which positions of every row a rank holds, what its queries need, and how much work they are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt

from mask_compression.checks import Ints, Range, check_row, piece_of_row, whole_number
from mask_compression.mask import CompressedMask
from mask_compression.tiles import tile_table

Order = Literal["contiguous", "zigzag"]


@dataclass(frozen=True)
class SequenceShard:
    """The part of every row that one context-parallel rank holds.

    contiguous: rank r of cp has the r-th of cp equal pieces.
    zigzag:     of 2·cp equal pieces it has the r-th and the (2·cp - 1 - r)-th, so that causal work is balanced.

    Raises ValueError for a seq_length that cannot be cut into that many equal pieces, and for a rank outside the group.
    """

    seq_length: int
    cp: int
    rank: int
    order: Order = "contiguous"

    def __post_init__(self) -> None:
        whole_number(self.seq_length, "seq_length", at_least=1)
        whole_number(self.cp, "context_parallel", at_least=1)
        whole_number(self.rank, "rank", at_least=0)
        if self.rank >= self.cp:
            raise ValueError(
                f"rank {self.rank} is outside context_parallel {self.cp}: ranks go from 0 to {self.cp - 1}"
            )
        if self.order not in get_args(Order):
            raise ValueError(f"order {self.order!r} is unknown: use 'contiguous' or 'zigzag'")
        pieces = self.cp * (2 if self.order == "zigzag" else 1)
        if self.seq_length % pieces:
            rule = f"context_parallel {self.cp}" if pieces == self.cp else f"2 · context_parallel {self.cp} = {pieces}"
            below = self.seq_length // pieces * pieces
            nearest = f"{below} or {below + pieces}" if below else f"{pieces}"
            raise ValueError(
                f"seq_length {self.seq_length} cannot be cut into equal pieces: in {self.order} order it must be a "
                f"multiple of {rule}. Use seq_length {nearest}."
            )

    @property
    def ranges(self) -> tuple[Range, ...]:
        """Positions of the row, in the order in which the rank holds them."""
        if self.order == "contiguous":
            size = self.seq_length // self.cp
            return ((self.rank * size, (self.rank + 1) * size),)
        size, mirrored = self.seq_length // (2 * self.cp), 2 * self.cp - 1 - self.rank
        return ((self.rank * size, (self.rank + 1) * size), (mirrored * size, (mirrored + 1) * size))

    @property
    def tokens(self) -> int:
        """seq_length / cp, the tokens of a row that the rank holds."""
        return self.seq_length // self.cp

    @property
    def positions(self) -> Ints:
        """int64 (seq_length / cp,), position in the row of each token that the rank holds."""
        return np.concatenate([np.arange(*piece) for piece in self.ranges])

    def take(self, x: npt.ArrayLike, axis: int = 1) -> npt.NDArray[Any]:
        """The rank's part of an array whose dimension `axis` is the whole sequence, as a copy.

        For tensors of a framework, index with `positions`, or cut `ranges`. Raises ValueError for another length.
        """
        length = np.shape(x)[axis]
        if length != self.seq_length:
            raise ValueError(f"dimension {axis} has length {length}, but seq_length is {self.seq_length}")
        return np.take(x, self.positions, axis=axis)


def key_ranges(mask: CompressedMask, queries: Sequence[Range], row: int) -> tuple[Range, ...]:
    """The keys of one row that these queries see: ascending half-open ranges with gaps between them.

    The keys of a range of queries are one range: from the start of its first document to its last query.
    Raises ValueError for ranges or a row that do not exist.
    """
    check_row(row, mask.rows)
    starts = mask.row_starts(row)
    needed = []
    for piece in queries:
        start, stop = piece_of_row(piece, mask.seq_length, "queries")
        needed.append((int(starts[np.searchsorted(starts, start, side="right") - 1]), stop))
    return _union(needed)


def remote_key_ranges(mask: CompressedMask, shard: SequenceShard, row: int) -> tuple[Range, ...]:
    """The keys of one row that a rank's queries see and another rank holds: ascending half-open ranges."""
    _check_shard(mask, shard)
    missing = key_ranges(mask, shard.ranges, row)
    for start, stop in shard.ranges:
        cut = [piece for a, b in missing for piece in ((a, min(b, start)), (max(a, stop), b)) if piece[0] < piece[1]]
        missing = tuple(cut)
    return missing


def segment_lengths(mask: CompressedMask, shard: SequenceShard, row: int) -> Ints:
    """int64 (pieces of documents,), lengths of the runs of one row's documents that a rank holds, in its order."""
    _check_shard(mask, shard)
    check_row(row, mask.rows)
    ends, starts = mask.row_ends(row), mask.row_starts(row)
    parts = [np.clip(ends, *piece) - np.clip(starts, *piece) for piece in shard.ranges]
    lengths = np.concatenate(parts)
    present: Ints = lengths[lengths > 0]
    return present


def visible_pairs(mask: CompressedMask, queries: Sequence[Range]) -> int:
    """Pairs of a query in these ranges and a key that it sees, over all rows: the work of attention.

    In closed form from the boundaries. Raises ValueError for ranges that are empty, overlap or leave the row.
    """
    whole = (mask.seq_length, mask.seq_length)
    return int(tile_table(mask, whole, queries).visible_pairs.sum())


def work_per_rank(mask: CompressedMask, cp: int, order: Order = "contiguous") -> Ints:
    """int64 (cp,), visible pairs of every context-parallel rank; together `mask.visible_pairs`."""
    whole_number(cp, "context_parallel", at_least=1)
    shards = [SequenceShard(mask.seq_length, cp, rank, order) for rank in range(cp)]
    return np.array([visible_pairs(mask, shard.ranges) for shard in shards], np.int64)


def imbalance(mask: CompressedMask, cp: int, order: Order = "contiguous") -> float:
    """Work of the slowest rank over the mean: 1.0 is balanced; plain causal in contiguous order tends to 2 - 1/cp."""
    return slowest_to_mean(work_per_rank(mask, cp, order))


def slowest_to_mean(work: Ints) -> float:
    """The largest of some ranks' work over their mean."""
    return float(work.max() / work.mean())


def _union(ranges: list[Range]) -> tuple[Range, ...]:
    joined: list[Range] = []
    for start, stop in sorted(ranges):
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(joined[-1][1], stop))
        else:
            joined.append((start, stop))
    return tuple(joined)


def _check_shard(mask: CompressedMask, shard: SequenceShard) -> None:
    if shard.seq_length != mask.seq_length:
        raise ValueError(f"the shard's seq_length {shard.seq_length} is not the mask's seq_length {mask.seq_length}")
