"""Building masks: every source gives the documents that were meant, and what cannot be meant is refused."""

from __future__ import annotations

import tracemalloc
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from mask_compression import (
    CompressedMask,
    causal,
    from_cu_seqlens,
    from_ends,
    from_lengths,
    from_segment_ids,
    from_tokens,
)
from mask_oracle import batches, picture, square

# Tokens with EOD 0, and the lengths, positions and squares that they must give. The first six are PUB-MASK-01, a to f.
TOKEN_ROWS: dict[str, tuple[list[int], list[int], list[int], list[str]]] = {
    "in between": (
        [5, 6, 0, 7, 8, 9, 0, 4],
        [3, 4, 1],
        [0, 1, 2, 0, 1, 2, 3, 0],
        ["#.......", "##......", "###.....", "...#....", "...##...", "...###..", "...####.", ".......#"],
    ),
    "consecutive": (
        [5, 0, 0, 7, 0, 0, 0, 3],
        [2, 1, 2, 1, 1, 1],
        [0, 1, 0, 0, 1, 0, 0, 0],
        ["#.......", "##......", "..#.....", "...#....", "...##...", ".....#..", "......#.", ".......#"],
    ),
    "last": ([5, 6, 7, 0], [4], [0, 1, 2, 3], ["#...", "##..", "###.", "####"]),
    "none": ([5, 6, 7, 8], [4], [0, 1, 2, 3], ["#...", "##..", "###.", "####"]),
    "first": ([0, 5, 6, 7], [1, 3], [0, 0, 1, 2], ["#...", ".#..", ".##.", ".###"]),
    "in between and last": (
        [5, 6, 0, 7, 8, 0],
        [3, 3],
        [0, 1, 2, 0, 1, 2],
        ["#.....", "##....", "###...", "...#..", "...##.", "...###"],
    ),
    "only EOD": ([0, 0], [1, 1], [0, 0], ["#.", ".#"]),
    "one token": ([7], [1], [0], ["#"]),
    "padding after the last EOD": ([5, 0, 9, 9], [2, 2], [0, 1, 0, 1], ["#...", "##..", "..#.", "..##"]),
}


@pytest.mark.parametrize("case", TOKEN_ROWS)
def test_documents_of_tokens(case: str) -> None:
    tokens, lengths, positions, rows = TOKEN_ROWS[case]
    mask = from_tokens(tokens, eod=0)
    assert mask.lengths.tolist() == lengths
    assert mask.actual_seq_len.tolist() == np.cumsum(lengths).tolist()
    assert mask.position_ids().tolist() == [positions]
    np.testing.assert_array_equal(mask.dense()[0], picture(rows))
    np.testing.assert_array_equal(mask.dense(blocked=True)[0], ~picture(rows))


def test_a_document_longer_than_the_sequence_starts_anew_in_each_sample() -> None:
    stream = np.array([5, 0, 7, 8, 9, 4, 3, 0])
    mask = from_tokens(stream.reshape(2, 4), eod=0)
    assert mask.ends.tolist() == [2, 4, 8]
    assert mask.position_ids().tolist() == [[0, 1, 0, 1], [0, 1, 2, 3]]


def test_samples_of_a_micro_batch_keep_apart_and_counting_starts_anew_for_the_next() -> None:
    """PUB-MASK-02."""
    first, second = from_lengths([[3, 5], [8]]), from_lengths([[1, 7], [4, 4]])
    assert first.actual_seq_len.tolist() == [3, 8, 16]
    assert second.actual_seq_len.tolist() == [1, 8, 12, 16]
    for mask in (first, second):
        seen = mask.flattened().dense()[0, 8]
        assert np.flatnonzero(seen).tolist() == [8]


def test_large_inputs_of_every_integer_type_are_cut_alike() -> None:
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 100, (3, 70_001))
    expected = np.flatnonzero((tokens == 7).ravel() | (np.arange(tokens.size) % 70_001 == 70_000)) + 1
    for dtype in (np.int8, np.uint16, np.int32, np.uint64):
        assert from_tokens(tokens.astype(dtype), eod=7).ends.tolist() == expected.tolist()
    assert from_tokens(tokens.astype(np.uint8), eod=300).lengths.tolist() == [70_001] * 3


