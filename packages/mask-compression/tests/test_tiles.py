"""Tiles against the dense mask, built here pair by pair from the documents of each position."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mask_compression.mask import CompressedMask
from mask_compression.tiles import EMPTY, FULL, PARTIAL, joined_ranges, tile_table


def mask_of(*rows):
    """A mask from the document lengths of each row."""
    return CompressedMask(len(rows), sum(rows[0]), np.cumsum([length for row in rows for length in row]))


def dense(row, queries, keys):
    """Query i sees key j: same document, and j not after i."""
    documents = np.repeat(np.arange(len(row)), row)
    queries, keys = (np.concatenate([np.arange(*piece) for piece in pieces]) for pieces in (queries, keys))
    return (documents[queries][:, None] == documents[keys]) & (queries[:, None] >= keys)


def tiles_of(seen, queries, keys, tile):
    """What each tile of a dense mask is; tiles start anew with each range."""

    def edges(pieces, size):
        lengths = [stop - start for start, stop in pieces]
        offsets = np.cumsum([0, *lengths])
        pairs = zip(offsets, lengths, strict=False)
        return [(at + i, at + min(i + size, length)) for at, length in pairs for i in range(0, length, size)]

    return np.array(
        [
            [
                FULL if seen[q0:q1, k0:k1].all() else PARTIAL if seen[q0:q1, k0:k1].any() else EMPTY
                for k0, k1 in edges(keys, tile[1])
            ]
            for q0, q1 in edges(queries, tile[0])
        ]
    )


@st.composite
def lengths_of_row(draw, seq_length):
    ends = draw(st.sets(st.integers(1, seq_length)))
    return np.diff([0, *sorted(ends | {seq_length})]).tolist()


@st.composite
def ranges_of_row(draw, seq_length):
    """Pieces of a row in any order, with gaps; neighbours never continue each other."""
    cuts = sorted(draw(st.sets(st.integers(0, seq_length), min_size=2, max_size=6)))
    pieces = draw(st.permutations(list(pairwise(cuts))))
    kept = pieces[: draw(st.integers(1, len(pieces)))]
    return joined_ranges(kept, seq_length, "ranges")


@given(st.data())
@settings(deadline=None)
def test_every_tile_is_what_the_dense_mask_says(data):
    seq_length = data.draw(st.integers(1, 40))
    rows = data.draw(st.lists(lengths_of_row(seq_length), min_size=1, max_size=3))
    queries, keys = data.draw(ranges_of_row(seq_length)), data.draw(ranges_of_row(seq_length))
    tile = data.draw(st.tuples(st.integers(1, 12), st.integers(1, 12)))

    table = tile_table(mask_of(*rows), tile, queries, keys)

    seen = [dense(row, queries, keys) for row in rows]
    expected = np.array([tiles_of(square, queries, keys, tile) for square in seen])
    np.testing.assert_array_equal([table.grid(row) for row in range(len(rows))], expected)
    assert [table.empty, table.partial, table.full] == [(expected == kind).sum() for kind in (EMPTY, PARTIAL, FULL)]
    np.testing.assert_array_equal(table.tiles("partial"), np.argwhere(expected == PARTIAL))
    np.testing.assert_array_equal(table.tiles("full"), np.argwhere(expected == FULL))
    np.testing.assert_array_equal(table.visible_pairs, [square.sum() for square in seen])
    ordered = [table.first, table.full_first, table.full_stop, table.stop]
    assert all((low <= high).all() for low, high in pairwise(ordered))


def test_the_picture_in_a_users_head():
    # Documents of 3 and 5 tokens, tiles of 2: the second document starts in the middle of a tile.
    table = tile_table(mask_of([3, 5]), (2, 2))
    np.testing.assert_array_equal(
        table.grid(0),
        [
            [1, 0, 0, 0],
            [1, 1, 0, 0],
            [0, 1, 1, 0],
            [0, 1, 2, 1],
        ],
    )
    assert (table.full, table.partial, table.empty) == (1, 7, 8)
    np.testing.assert_array_equal(table.tiles("full"), [[0, 3, 2]])


def test_a_causal_row_has_a_triangle_of_full_tiles_and_a_partial_diagonal():
    table = tile_table(mask_of([1024]))
    assert (table.tile, table.full, table.partial, table.empty) == ((128, 128), 28, 8, 28)
    assert table.visible_pairs.tolist() == [1024 * 1025 // 2]


def test_edges_and_positions_place_a_tile_in_memory_and_in_the_row():
    table = tile_table(mask_of([12]), (2, 4), query_ranges=((8, 11), (0, 3)), key_ranges=((3, 8), (8, 9)))
    np.testing.assert_array_equal(table.query_edges, [0, 2, 3, 5, 6])
    np.testing.assert_array_equal(table.query_positions, [8, 10, 0, 2])
    # (3, 8) and (8, 9) continue each other: one range of 6 keys.
    np.testing.assert_array_equal(table.key_edges, [0, 4, 6])
    np.testing.assert_array_equal(table.key_positions, [3, 7])
    assert table.first.shape == (1, 4, 1)


def test_a_million_tokens_take_arrays_of_the_size_of_one_edge():
    table = tile_table(mask_of([1] * 7 + [2**20 - 7]))
    assert (table.query_tiles, table.first.size, table.full) == (8192, 8192, 8191 * 8190 // 2)
    rest = 2**20 - 7
    assert table.visible_pairs.tolist() == [7 + rest * (rest + 1) // 2]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"tile": (0, 4)}, r"tile\[0\] = 0 must be at least 1"),
        ({"tile": (4, -1)}, r"tile\[1\] = -1 must be at least 1"),
        ({"query_ranges": ()}, "query_ranges is empty"),
        ({"query_ranges": ((2, 2),)}, r"query_ranges = \(2, 2\) must be a piece of a row: .* seq_length = 8"),
        ({"key_ranges": ((0, 9),)}, r"key_ranges = \(0, 9\)"),
        ({"key_ranges": ((-1, 3),)}, r"\(-1, 3\)"),
        ({"key_ranges": ((4, 8), (0, 5))}, r"key_ranges: \(0, 5\) and \(4, 8\) overlap"),
    ],
)
def test_bad_arguments_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        tile_table(mask_of([8]), **arguments)


def test_a_range_of_fractions_is_a_type_error():
    with pytest.raises(TypeError):
        tile_table(mask_of([8]), query_ranges=((0, 4.0),))


def test_other_kinds_and_rows_are_named():
    table = tile_table(mask_of([8]))
    with pytest.raises(ValueError, match=r"no list of 'empty' tiles; use 'partial' or 'full'"):
        table.tiles("empty")
    with pytest.raises(ValueError, match="row 1 is outside the mask, which has one row, 0"):
        table.grid(1)
