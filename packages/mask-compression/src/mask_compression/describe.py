"""A mask in words, as a drawing in characters, and as data: what `mask-compression show` prints."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from mask_compression.checks import check_row
from mask_compression.mask import CompressedMask
from mask_compression.sharding import Order, SequenceShard, remote_key_ranges, slowest_to_mean, work_per_rank
from mask_compression.tiles import EMPTY, FULL, PARTIAL, tile_table

_SIGNS = "·▒█"
_ACROSS = 64
_MOST_ACROSS = 4_096
_SHOWN = 8


@dataclass(frozen=True, eq=False)
class Drawing:
    """The tiles of one row of a mask, in the order of the row.

    mask:        the mask.
    row:         which of its rows.
    cp:          context-parallel ranks, and
    order:       how the row is cut for them.
    tile:        tokens of a tile, of queries and of keys. Tiles start anew where a rank's piece starts.
    grid:        int8 (query_tiles, key_tiles): 0 empty, 1 partial, 2 full.
    positions:   int64 (query_tiles,), the first query of each tile.
    tile_ranks:  int64 (query_tiles,), the rank that holds it.
    work:        int64 (cp,), visible pairs of each rank, over all rows.
    """

    mask: CompressedMask
    row: int
    cp: int
    order: Order
    tile: int
    grid: npt.NDArray[np.int8]
    positions: npt.NDArray[np.int64]
    tile_ranks: npt.NDArray[np.int64]
    work: npt.NDArray[np.int64]

    @property
    def imbalance(self) -> float:
        """Work of the slowest rank over the mean."""
        return slowest_to_mean(self.work)


def draw(
    mask: CompressedMask, *, row: int = 0, cp: int = 1, order: Order = "contiguous", tile: int | None = None
) -> Drawing:
    """The tiles of one row, from boundaries alone; tile=None chooses a size that gives at most 64 tiles across.

    Raises ValueError for a row that does not exist, a tile below 1 and a sequence that cp cannot cut.
    """
    check_row(row, mask.rows)
    size = -(-mask.seq_length // _ACROSS) if tile is None else tile
    if size > 0 and mask.seq_length > size * _MOST_ACROSS:
        raise ValueError(
            f"a tile of {size} tokens gives {-(-mask.seq_length // size):,} tiles across, and at most {_MOST_ACROSS:,} "
            f"are drawn: use a tile of {-(-mask.seq_length // _MOST_ACROSS):,} or more"
        )
    work = work_per_rank(mask, cp, order)
    parts = []
    for rank in range(cp):
        table = tile_table(mask, (size, size), SequenceShard(mask.seq_length, cp, rank, order).ranges)
        parts.append((table.grid(row), table.query_positions, np.full(table.query_tiles, rank)))
    grid, positions, ranks = (np.concatenate(part) for part in zip(*parts, strict=True))
    in_order = np.argsort(positions)
    return Drawing(mask, row, cp, order, size, grid[in_order], positions[in_order], ranks[in_order], work)


def as_text(drawing: Drawing) -> str:
    """Facts about the mask, one character for each tile, and a line for each rank."""
    mask, grid = drawing.mask, drawing.grid
    lengths = np.diff(mask.row_ends(drawing.row), prepend=0)
    empty, partial, full = (int((grid == kind).sum()) for kind in (EMPTY, PARTIAL, FULL))
    tiles = f"{full:,} full {_SIGNS[FULL]}, {partial:,} partial {_SIGNS[PARTIAL]}, {empty:,} empty {_SIGNS[EMPTY]}"
    share = f"{100 * mask.visible_pairs / (mask.rows * mask.seq_length**2):.3g} % of all pairs visible"
    sizes = f"{_count(mask.rows, 'row')} of {_count(mask.seq_length, 'token')}, {_count(len(mask.ends), 'document')}"
    lines = [
        f"{sizes}, {share}",
        f"row {drawing.row}: documents of {_some(lengths)} tokens; tiles of {drawing.tile} x {drawing.tile}: {tiles}",
        "",
    ]
    width = len(f"{drawing.positions[-1]}")
    for position, rank, tiles in zip(drawing.positions, drawing.tile_ranks, grid, strict=True):
        owner = f"rank {rank:<{len(str(drawing.cp - 1))}}  " if drawing.cp > 1 else ""
        lines.append(f"{owner}{position:>{width}}  {''.join(_SIGNS[kind] for kind in tiles)}")
    return "\n".join(lines + _rank_lines(drawing))


def as_dict(drawing: Drawing) -> dict[str, Any]:
    """The mask, the tiles of the row and the work of every rank, as JSON-ready data."""
    mask = drawing.mask
    return {
        "rows": mask.rows,
        "seq_length": mask.seq_length,
        "ends": mask.ends.tolist(),
        "lengths": mask.lengths.tolist(),
        "visible_pairs": mask.visible_pairs,
        "row": drawing.row,
        "tile": drawing.tile,
        "tiles": {name: int((drawing.grid == kind).sum()) for kind, name in enumerate(("empty", "partial", "full"))},
        "context_parallel": drawing.cp,
        "order": drawing.order,
        "imbalance": drawing.imbalance,
        "ranks": [
            {
                "rank": shard.rank,
                "positions": shard.ranges,
                "visible_pairs": int(drawing.work[shard.rank]),
                "remote_keys": remote_key_ranges(mask, shard, drawing.row),
            }
            for shard in _shards(drawing)
        ],
    }


def _rank_lines(drawing: Drawing) -> list[str]:
    if drawing.cp == 1:
        return []
    lines = ["", f"context_parallel {drawing.cp}, {drawing.order}: slowest rank / mean work = {drawing.imbalance:.3f}"]
    for shard in _shards(drawing):
        remote = remote_key_ranges(drawing.mask, shard, drawing.row)
        needs = ", ".join(f"{a:,}-{b - 1:,}" for a, b in remote) or "none"
        holds = ", ".join(f"{a:,}-{b - 1:,}" for a, b in shard.ranges)
        pairs = f"{drawing.work[shard.rank]:,} visible pairs"
        lines.append(f"rank {shard.rank}: holds {holds}; {pairs}; keys from other ranks: {needs}")
    return lines


def _shards(drawing: Drawing) -> list[SequenceShard]:
    return [SequenceShard(drawing.mask.seq_length, drawing.cp, rank, drawing.order) for rank in range(drawing.cp)]


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'s' * (number != 1)}"


def _some(lengths: npt.NDArray[np.int64]) -> str:
    shown = " ".join(f"{length}" for length in lengths[:_SHOWN])
    return shown if len(lengths) <= _SHOWN else f"{shown} … {lengths[-1]} ({len(lengths):,} documents)"