@given(batches())
@settings(deadline=None)
def test_all_sources_give_the_same_mask(rows: list[list[int]]) -> None:
    size, count = sum(rows[0]), len(rows)
    ends = [np.cumsum(row).tolist() for row in rows]
    flat = [end + number * size for number, row in enumerate(ends) for end in row]
    padded = [row + [size] * (30 - len(row)) for row in ends]
    # In the reference's batches every row keeps its padding, shifted.
    padded_flat = [end + number * size for number, row in enumerate(padded) for end in row]
    ids = [[7 * number for number, length in enumerate(row) for _ in range(length)] for row in rows]
    tokens = [[t for length in row for t in [9] * (length - 1) + [2]] for row in rows]
    expected = np.stack([square(row) for row in rows])
    masks = [
        from_lengths(rows),
        from_lengths(rows, seq_length=size),
        from_ends(ends),
        from_ends(flat, seq_length=size),
        from_ends(np.array(padded)),
        from_ends(padded_flat, seq_length=size),
        from_cu_seqlens([0, *flat], seq_length=size),
        from_segment_ids(ids),
        from_tokens(tokens, eod=2),
        CompressedMask(count, size, np.array(flat)),
    ]
    for mask in masks:
        assert (mask.rows, mask.seq_length) == (count, size)
        assert mask == masks[0]
        assert hash(mask) == hash(masks[0])
    np.testing.assert_array_equal(masks[0].dense(), expected)


def test_a_million_tokens_take_little_beyond_themselves() -> None:
    tokens = np.ones(2**20, np.int32)
    tokens[1023::1024] = 0
    tracemalloc.start()
    try:
        mask = from_tokens(tokens, eod=0)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert mask.lengths.tolist() == [1024] * 1024
    assert peak_bytes < 300_000


def test_plain_causal() -> None:
    mask = causal(4, rows=2)
    np.testing.assert_array_equal(mask.dense(), np.tril(np.ones((2, 4, 4), bool)))
    assert mask.ends.tolist() == [4, 8]
    assert causal(2**30).visible_pairs == 2**59 + 2**29


def test_documents_without_tokens_change_nothing() -> None:
    """PUB-MASK-01, row g."""
    expected = np.array(square([2, 2, 2, 2]))
    for mask in (
        from_lengths([2, 2, 0, 2, 2], allow_empty=True),
        from_ends([2, 4, 4, 6, 8], allow_empty=True),
        from_cu_seqlens([0, 0, 2, 4, 4, 6, 8], allow_empty=True),
        from_ends([2, 4, 6, 8, 8, 8]),
    ):
        assert mask.ends.tolist() == [2, 4, 6, 8]
        np.testing.assert_array_equal(mask.dense()[0], expected)


def test_the_caller_cannot_change_a_mask_afterwards() -> None:
    ends = np.array([2, 4])
    mask = CompressedMask(1, 4, ends)
    ends[0] = 1
    assert mask.ends.tolist() == [2, 4]
    with pytest.raises(ValueError, match="read-only"):
        mask.ends[0] = 1


def test_masks_with_other_contents_differ() -> None:
    masks = [from_lengths([2, 2]), from_lengths([1, 3]), causal(4), causal(2, rows=2), causal(4, rows=2)]
    assert len(set(masks)) == 5
    assert masks[0] != "mask"


