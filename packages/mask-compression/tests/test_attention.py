"""Attention, its gradient and merging against dense attention in float64, written here over the whole square."""

from __future__ import annotations

from itertools import pairwise
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mask_compression import attention_tiles
from mask_compression.attention import attention, merge
from mask_compression.attention_backward import attention_backward
from mask_compression.mask import CompressedMask
from mask_compression.sharding import SequenceShard


def random_lengths(seq_length, documents, seed):
    cuts = np.random.default_rng(seed).choice(np.arange(1, seq_length), documents - 1, replace=False)
    return np.diff([0, *sorted(cuts), seq_length]).tolist()


# Name: document lengths of every row.
DOCUMENTS = {
    "plain 64": [[64]],
    "plain 513": [[513]],
    "plain 1024": [[1024]],
    "many documents": [random_lengths(700, 40, seed=1)],
    "a long document, then short ones": [[600, *[5] * 20]],
    "documents of one token": [[1] * 100],
    "rows of different documents": [[200], random_lengths(200, 9, seed=2), [1] * 199 + [1], [199, 1]],
}
TOLERANCES = {np.float64: {"rtol": 1e-12, "atol": 1e-12}, np.float32: {"rtol": 1e-5, "atol": 1e-5}}


def mask_of(rows):
    return CompressedMask(len(rows), sum(rows[0]), np.cumsum([length for row in rows for length in row]))


def positions_of(ranges):
    return np.concatenate([np.arange(*piece) for piece in ranges])


def inputs(batch, queries, keys, heads, kv_heads, dim, value_dim, dtype=np.float64, seed=0):
    """q, k, v, d_out."""
    shapes = (queries, heads, dim), (keys, kv_heads, dim), (keys, kv_heads, value_dim), (queries, heads, value_dim)
    generator = np.random.default_rng(seed)
    return [generator.standard_normal((batch, *shape)).astype(dtype) for shape in shapes]


def dense(q, k, v, d_out, rows, scale, queries=None, keys=None):
    """out, lse, dq, dk, dv by the textbook, in float64; queries, keys: their positions, None for all."""
    q, k, v, d_out = (x.astype(np.float64) for x in (q, k, v, d_out))
    group, kv_shape = q.shape[2] // k.shape[2], k.shape[:3]
    k, v = np.repeat(k, group, axis=2), np.repeat(v, group, axis=2)
    queries = np.arange(q.shape[1]) if queries is None else queries
    keys = np.arange(k.shape[1]) if keys is None else keys
    documents = np.stack([np.repeat(np.arange(len(row)), row) for row in rows])
    seen = (documents[:, queries, None] == documents[:, None, keys]) & (queries[:, None] >= keys)

    scores = np.where(seen[:, None], scale * np.einsum("bqhd,bkhd->bhqk", q, k), -np.inf)
    largest = np.maximum(scores.max(axis=-1, keepdims=True), np.finfo(np.float64).min)
    exponentials = np.exp(scores - largest)
    sums = exponentials.sum(axis=-1, keepdims=True)
    weights = exponentials / np.where(sums, sums, 1)
    out = np.einsum("bhqk,bkhd->bqhd", weights, v)
    with np.errstate(divide="ignore"):
        lse = (np.log(sums) + largest)[..., 0].transpose(0, 2, 1)

    d_weights = np.einsum("bqhd,bkhd->bhqk", d_out, v)
    d_scores = scale * weights * (d_weights - (d_weights * weights).sum(axis=-1, keepdims=True))
    dq = np.einsum("bhqk,bkhd->bqhd", d_scores, k)
    dk, dv = np.einsum("bhqk,bqhd->bkhd", d_scores, q), np.einsum("bhqk,bqhd->bkhd", weights, d_out)
    return out, lse, dq, *(x.reshape(*kv_shape, group, -1).sum(axis=3) for x in (dk, dv))


