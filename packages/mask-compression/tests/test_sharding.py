"""Sharding a mask for context parallelism: what a rank holds, which keys it needs, how much work it has."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mask_compression import (
    Order,
    SequenceShard,
    causal,
    from_lengths,
    imbalance,
    key_ranges,
    remote_key_ranges,
    segment_lengths,
    visible_pairs,
    work_per_rank,
)
from mask_oracle import batches, square

ORDERS: tuple[Order, ...] = ("contiguous", "zigzag")


def listed(ranges: Any) -> list[int]:
    return [position for start, stop in ranges for position in range(start, stop)]


def test_a_document_that_crosses_the_cut() -> None:
    """PUB-CP-02; that ranks' outputs joined are those of one device, `test_attention.py` shows."""
    mask = from_lengths([5, 7, 4])
    ranks = [SequenceShard(16, 2, rank) for rank in (0, 1)]
    assert [rank.ranges for rank in ranks] == [((0, 8),), ((8, 16),)]
    positions = [rank.take(mask.position_ids())[0].tolist() for rank in ranks]
    assert positions == [[0, 1, 2, 3, 4, 0, 1, 2], [3, 4, 5, 6, 0, 1, 2, 3]]
    assert [segment_lengths(mask, rank, 0).tolist() for rank in ranks] == [[5, 3], [4, 4]]
    assert [remote_key_ranges(mask, rank, 0) for rank in ranks] == [(), ((5, 8),)]
    starts = [rank.take(mask.document_starts())[0] for rank in ranks]
    visible = [np.stack((start, rank.positions), axis=1).tolist() for start, rank in zip(starts, ranks, strict=True)]
    assert visible[0] == [[0, 0], [0, 1], [0, 2], [0, 3], [0, 4], [5, 5], [5, 6], [5, 7]]
    assert visible[1] == [[5, 8], [5, 9], [5, 10], [5, 11], [12, 12], [12, 13], [12, 14], [12, 15]]


@pytest.mark.parametrize(("size", "tokens"), [(4096, 1024), (12, 3)])
def test_a_length_that_is_cut_evenly(size: int, tokens: int) -> None:
    """PUB-CP-01, rows d and e."""
    assert [SequenceShard(size, 4, rank).tokens for rank in range(4)] == [tokens] * 4


def test_zigzag_pieces() -> None:
    assert [SequenceShard(16, 2, rank, "zigzag").ranges for rank in (0, 1)] == [((0, 4), (12, 16)), ((4, 8), (8, 12))]
    assert SequenceShard(16, 2, 0, "zigzag").positions.tolist() == [0, 1, 2, 3, 12, 13, 14, 15]
    assert SequenceShard(16, 2, 0, "zigzag").take(np.arange(16), axis=0).tolist() == [0, 1, 2, 3, 12, 13, 14, 15]


