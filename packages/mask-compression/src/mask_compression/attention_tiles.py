"""What attention forward and backward share: checked arguments, and tiles of queries with the keys they see."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from mask_compression.mask import CompressedMask, Ints, Range
from mask_compression.tiles import TileTable, document_starts, tile_table

Floats = npt.NDArray[Any]
Bools = npt.NDArray[np.bool_]

# Scores of a block, in float32 half a megabyte, should stay in a core's second-level cache through all passes.
_TILE_ROWS = 256
_BLOCK_KEYS = 512

_COMPUTED_IN = {"float16": np.float32, "float32": np.float32, "float64": np.float64}


@dataclass(frozen=True, eq=False)
class Block:
    """Keys that some query of a tile sees.

    keys:   where they lie in memory.
    hidden: columns of the block with bool (tokens, columns): True where the query does not see the key. Keys outside
        of these columns are seen by all queries.
    """

    keys: slice
    hidden: tuple[tuple[slice, Bools], ...]

    def scores(self, q_rows: Floats, k_sd: Floats) -> Floats:
        """`q kᵀ`, (tokens · heads, keys), -inf where the query does not see the key; `k_sd`: all keys in memory."""
        scores: Floats = np.matmul(q_rows, k_sd[self.keys].T)
        for columns, hidden in self.hidden:
            per_token = scores.reshape(len(hidden), -1, scores.shape[1])
            np.copyto(per_token[:, :, columns], -np.inf, where=hidden[:, None])
        return scores


@dataclass(frozen=True, eq=False)
class Tile:
    """Queries of one row that lie together, for the heads that read one key/value head."""

    row: int
    tokens: slice
    heads: slice
    blocks: tuple[Block, ...]

    def take(self, x_bshd: Floats) -> Floats:
        """The tile's part of an array laid out as q, (tokens · heads, D)."""
        return x_bshd[self.row, self.tokens, self.heads].reshape(-1, x_bshd.shape[-1])

    def put(self, x_bshd: Floats, rows: Floats) -> None:
        """Write what `take` would return."""
        target = x_bshd[self.row, self.tokens, self.heads]
        target[...] = rows.reshape(target.shape)


@dataclass(frozen=True, eq=False)
class Work:
    """What one call of attention has to do.

    scale:  what scores are multiplied by.
    dtype:  what to compute in.
    group:  query heads that share a key/value head.
    table:  tiles of queries by single keys, so that intervals of tiles are intervals of keys.
    starts: int64 (rows, Sq), the first key that each query sees.
    """

    scale: float
    dtype: np.dtype[Any]
    group: int
    kv_heads: int
    table: TileTable
    starts: Ints

    def heads(self) -> Iterator[tuple[int, int, list[Tile]]]:
        """Every row with every key/value head, and the tiles that read it: those that see some key."""
        edges = self.table.query_edges.tolist()
        for row in range(self.table.rows):
            blocks = [tuple(self._blocks(row, number)) for number in range(self.table.query_tiles)]
            for kv_head in range(self.kv_heads):
                heads = slice(kv_head * self.group, (kv_head + 1) * self.group)
                tiles = zip(map(slice, edges, edges[1:]), blocks, strict=True)
                yield row, kv_head, [Tile(row, tokens, heads, seen) for tokens, seen in tiles if seen]

    def _blocks(self, row: int, number: int) -> Iterator[Block]:
        """The keys that one tile of queries sees."""
        table = self.table
        starts = self.starts[row, table.query_edges[number] : table.query_edges[number + 1], None]
        positions = table.query_positions[number] + np.arange(len(starts))[:, None]
        edges = (table.first, table.full_first, table.full_stop, table.stop)
        for first, full_first, full_stop, stop in zip(*(edge[row, number].tolist() for edge in edges), strict=True):
            for keys in _pieces(first, stop):
                hidden = []
                for start, end in (keys.start, min(full_first, keys.stop)), (max(full_stop, keys.start), keys.stop):
                    if start < end:
                        key_positions = table.key_positions[start:end]
                        unseen = (key_positions > positions) | (key_positions < starts)
                        hidden.append((slice(start - keys.start, end - keys.start), unseen))
                yield Block(keys, tuple(hidden))


def checked_work(
    q: Floats,
    k: Floats,
    v: Floats,
    mask: CompressedMask,
    scale: float | None,
    query_ranges: Sequence[Range] | None,
    key_ranges: Sequence[Range] | None,
) -> Work:
    """The work of attention, after its arguments have been checked.

    Raises ValueError for shapes that do not fit each other, the mask or the ranges; TypeError for dtypes that differ
    or are no floats of NumPy.
    """
    dtypes = {x.dtype.name for x in (q, k, v)}
    if len(dtypes) > 1 or not dtypes <= _COMPUTED_IN.keys():
        raise TypeError(
            f"attention: q, k and v are {q.dtype}, {k.dtype} and {v.dtype}; they have to be of one dtype, "
            f"{', '.join(_COMPUTED_IN)}"
        )
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.ndim != 4:
            raise ValueError(f"attention: {name} has shape {x.shape}; use (batch, tokens, heads, head_dim)")
        if x.shape[0] != mask.rows:
            raise ValueError(f"attention: {name} has {x.shape[0]} rows {x.shape}, and the mask has {mask.rows}")
    if k.shape[:3] != v.shape[:3]:
        raise ValueError(f"attention: k {k.shape} and v {v.shape} differ in more than the last dimension")
    heads, head_dim = q.shape[2:]
    kv_heads = k.shape[2]
    if head_dim != k.shape[3] or not head_dim:
        raise ValueError(f"attention: q {q.shape} and k {k.shape} need the same last dimension of 1 or more")
    if not heads or not kv_heads or heads % kv_heads:
        raise ValueError(
            f"attention: {heads} query heads cannot share {kv_heads} key/value heads; the first has to be a multiple "
            f"of the second; use {max(kv_heads, 1) * max(-(-heads // max(kv_heads, 1)), 1)} query heads"
        )
    table = tile_table(mask, (max(1, _TILE_ROWS // (heads // kv_heads)), 1), query_ranges, key_ranges)
    for name, x, tokens, ranges in (
        ("q", q, table.query_edges[-1], query_ranges),
        ("k", k, table.key_tiles, key_ranges),
    ):
        if x.shape[1] != tokens:
            of = "a row of the mask has" if ranges is None else f"the ranges {tuple(ranges)} have"
            raise ValueError(f"attention: {name} has {x.shape[1]} tokens {x.shape}, and {of} {tokens}")
    query_positions = np.repeat(table.query_positions - table.query_edges[:-1], np.diff(table.query_edges))
    query_positions += np.arange(len(query_positions))
    return Work(
        scale=head_dim**-0.5 if scale is None else float(scale),
        dtype=np.dtype(_COMPUTED_IN[q.dtype.name]),
        group=heads // kv_heads,
        kv_heads=kv_heads,
        table=table,
        starts=document_starts(mask, query_positions),
    )


def _pieces(first: int, stop: int) -> list[slice]:
    """The keys first .. stop - 1 in pieces of nearly the same size, at most `_BLOCK_KEYS`."""
    count = -((first - stop) // _BLOCK_KEYS)
    edges = [first + (stop - first) * piece // count for piece in range(count + 1)] if count else []
    return list(map(slice, edges, edges[1:]))
