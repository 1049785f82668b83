"""Tiles of the attention square: which are empty, which full and which need a mask, from boundaries alone.

A block-diagonal causal mask needs no square to be looked at. Documents lie side by side, so the queries of a tile,
positions `q0` to `q1 - 1`, together see exactly the keys `start(q0)` to `q1 - 1`, where `start(q)` is the start
of q's document; and every one of them sees the keys `start(q1 - 1)` to `q0`. Tiles that touch the first interval
are not empty, tiles inside the second are full.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import numpy as np
import numpy.typing as npt

from mask_compression.checks import Ints, Range, check_row, piece_of_row, whole_number
from mask_compression.mask import CompressedMask

EMPTY, PARTIAL, FULL = 0, 1, 2
"""What `TileTable.grid` says of a tile."""


@dataclass(frozen=True, eq=False)
class TileTable:
    """Tiles of `tile[0]` queries by `tile[1]` keys, for all rows of a mask.

    Tokens lie in memory in the order of their ranges. Tiles are counted from 0 through that memory and start anew
    with each range (ranges that continue each other are one), so the last tile of a range may be smaller, and the
    tokens of a tile are always neighbours in the row. Where all ranges but the last are multiples of the tile,
    this is the plain grid over memory.

    The keys of one range that a tile of queries sees are neighbours too. So each of the first four arrays holds one
    number for each row, tile of queries and range of keys. Of the tiles of keys,

        first .. stop - 1            are not empty,
        full_first .. full_stop - 1  of these are full: every query sees every key. The others are partial.

    Always first <= full_first <= full_stop <= stop; two that are equal enclose no tile.

    tile:            (tokens of a tile of queries, tokens of a tile of keys).
    rows:            sequences that never see each other.
    first, stop, full_first, full_stop: int64 (rows, query_tiles, key_ranges), as above.
    query_edges:     int64 (query_tiles + 1,), where in memory each tile of queries starts; the last is the end.
    key_edges:       int64 (key_tiles + 1,), the same for keys.
    query_positions: int64 (query_tiles,), position in the row of each tile's first query.
    key_positions:   int64 (key_tiles,), the same for keys.
    visible_pairs:   int64 (rows,), pairs of a query and a key that it sees. The two matrix products of a forward
        pass cost 4 · head_dim floating-point operations a pair and head.
    """

    tile: tuple[int, int]
    rows: int
    first: Ints
    stop: Ints
    full_first: Ints
    full_stop: Ints
    query_edges: Ints
    key_edges: Ints
    query_positions: Ints
    key_positions: Ints
    visible_pairs: Ints

    @property
    def query_tiles(self) -> int:
        """Tiles of queries in one row."""
        return len(self.query_positions)

    @property
    def key_tiles(self) -> int:
        """Tiles of keys in one row."""
        return len(self.key_positions)

    @property
    def full(self) -> int:
        """Number of full tiles in all rows: those that need no mask."""
        return int((self.full_stop - self.full_first).sum())

    @property
    def partial(self) -> int:
        """Number of tiles in all rows in which some pairs are visible and some are not."""
        return int((self.stop - self.first).sum()) - self.full

    @property
    def empty(self) -> int:
        """Number of tiles in all rows that need not be computed."""
        return self.rows * self.query_tiles * self.key_tiles - self.full - self.partial

    def tiles(self, kind: Literal["partial", "full"]) -> Ints:
        """Every tile of one kind as int64 (tiles, 3): row, tile of queries, tile of keys; sorted.

        Raises ValueError for another kind.
        """
        if kind == "full":
            return _listed(self.full_first, self.full_stop)
        if kind == "partial":
            # In each range of keys: those before the full ones, then those after.
            first, stop = ((self.first, self.full_stop), (self.full_first, self.stop))
            shape = (self.rows, self.query_tiles, -1)
            return _listed(np.stack(first, axis=-1).reshape(shape), np.stack(stop, axis=-1).reshape(shape))
        raise ValueError(f"TileTable.tiles: there is no list of {kind!r} tiles; use 'partial' or 'full'")

    def grid(self, row: int) -> npt.NDArray[np.int8]:
        """One row's tiles as int8 (query_tiles, key_tiles): 0 is EMPTY, 1 PARTIAL, 2 FULL. As large as it looks.

        Raises ValueError for a row that is not there.
        """
        check_row(row, self.rows)
        grid = np.full((self.query_tiles, self.key_tiles), EMPTY, np.int8)
        for first, stop, kind in ((self.first, self.stop, PARTIAL), (self.full_first, self.full_stop, FULL)):
            _, queries, keys = _listed(first[row : row + 1], stop[row : row + 1]).T
            grid[queries, keys] = kind
        return grid


def tile_table(
    mask: CompressedMask,
    tile: tuple[int, int] = (128, 128),
    query_ranges: Sequence[Range] | None = None,
    key_ranges: Sequence[Range] | None = None,
) -> TileTable:
    """The tiles of a mask, at a cost that grows with the tiles of queries and the documents, not with their square.

    mask:         rows of packed documents.
    tile:         tokens of a tile of queries and of a tile of keys.
    query_ranges: which positions of every row the queries are, in the order in which they lie in memory; None is all.
    key_ranges:   the same for keys.

    Raises ValueError for a tile below 1, and for ranges that are empty, overlap or leave the row.
    """
    queries = joined_ranges(query_ranges, mask.seq_length, "query_ranges")
    keys = joined_ranges(key_ranges, mask.seq_length, "key_ranges")
    tile_queries = whole_number(tile[0], "tile[0]", at_least=1)
    tile_keys = whole_number(tile[1], "tile[1]", at_least=1)
    query_edges, query_positions, _ = _cut(queries, tile_queries)
    key_edges, key_positions, key_tiles_before = _cut(keys, tile_keys)
    last_queries = query_positions + np.diff(query_edges) - 1
    range_starts, range_stops = np.array(keys, np.int64).T
    sizes = range_stops - range_starts

    def tiles_below(positions: Ints, *, begun: bool) -> Ints:
        """Tiles of keys, in memory before each range and in it below each position: all begun ones or whole ones."""
        below = np.clip(positions[:, :, None] - range_starts, 0, sizes)
        # A range's last tile is whole where the range ends, however small it is.
        tiles: Ints = key_tiles_before + np.where(begun | (below == sizes), -(-below // tile_keys), below // tile_keys)
        return tiles

    first = tiles_below(document_starts(mask, query_positions), begun=False)
    stop = np.maximum(first, tiles_below(last_queries[None] + 1, begun=True))
    full_first = np.clip(tiles_below(document_starts(mask, last_queries), begun=True), first, stop)
    full_stop = np.clip(tiles_below(query_positions[None] + 1, begun=False), full_first, stop)
    return TileTable(
        tile=(tile_queries, tile_keys),
        rows=mask.rows,
        first=first,
        stop=stop,
        full_first=full_first,
        full_stop=full_stop,
        query_edges=query_edges,
        key_edges=key_edges,
        query_positions=query_positions,
        key_positions=key_positions,
        visible_pairs=sum((_visible_pairs(mask, q, k) for q in queries for k in keys), np.zeros(mask.rows, np.int64)),
    )


def document_starts(mask: CompressedMask, positions: Ints) -> Ints:
    """The first key that the query at each position sees: int64 (rows, positions), counted from the row's start."""
    row_starts = np.arange(mask.rows)[:, None] * mask.seq_length
    starts = mask.starts
    found: Ints = starts[np.searchsorted(starts, row_starts + positions, side="right") - 1] - row_starts
    return found


