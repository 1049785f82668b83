"""Arguments of variable-length kernels: what a kernel that aligns at the lower right sees with them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mask_compression import SequenceShard, causal, from_lengths
from mask_compression.flash_attn import VarlenArguments, varlen_arguments
from mask_oracle import Bools, batches, square


def kernel(arguments: VarlenArguments, tokens: int) -> Bools:
    """bool (all queries given, B·S), which tokens of the flattened batch flash-attn >= 2.1 lets each query see."""
    queries = np.concatenate([np.arange(*piece) for piece in arguments.query_ranges])
    keys = np.concatenate([np.arange(*piece) for piece in arguments.key_ranges])
    assert (arguments.cu_seqlens_q[-1], arguments.cu_seqlens_k[-1]) == (len(queries), len(keys))
    lengths_q, lengths_k = np.diff(arguments.cu_seqlens_q), np.diff(arguments.cu_seqlens_k)
    assert (arguments.max_seqlen_q, arguments.max_seqlen_k) == (lengths_q.max(), lengths_k.max())
    seen = np.zeros((len(queries), tokens), np.bool_)
    for q0, k0, q_size, k_size in zip(
        arguments.cu_seqlens_q, arguments.cu_seqlens_k, lengths_q, lengths_k, strict=False
    ):
        aligned = np.arange(k_size) <= np.arange(q_size)[:, None] + k_size - q_size
        seen[q0 : q0 + q_size, keys[k0 : k0 + k_size]] = aligned
    return seen


@given(batches(), st.data())
@settings(deadline=None)
def test_any_piece_of_every_row(rows: list[list[int]], data: st.DataObject) -> None:
    mask, size = from_lengths(rows), sum(rows[0])
    start = data.draw(st.integers(0, size - 1))
    piece = (start, data.draw(st.integers(start + 1, size)))
    arguments = varlen_arguments(mask, piece)
    whole = square([length for row in rows for length in row])
    given_queries = np.concatenate([np.arange(*piece) + number * size for number in range(len(rows))])
    np.testing.assert_array_equal(kernel(arguments, mask.total_tokens), whole[given_queries])
    assert arguments.cu_seqlens_q.dtype == arguments.cu_seqlens_k.dtype == np.int32
    # Every key given is seen by some query: a rank need not fetch more.
    needed = np.flatnonzero(whole[given_queries].any(axis=0))
    assert np.concatenate([np.arange(*keys) for keys in arguments.key_ranges]).tolist() == needed.tolist()


def test_whole_rows() -> None:
    mask = from_lengths([[3, 5], [8]])
    arguments = varlen_arguments(mask)
    assert (
        arguments.cu_seqlens_q.tolist() == arguments.cu_seqlens_k.tolist() == mask.cu_seqlens.tolist() == [0, 3, 8, 16]
    )
    assert (arguments.max_seqlen_q, arguments.max_seqlen_k) == (8, 8)
    assert arguments.query_ranges == arguments.key_ranges == ((0, 8), (8, 16))


def test_a_document_that_crosses_the_cut() -> None:
    arguments = varlen_arguments(from_lengths([5, 7, 4]), SequenceShard(16, 2, 1).ranges[0])
    assert arguments.cu_seqlens_q.tolist() == [0, 4, 8]
    assert arguments.cu_seqlens_k.tolist() == [0, 7, 11]
    assert arguments.key_ranges == ((5, 16),)


def test_keywords() -> None:
    keywords = varlen_arguments(causal(4), (2, 4)).keywords(list)
    assert keywords == {
        "cu_seqlens_q": [0, 2],
        "cu_seqlens_k": [0, 4],
        "max_seqlen_q": 2,
        "max_seqlen_k": 4,
        "causal": True,
    }
    assert isinstance(varlen_arguments(causal(4)).keywords()["cu_seqlens_q"], np.ndarray)


def test_a_piece_outside_the_row() -> None:
    with pytest.raises(ValueError, match=r"queries = \(2, 5\) must be a piece of a row: .* seq_length = 4"):
        varlen_arguments(causal(4), (2, 5))