BAD: dict[str, tuple[Any, str]] = {
    "sum too small": (
        lambda: from_lengths([3, 4], seq_length=8),
        r"add up to 7, not to seq_length = 8.*add a document of length 1\.",
    ),
    "sum too large": (lambda: from_lengths([3, 6], seq_length=8), r"add up to 9, not to seq_length = 8$"),
    "rows differ": (
        lambda: from_lengths([[3, 5], [3, 4]]),
        r"lengths\[1\] add up to 7, not to the sum of lengths\[0\] = 8",
    ),
    "empty document": (lambda: from_lengths([2, 2, 0, 2, 2]), r"lengths\[2\] = 0 .*Leave it out; the mask is the same"),
    "empty in row": (lambda: from_lengths([[4], [4, 0]]), r"lengths\[1\]\[1\] = 0"),
    "negative length": (lambda: from_lengths([2, -1]), r"lengths\[1\] = -1 must not be negative"),
    "only empty": (lambda: from_lengths([0, 0], allow_empty=True), r"seq_length = 0 must be at least 1"),
    "no lengths": (lambda: from_lengths([]), r"lengths must not be empty"),
    "no rows": (lambda: from_lengths([[4], []]), r"lengths must not be empty"),
    "3-d lengths": (lambda: from_lengths(np.ones((1, 1, 1), int)), r"one list of integers, or one list for each row"),
    "zero length": (lambda: from_lengths([1], seq_length=0), r"seq_length = 0 must be at least 1"),
    "ends go back": (lambda: from_ends([3, 2, 8]), r"ends\[1\] = 2 after 3: ends must never decrease"),
    "negative end": (lambda: from_ends([-1, 8]), r"ends\[0\] = -1 after 0"),
    "repeated end": (lambda: from_ends([2, 4, 4, 8]), r"ends\[2\] = 4 repeats .*leave it out; the mask is the same"),
    "repeated end in row": (lambda: from_ends([[4, 8], [4, 4, 8]]), r"ends\[1\]\[1\] = 4 repeats"),
    "starts with 0": (lambda: from_ends([0, 3, 8]), r"ends\[0\] = 0 .*from_cu_seqlens"),
    "zero total": (lambda: from_ends([0, 0]), r"ends\[0\] = 0"),
    "ends too short": (
        lambda: from_ends([3, 7], seq_length=8),
        r"last of ends is 7, .*multiples of 8.*add a document of length 1\.",
    ),
    "ends too long": (lambda: from_ends([3, 9], seq_length=8), r"last of ends is 9, .*multiples of 8$"),
    "row end lacks": (lambda: from_ends([3, 12, 16], seq_length=8), r"lacks 8, the end of row 0"),
    "row too short": (lambda: from_ends([[8], [3]]), r"ends\[1\] ends at 3, but the last end of ends\[0\] is 8"),
    "row too long": (lambda: from_ends([[8], [3, 9]], seq_length=8), r"ends\[1\] ends at 9, but seq_length is 8"),
    "no leading 0": (lambda: from_cu_seqlens([3, 8]), r"a 0 followed by ends, not \[3, 8\].*from_ends"),
    "0 alone": (lambda: from_cu_seqlens([0]), r"a 0 followed by ends, not \[0\]"),
    "cu of rows": (lambda: from_cu_seqlens([[0, 4], [0, 4]]), r"must be one list"),
    "id returns": (lambda: from_segment_ids([[1, 1, 1], [1, 2, 1]]), r"id 1 comes back at position 2 of row 1"),
    "3-d ids": (lambda: from_segment_ids(np.zeros((1, 1, 1), int)), r"\(S,\) or \(B, S\)"),
    "no ids": (lambda: from_segment_ids([]), r"and tokens, not \(0,\)"),
    "ragged ids": (lambda: from_segment_ids([[1], [1, 2]]), r"rows of one length"),
    "no tokens": (lambda: from_tokens([], eod=0), r"there are no tokens \(shape \(0,\)\)"),
    "3-d tokens": (lambda: from_tokens(np.zeros((1, 1, 1), int), eod=0), r"not \(1, 1, 1\)"),
    "negative eod": (lambda: from_tokens([1], eod=-1), r"eod = -1 must be at least 0"),
    "no size": (lambda: causal(0), r"seq_length = 0 must be at least 1"),
    "negative rows": (lambda: causal(4, rows=-1), r"rows = -1 must be at least 1"),
    "ends beyond": (lambda: CompressedMask(1, 4, np.array([4, 5])), r"last end 5 lies beyond 1 rows of seq_length 4"),
    "ends missing": (lambda: CompressedMask(1, 4, np.array([], int)), r"ends is empty"),
    "ends 2-d": (lambda: CompressedMask(1, 4, np.array([[4]])), r"1 dimension, but it has 2"),
    "ends equal": (lambda: CompressedMask(1, 4, np.array([2, 2, 4])), r"ends\[1\] = 2 after 2: .*strictly increasing"),
    "ends of one row": (lambda: CompressedMask(2, 4, np.array([4])), r"lacks 8, the end of row 1"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_values(case: str) -> None:
    build, message = BAD[case]
    with pytest.raises(ValueError, match=message):
        build()


WRONG_TYPES: dict[str, tuple[Any, str]] = {
    "bool tokens": (lambda: from_tokens([True, False], eod=0), r"tokens must hold integers, but its dtype is bool"),
    "float tokens": (lambda: from_tokens([1.0], eod=0), r"tokens must hold integers, but its dtype is float64"),
    "text": (lambda: from_tokens(["a"], eod=0), r"tokens must hold integers"),
    "bool eod": (lambda: from_tokens([1], eod=True), r"eod must be a whole number, not True"),
    "float eod": (lambda: from_tokens([1], eod=1.5), r"eod must be a whole number, not 1.5"),  # type: ignore[arg-type]
    "float lengths": (lambda: from_lengths([1.5, 2.5]), r"lengths must hold integers"),
    "bool ends": (lambda: from_ends([True]), r"ends must hold integers"),
    "bool ids": (lambda: from_segment_ids([True, False]), r"segment_ids must hold integers"),
    "float size": (lambda: causal(4.0), r"seq_length must be a whole number, not 4.0"),  # type: ignore[arg-type]
    "bool size": (lambda: causal(True), r"seq_length must be a whole number, not True"),
}


@pytest.mark.parametrize("case", WRONG_TYPES)
def test_wrong_types(case: str) -> None:
    build, message = WRONG_TYPES[case]
    with pytest.raises(TypeError, match=message):
        build()