def joined_ranges(ranges: Sequence[Range] | None, seq_length: int, name: str) -> tuple[Range, ...]:
    """Ranges of a row as they lie in memory, checked, with those that continue each other joined; None is the row.

    Raises ValueError, with `name`, for ranges that are empty, overlap or leave the row; TypeError for non-integers.
    """
    if ranges is None:
        return ((0, seq_length),)
    pieces = [piece_of_row(piece, seq_length, name) for piece in ranges]
    if not pieces:
        raise ValueError(f"{name} is empty; give at least one range, or None for the whole row (0, {seq_length})")
    in_order = sorted(pieces)
    for (start, stop), (next_start, next_stop) in pairwise(in_order):
        if next_start < stop:
            raise ValueError(
                f"{name}: ({start}, {stop}) and ({next_start}, {next_stop}) overlap; give each position once"
            )
    joined = pieces[:1]
    for start, stop in pieces[1:]:
        if start == joined[-1][1]:
            joined[-1] = (joined[-1][0], stop)
        else:
            joined.append((start, stop))
    return tuple(joined)


def _cut(ranges: tuple[Range, ...], size: int) -> tuple[Ints, Ints, Ints]:
    """Tiles of ranges: their edges in memory, their first positions, and how many tiles lie before each range."""
    positions = [np.arange(start, stop, size, dtype=np.int64) for start, stop in ranges]
    lengths = [stop - start for start, stop in ranges]
    before = np.cumsum([0, *lengths])
    edges = [tiles - start + offset for tiles, (start, _), offset in zip(positions, ranges, before, strict=False)]
    tiles_before = np.cumsum([0, *map(len, positions[:-1])])
    return np.concatenate([*edges, before[-1:]]), np.concatenate(positions), tiles_before


def _visible_pairs(mask: CompressedMask, queries: Range, keys: Range) -> Ints:
    """Pairs of a query of one range and a key of another that it sees, int64 (rows,), from the boundaries."""
    row_starts = np.arange(mask.rows) * mask.seq_length
    row_start = row_starts[mask.document_rows]
    start, end = mask.starts - row_start, mask.ends - row_start
    key_first, key_stop = np.maximum(start, keys[0]), np.minimum(end, keys[1])
    width = np.maximum(key_stop - key_first, 0)

    def pairs_before(query: Ints) -> Ints:
        """Of all queries of the document below a position: the first `width` keys make a triangle, then a rectangle."""
        above = np.maximum(query - key_first, 0)
        triangle = np.minimum(above, width)
        pairs: Ints = triangle * (triangle + 1) // 2 + (above - triangle) * width
        return pairs

    first, stop = np.clip(queries[0], start, end), np.clip(queries[1], start, end)
    pairs: Ints = np.add.reduceat(pairs_before(stop) - pairs_before(first), np.searchsorted(mask.starts, row_starts))
    return pairs


def _listed(first: Ints, stop: Ints) -> Ints:
    """The tiles first .. stop - 1 of each row, tile of queries and range, as (row, tile of queries, tile of keys)."""
    counts = (stop - first).ravel()
    interval = np.repeat(np.arange(counts.size), counts)
    keys = np.arange(interval.size) - (np.cumsum(counts) - counts - first.ravel())[interval]
    row, query_tile, _ = np.unravel_index(interval, first.shape)
    return np.stack((row, query_tile, keys), axis=1)