def assert_near(ours, expected, dtype):
    for name, mine, right in zip(("out", "lse", "dq", "dk", "dv"), ours, expected, strict=True):
        assert (mine.dtype, mine.shape) == (dtype, right.shape), name
        # Gradients of keys are sums over all queries: their rounding is measured by their largest element.
        tolerance = TOLERANCES[dtype]
        size = max(1, np.abs(right[np.isfinite(right)]).max(initial=0))
        np.testing.assert_allclose(mine, right, tolerance["rtol"], tolerance["atol"] * size, err_msg=name)


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 2), (2, 1), (8, 2)])
@pytest.mark.parametrize("documents", DOCUMENTS)
def test_values_and_gradients_are_those_of_dense_attention(documents, heads, kv_heads, dtype):
    rows = DOCUMENTS[documents]
    size = sum(rows[0])
    q, k, v, d_out = inputs(len(rows), size, size, heads, kv_heads, 16, 8, dtype)
    mask = mask_of(rows)
    out, lse = attention(q, k, v, mask)
    gradients = attention_backward(d_out, q, k, v, out, lse, mask)
    assert_near((out, lse, *gradients), dense(q, k, v, d_out, rows, scale=0.25), dtype)


def ring(q, k, v, d_out, mask, shards, **options):
    """Context parallelism without ranks: each shard's queries meet every shard's keys, one block after the other."""
    results = [np.full_like(x, np.nan) for x in (d_out, d_out[..., 0], q)]
    dk, dv = np.zeros_like(k), np.zeros_like(v)
    for shard in shards:
        mine = shard.positions
        merged = None
        for other in shards:
            blocks = {"query_ranges": shard.ranges, "key_ranges": other.ranges, **options}
            part = attention(q[:, mine], k[:, other.positions], v[:, other.positions], mask, **blocks)
            merged = part if merged is None else merge(*merged, *part)
        dq = 0
        for other in shards:
            blocks = {"query_ranges": shard.ranges, "key_ranges": other.ranges, **options}
            theirs = k[:, other.positions], v[:, other.positions]
            terms = attention_backward(d_out[:, mine], q[:, mine], *theirs, *merged, mask, **blocks)
            dq = dq + terms[0]
            dk[:, other.positions] += terms[1]
            dv[:, other.positions] += terms[2]
        for result, part in zip(results, (*merged, dq), strict=True):
            result[:, mine] = part
    return *results, dk, dv


@pytest.mark.parametrize("order", ["contiguous", "zigzag"])
@pytest.mark.parametrize("cp", range(1, 9))
def test_pieces_of_context_parallel_ranks_merge_to_the_whole(cp, order):
    size = 26 * cp
    rows = [[size], random_lengths(size, 5, seed=cp)]
    q, k, v, d_out = inputs(2, size, size, 4, 2, 8, 8)
    shards = [SequenceShard(size, cp, rank, order) for rank in range(cp)]
    assert_near(ring(q, k, v, d_out, mask_of(rows), shards), dense(q, k, v, d_out, rows, 8**-0.5), np.float64)


