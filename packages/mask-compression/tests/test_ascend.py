"""Ascend's attention arguments: the reference operator's numbers, and what a kernel of the documented meaning sees."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mask_compression import CompressedMask, SequenceShard, causal, from_ends, from_lengths
from mask_compression.ascend import (
    FlashAttentionArguments,
    batch_arguments,
    compressed_attn_mask,
    kernel_calls,
    packed_arguments,
)
from mask_oracle import Bools, batches, square

# HyperParallel (commit fdd0a808) run on a CPU: by (actual_seq_len, context_parallel) for each rank actual_seq_qlen,
# actual_seq_kvlen, and whether a kernel told so computes the rank's part of the mask.
PACKED: dict[tuple[tuple[int, ...], int], list[tuple[list[int], list[int], bool]]] = {
    ((16,), 2): [
        ([8], [16], False),
        ([8], [16], True),
    ],
    (
        (
            16,
            16,
        ),
        2,
    ): [
        ([8, 8], [8, 16], True),
        ([8, 8], [16, 16], True),
    ],
    (
        (
            3,
            16,
            16,
        ),
        4,
    ): [
        ([3, 4, 4], [3, 4, 16], True),
        ([0, 4, 4], [3, 8, 16], True),
        ([0, 4, 4], [3, 12, 16], True),
        ([0, 4, 4], [3, 16, 16], True),
    ],
    (
        (
            5,
            9,
            16,
            16,
            16,
        ),
        4,
    ): [
        ([4, 4, 4, 4, 4], [4, 4, 4, 4, 16], True),
        ([1, 4, 4, 4, 4], [5, 8, 8, 8, 16], True),
        ([0, 1, 4, 4, 4], [5, 9, 12, 12, 16], True),
        ([0, 0, 4, 4, 4], [5, 9, 16, 16, 16], True),
    ],
    (
        (
            5,
            9,
            16,
        ),
        2,
    ): [
        ([5, 8, 8], [5, 8, 16], True),
        ([0, 1, 8], [5, 9, 16], True),
    ],
    (
        (
            5,
            9,
            16,
        ),
        4,
    ): [
        ([4, 4, 4], [4, 4, 16], True),
        ([1, 4, 4], [5, 8, 16], True),
        ([0, 1, 4], [5, 9, 16], False),
        ([0, 0, 4], [5, 9, 16], True),
    ],
    (
        (
            4,
            8,
            12,
            16,
        ),
        4,
    ): [
        ([4, 4, 4, 4], [4, 4, 4, 16], True),
        ([0, 4, 4, 4], [4, 8, 8, 16], True),
        ([0, 0, 4, 4], [4, 8, 12, 16], True),
        ([0, 0, 0, 4], [4, 8, 12, 16], True),
    ],
    (
        (
            3,
            16,
        ),
        4,
    ): [
        ([3, 4], [3, 16], False),
        ([0, 4], [3, 16], False),
        ([0, 4], [3, 16], False),
        ([0, 4], [3, 16], True),
    ],
    (
        (
            7,
            8,
            31,
            32,
        ),
        8,
    ): [
        ([4, 4, 4, 4], [4, 4, 4, 32], True),
        ([3, 4, 4, 4], [7, 8, 8, 32], True),
        ([0, 0, 4, 4], [7, 8, 12, 32], True),
        ([0, 0, 4, 4], [7, 8, 16, 32], True),
        ([0, 0, 4, 4], [7, 8, 20, 32], True),
        ([0, 0, 4, 4], [7, 8, 24, 32], True),
        ([0, 0, 4, 4], [7, 8, 28, 32], True),
        ([0, 0, 3, 4], [7, 8, 31, 32], True),
    ],
    (
        (
            5,
            9,
            14,
        ),
        2,
    ): [
        ([5, 7, 7], [5, 7, 14], True),
        ([0, 2, 7], [5, 9, 14], True),
    ],
}

# The same for causal rows of one document, by (seq_length, context_parallel) for each rank: pre_tokens and next_tokens.
BAND: dict[tuple[int, int], list[tuple[int, int]]] = {
    (16, 2): [(24, -8), (16, 0)],
    (16, 4): [(28, -12), (24, -8), (20, -4), (16, 0)],
    (32, 8): [(60, -28), (56, -24), (52, -20), (48, -16), (44, -12), (40, -8), (36, -4), (32, 0)],
    (4096, 4): [(7168, -3072), (6144, -2048), (5120, -1024), (4096, 0)],
}


def packed_kernel(arguments: FlashAttentionArguments, queries: int, keys: int) -> Bools:
    """What layout TND and sparse_mode 3 are documented to see: causal at the lower right of each document."""
    assert arguments.sparse_mode == 3
    assert arguments.actual_seq_qlen is not None
    assert arguments.actual_seq_kvlen is not None
    assert (arguments.actual_seq_qlen[-1], arguments.actual_seq_kvlen[-1]) == (queries, keys)
    seen = np.zeros((queries, keys), np.bool_)
    q0 = k0 = 0
    for q1, k1 in zip(arguments.actual_seq_qlen, arguments.actual_seq_kvlen, strict=True):
        assert q1 >= q0
        assert k1 >= k0
        q, k = np.arange(q1 - q0)[:, None], np.arange(k1 - k0)
        seen[q0:q1, k0:k1] = k <= q + (k1 - k0) - (q1 - q0)
        q0, k0 = q1, k1
    return seen


def band_kernel(arguments: FlashAttentionArguments, queries: int, keys: int) -> Bools:
    """What sparse_mode 4 is documented to see: a band around the diagonal that ends in the lower right corner."""
    distance = np.arange(keys) - np.arange(queries)[:, None] - (keys - queries)
    return (-arguments.pre_tokens <= distance) & (distance <= arguments.next_tokens)


@pytest.mark.parametrize(("ends", "cp"), PACKED)
def test_packed_arguments_of_every_rank(ends: tuple[int, ...], cp: int) -> None:
    mask = from_ends(list(ends))
    # The reference's lists have a repeated total where their caller gave one; ours where a width asks for it.
    width = len(ends) if len(ends) > len(mask.ends) else None
    for rank, (qlen, kvlen, right) in enumerate(PACKED[ends, cp]):
        (piece,) = SequenceShard(mask.seq_length, cp, rank).ranges
        arguments = packed_arguments(mask, piece, width=width)
        total = mask.seq_length
        if right:
            assert (list(arguments.actual_seq_qlen or ()), list(arguments.actual_seq_kvlen or ())) == (qlen, kvlen)
        else:
            assert arguments.actual_seq_qlen == (*qlen, qlen[-1])
            assert arguments.actual_seq_kvlen == (*kvlen[:-1], piece[1], total)
        expected = square(mask.lengths.tolist())[slice(*piece)]
        np.testing.assert_array_equal(packed_kernel(arguments, total // cp, total), expected)


@pytest.mark.parametrize(("seq_length", "cp"), BAND)
def test_band_of_every_rank(seq_length: int, cp: int) -> None:
    mask = causal(seq_length)
    for rank, expected in enumerate(BAND[seq_length, cp]):
        (piece,) = SequenceShard(seq_length, cp, rank).ranges
        arguments = batch_arguments(mask, piece)
        assert (arguments.sparse_mode, arguments.pre_tokens, arguments.next_tokens) == (4, *expected)
        if seq_length <= 64:
            seen = band_kernel(arguments, seq_length // cp, seq_length)
            np.testing.assert_array_equal(seen, square([seq_length])[slice(*piece)])


@st.composite
def pieces(draw: st.DrawFn) -> tuple[list[list[int]], tuple[int, int]]:
    rows = draw(batches())
    start = draw(st.integers(0, sum(rows[0]) - 1))
    return rows, (start, draw(st.integers(start + 1, sum(rows[0]))))


def side_by_side(squares: list[Bools]) -> Bools:
    """The squares (or their parts) of several rows as one block-diagonal mask."""
    height, width = squares[0].shape
    joined = np.zeros((height * len(squares), width * len(squares)), np.bool_)
    for number, part in enumerate(squares):
        joined[number * height : (number + 1) * height, number * width : (number + 1) * width] = part
    return joined


@given(pieces(), st.integers(0, 3))
@settings(deadline=None)
def test_packed_pieces_of_every_row(case: tuple[list[list[int]], tuple[int, int]], spare: int) -> None:
    rows, piece = case
    mask = from_lengths(rows)
    expected = side_by_side([square(row)[slice(*piece)] for row in rows])
    arguments = packed_arguments(mask, piece)
    np.testing.assert_array_equal(packed_kernel(arguments, *expected.shape), expected)
    width = len(arguments.actual_seq_qlen or ()) + spare
    padded = packed_arguments(mask, piece, width=width)
    assert len(padded.actual_seq_qlen or ()) == len(padded.actual_seq_kvlen or ()) == width
    np.testing.assert_array_equal(packed_kernel(padded, *expected.shape), expected)


@given(st.integers(1, 24), st.data())
@settings(deadline=None)
def test_band_of_any_piece(size: int, data: st.DataObject) -> None:
    start = data.draw(st.integers(0, size - 1))
    piece = (start, data.draw(st.integers(start + 1, size)))
    arguments = batch_arguments(causal(size, rows=2), piece)
    np.testing.assert_array_equal(band_kernel(arguments, piece[1] - start, size), square([size])[slice(*piece)])


def test_whole_rows() -> None:
    mask = from_lengths([[3, 5], [8]])
    arguments = packed_arguments(mask)
    assert arguments.actual_seq_qlen == arguments.actual_seq_kvlen == (3, 8, 16)
    assert packed_arguments(mask, width=5).actual_seq_kvlen == (3, 8, 16, 16, 16)
    assert batch_arguments(causal(8)).sparse_mode == 3


def test_a_batch_cut_after_flattening_as_the_reference_does() -> None:
    mask = from_lengths([[3, 5], [8]]).flattened()
    arguments = packed_arguments(mask, (8, 16))
    assert arguments.actual_seq_qlen == (0, 0, 8)
    assert arguments.actual_seq_kvlen == (3, 8, 16)


def test_keywords_of_both_frameworks() -> None:
    arguments = packed_arguments(from_lengths([3, 5]), (4, 8))
    common = {"sparse_mode": 3, "actual_seq_qlen": (0, 4), "actual_seq_kvlen": (3, 8)}
    assert arguments.mindspore() == common | {"pre_tokens": 2**31 - 1, "next_tokens": 0}
    assert arguments.torch_npu() == common | {"pre_tockens": 2**31 - 1, "next_tockens": 0}


@given(pieces(), st.integers(0, 3))
@settings(deadline=None)
def test_merged_entries_see_the_same(case: tuple[list[list[int]], tuple[int, int]], spare: int) -> None:
    rows, piece = case
    expected = side_by_side([square(row)[slice(*piece)] for row in rows])
    whole = packed_arguments(from_lengths(rows), piece)
    merged = packed_arguments(from_lengths(rows), piece, width=len(whole.actual_seq_qlen or ()) + spare).merged()
    np.testing.assert_array_equal(packed_kernel(merged, *expected.shape), expected)
    queries, keys = (np.diff(ends or (), prepend=0) for ends in (merged.actual_seq_qlen, merged.actual_seq_kvlen))
    assert (keys > 0).all()
    assert ((queries[1:] > 0) | (queries[:-1] > 0)).all()


def test_arguments_without_lists_have_nothing_to_merge() -> None:
    arguments = batch_arguments(causal(8), (0, 4))
    assert arguments.merged() is arguments


def test_merged_entries_of_documents_before_and_behind_a_piece() -> None:
    mask = from_lengths([2, 1, 1, 4, 3, 3, 2])
    arguments = packed_arguments(mask, (6, 9))
    assert arguments.actual_seq_qlen == (0, 0, 0, 2, 3, 3, 3)
    assert arguments.actual_seq_kvlen == (2, 3, 4, 8, 9, 9, 16)
    merged = arguments.merged()
    assert (merged.actual_seq_qlen, merged.actual_seq_kvlen) == ((0, 2, 3, 3), (4, 8, 9, 16))


@pytest.mark.parametrize("lengths", [[16], [5, 4, 7]])
@pytest.mark.parametrize(
    ("queries", "expected"),
    [
        (None, [(0, 16)]),
        (((4, 8),), [(4, 8)]),
        (((2, 4), (12, 14)), [(2, 4), (12, 14)]),
        (((12, 14), (4, 6), (2, 4)), [(2, 6), (12, 14)]),
        (((0, 2), (14, 16), (2, 8), (8, 14)), [(0, 16)]),
    ],
)
def test_each_piece_of_the_queries_is_one_call(
    lengths: list[int], queries: tuple[tuple[int, int], ...] | None, expected: list[tuple[int, int]]
) -> None:
    mask = from_lengths([lengths] * 2)
    calls = kernel_calls(mask, queries)
    assert [call.queries for call in calls] == expected
    for call in calls:
        part = square(lengths)[slice(*call.queries)]
        if len(lengths) == 1:
            assert call.layout == "BSND"
            np.testing.assert_array_equal(band_kernel(call.arguments, *part.shape), part)
        else:
            assert call.layout == "TND"
            both = side_by_side([part, part])
            np.testing.assert_array_equal(packed_kernel(call.arguments, *both.shape), both)


def test_compressed_attn_mask_blocks_what_lies_above_the_diagonal() -> None:
    mask = compressed_attn_mask()
    assert (mask.shape, mask.dtype, mask.sum()) == ((2048, 2048), np.bool_, 2048 * 2047 // 2)
    assert mask[0, 1]
    assert not mask[1, 0]
    assert not mask[5, 5]


def test_refusals() -> None:
    mask: CompressedMask = from_lengths([3, 5])
    with pytest.raises(ValueError, match=r"2 documents in 1 rows: .*packed_arguments and layout TND"):
        batch_arguments(mask)
    with pytest.raises(ValueError, match=r"3 entries are needed, but width 2 .*at least 3"):
        packed_arguments(mask, (0, 4), width=2)
    with pytest.raises(ValueError, match="width = 0 must be at least 1"):
        packed_arguments(mask, width=0)
    with pytest.raises(ValueError, match=r"queries \(3, 6\) overlap those before, which end at 4"):
        kernel_calls(causal(8), ((3, 6), (0, 4)))
    with pytest.raises(ValueError, match=r"queries = \(4, 9\) must be a piece of a row"):
        kernel_calls(causal(8), ((4, 9),))
    for refuse in (packed_arguments, batch_arguments):
        with pytest.raises(ValueError, match=r"queries = \(4, 9\) must be a piece of a row: .* seq_length = 8"):
            refuse(causal(8), (4, 9))