@given(batches(multiple=4), st.sampled_from([1, 2]), st.sampled_from(ORDERS))
@settings(deadline=None)
def test_ranks_share_all_positions_and_need_what_their_queries_see(
    rows: list[list[int]], cp: int, order: Order
) -> None:
    mask = from_lengths(rows)
    dense = [square(row) for row in rows]
    shards = [SequenceShard(mask.seq_length, cp, rank, order) for rank in range(cp)]
    assert sorted(position for shard in shards for position in listed(shard.ranges)) == list(range(mask.seq_length))
    pairs = []
    for shard in shards:
        held = shard.positions.tolist()
        assert len(held) == shard.tokens == mask.seq_length // cp
        pairs.append(sum(int(seen[held].sum()) for seen in dense))
        for row, seen in enumerate(dense):
            needed = np.flatnonzero(seen[held].any(axis=0)).tolist()
            assert listed(key_ranges(mask, shard.ranges, row)) == needed
            assert listed(remote_key_ranges(mask, shard, row)) == [key for key in needed if key not in held]
            ids = np.repeat(np.arange(len(rows[row])), rows[row])[held]
            pieces = [
                ids[at : at + len(held) // len(shard.ranges)]
                for at in range(0, len(held), len(held) // len(shard.ranges))
            ]
            runs = [np.count_nonzero(piece == value) for piece in pieces for value in dict.fromkeys(piece.tolist())]
            assert segment_lengths(mask, shard, row).tolist() == runs
    assert work_per_rank(mask, cp, order).tolist() == pairs
    assert imbalance(mask, cp, order) == pytest.approx(max(pairs) / np.mean(pairs), rel=1e-15)


@pytest.mark.parametrize("cp", [1, 2, 4, 8, 64])
def test_plain_causal_balance_in_closed_form(cp: int) -> None:
    size = 2**20
    piece = size // cp
    last = size * (size + 1) // 2 - (size - piece) * (size - piece + 1) // 2
    assert work_per_rank(causal(size), cp)[-1] == last
    assert imbalance(causal(size), cp) == pytest.approx(2 - 1 / cp, abs=2e-6)
    assert imbalance(causal(size), cp, "zigzag") == pytest.approx(1, abs=1e-12)


def test_slowest_rank_at_cp_8() -> None:
    assert f"{imbalance(causal(2**17), 8):.3f}" == "1.875"


def test_packed_documents_can_be_unbalanced_in_zigzag_order_too() -> None:
    # Ranks hold (0-1, 6-7) and (2-5): documents of 4 tokens in the middle, single ones outside.
    mask = from_lengths([1, 1, 4, 1, 1])
    assert work_per_rank(mask, 2, "zigzag").tolist() == [4, 10]
    assert visible_pairs(mask, [(2, 6)]) == 10


@pytest.mark.parametrize(
    ("size", "cp", "order", "parts"),
    [
        # PUB-CP-01, rows a, b and c, and row e in zigzag order.
        (2999, 4, "contiguous", ["seq_length 2999", "context_parallel 4", "2996 or 3000"]),
        (7, 2, "contiguous", ["seq_length 7", "context_parallel 2", "6 or 8"]),
        (4098, 4, "contiguous", ["seq_length 4098", "context_parallel 4", "4096 or 4100"]),
        (12, 4, "zigzag", ["seq_length 12", "2 · context_parallel 4 = 8", "8 or 16"]),
        (3, 4, "contiguous", ["seq_length 3", "Use seq_length 4."]),
    ],
)
def test_a_length_that_cannot_be_cut(size: int, cp: int, order: Order, parts: list[str]) -> None:
    for attempt in (lambda: SequenceShard(size, cp, 0, order), lambda: work_per_rank(causal(size), cp, order)):
        with pytest.raises(ValueError, match="cannot be cut") as caught:
            attempt()
        assert all(part in str(caught.value) for part in parts), caught.value


def test_lengths_that_can_be_cut() -> None:
    assert [SequenceShard(4096, 4, rank).tokens for rank in range(4)] == [1024] * 4
    assert [SequenceShard(12, 4, rank).tokens for rank in range(4)] == [3] * 4


@pytest.mark.parametrize(
    ("attempt", "message"),
    [
        (lambda: SequenceShard(8, 2, 2), r"rank 2 is outside context_parallel 2: ranks go from 0 to 1"),
        (lambda: SequenceShard(8, 2, -1), r"rank = -1 must be at least 0"),
        (lambda: SequenceShard(8, 0, 0), r"context_parallel = 0 must be at least 1"),
        (lambda: SequenceShard(0, 1, 0), r"seq_length = 0 must be at least 1"),
        (lambda: SequenceShard(8, 2, 0, "zig"), r"order 'zig' is unknown: use 'contiguous' or 'zigzag'"),
        (lambda: SequenceShard(8, 2, 0).take(np.zeros((1, 9))), r"dimension 1 has length 9, but seq_length is 8"),
        (lambda: remote_key_ranges(causal(8), SequenceShard(16, 2, 0), 0), r"seq_length 16 is not the mask's .* 8"),
        (lambda: segment_lengths(causal(8), SequenceShard(8, 2, 0), 1), r"row 1 is outside the mask"),
        (lambda: key_ranges(causal(8), [(0, 9)], 0), r"\(0, 9\) must be a piece of a row: .* seq_length = 8"),
        (lambda: key_ranges(causal(8), [(4, 4)], 0), r"\(4, 4\) must be a piece"),
        (lambda: visible_pairs(causal(8), [(0, 9)]), r"\(0, 9\)"),
    ],
)
def test_bad_values(attempt: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        attempt()


def test_a_piece_must_be_a_pair() -> None:
    with pytest.raises(TypeError, match=r"pair of whole numbers \(start, stop\), not 3"):
        key_ranges(causal(8), [3], 0)  # type: ignore[list-item]