def test_a_document_that_crosses_the_cut_is_attended_as_on_one_device():
    """PUB-CP-02: rank 1 needs keys 5 to 7 of rank 0 beside its own, and no others."""
    q, k, v, d_out = inputs(1, 16, 16, 2, 2, 8, 8)
    whole, _, *_ = dense(q, k, v, d_out, [[5, 7, 4]], 8**-0.5)
    for queries, keys in (((0, 8), (0, 8)), ((8, 16), (5, 16))):
        part, held = slice(*queries), slice(*keys)
        ranges = {"query_ranges": [queries], "key_ranges": [keys]}
        out, _ = attention(q[:, part], k[:, held], v[:, held], mask_of([[5, 7, 4]]), **ranges)
        np.testing.assert_allclose(out, whole[:, part], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
def test_a_ring_of_large_pieces_in_both_precisions(dtype):
    rows = [random_lengths(1024, 6, seed=3)]
    q, k, v, d_out = inputs(1, 1024, 1024, 4, 1, 16, 16, dtype)
    shards = [SequenceShard(1024, 2, rank, "zigzag") for rank in range(2)]
    # Scores up to about 100: both without and with a shift.
    assert_near(ring(q, k, v, d_out, mask_of(rows), shards, scale=2), dense(q, k, v, d_out, rows, 2), dtype)


def test_keys_gathered_in_the_order_of_zigzag_ranks_need_no_sorting():
    rows = [[300, 20, 192]]
    shards = [SequenceShard(512, 4, rank, "zigzag") for rank in range(4)]
    gathered = tuple(piece for shard in shards for piece in shard.ranges)
    queries, keys = shards[1].positions, positions_of(gathered)
    q, k, v, d_out = inputs(1, len(queries), 512, 2, 1, 8, 8)
    ranges = {"query_ranges": shards[1].ranges, "key_ranges": gathered}
    out, lse = attention(q, k, v, mask_of(rows), **ranges)
    gradients = attention_backward(d_out, q, k, v, out, lse, mask_of(rows), **ranges)
    assert_near((out, lse, *gradients), dense(q, k, v, d_out, rows, 8**-0.5, queries, keys), np.float64)


@st.composite
def pieces(draw, seq_length):
    """Some pieces of a row in any order, with gaps."""
    cuts = sorted(draw(st.sets(st.integers(0, seq_length), min_size=2, max_size=5)))
    every = draw(st.permutations(list(pairwise(cuts))))
    return tuple(every[: draw(st.integers(1, len(every)))])


@given(st.data())
@settings(deadline=None)
def test_any_documents_ranges_and_sizes(data):
    size = data.draw(st.integers(1, 40))
    ends = st.sets(st.integers(1, size)).map(lambda some: np.diff([0, *sorted({*some, size})]).tolist())
    rows = data.draw(st.lists(ends, min_size=1, max_size=2))
    ranges = {"query_ranges": data.draw(pieces(size)), "key_ranges": data.draw(pieces(size))}
    queries, keys = map(positions_of, ranges.values())
    kv_heads, group, dim, value_dim = (data.draw(st.integers(1, 3)) for _ in range(4))
    scale = data.draw(st.sampled_from([0.3, 1.0, 100.0]))
    sizes = {"_TILE_ROWS": data.draw(st.integers(1, 20)), "_BLOCK_KEYS": data.draw(st.integers(1, 20))}
    q, k, v, d_out = inputs(len(rows), len(queries), len(keys), kv_heads * group, kv_heads, dim, value_dim)
    with patch.multiple(attention_tiles, **sizes):
        out, lse = attention(q, k, v, mask_of(rows), scale=scale, **ranges)
        gradients = attention_backward(d_out, q, k, v, out, lse, mask_of(rows), scale=scale, **ranges)
    expected = dense(q, k, v, d_out, rows, scale, queries, keys)
    for mine, right in zip((out, lse, *gradients), expected, strict=True):
        np.testing.assert_allclose(mine, right, rtol=1e-10, atol=1e-10)


def test_gradients_are_those_of_central_differences():
    arrays = inputs(2, 7, 7, 4, 2, 3, 2)
    d_out = arrays.pop()
    mask = mask_of([[3, 4], [7]])
    gradients = attention_backward(d_out, *arrays, *attention(*arrays, mask, scale=0.7), mask, scale=0.7)
    step = 1e-5
    for number, gradient in enumerate(gradients):
        differences = np.empty_like(gradient)
        for place in np.ndindex(gradient.shape):
            sides = []
            for sign in (1, -1):
                moved = [array.copy() for array in arrays]
                moved[number][place] += sign * step
                sides.append((attention(*moved, mask, scale=0.7)[0] * d_out).sum())
            differences[place] = (sides[0] - sides[1]) / (2 * step)
        np.testing.assert_allclose(gradient, differences, rtol=1e-6, atol=1e-8)
