"""Exact softmax attention under a compressed mask, tile by tile, and how partial results merge.

Dao, "FlashAttention-2", arXiv:2307.08691: softmax over blocks of keys, with the logarithm of each query's sum of
exponentials kept for the gradient. Tiles of queries visit only the keys they see, in blocks as wide as the cache
allows, and a mask touches only the columns that not all queries of the tile see. No square of scores exists at any
time. The gradient is in `attention_backward`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mask_compression.attention_tiles import Floats, Tile, checked_work
from mask_compression.mask import CompressedMask, Range

# Scores up to this size need no shift: exp(±30) and sums of a billion of them are far from the ends of float32, and
# a floating-point number is as precise there as near 1. Values that they multiply must not be huge for that.
_LARGEST_UNSHIFTED = 30.0
_LARGEST_VALUE = 1e12


def attention(
    q: Floats,
    k: Floats,
    v: Floats,
    mask: CompressedMask,
    *,
    scale: float | None = None,
    query_ranges: Sequence[Range] | None = None,
    key_ranges: Sequence[Range] | None = None,
) -> tuple[Floats, Floats]:
    """Softmax of `scale · q kᵀ` over the keys that each query sees, times `v`; with the logarithms of the sums.

    Query head h reads key/value head `h // (heads // kv_heads)`. A query that sees none of the keys gets out 0, lse
    -inf. Memory beside inputs and results grows with the tokens, not with their square.

    Args:
        q: (B, Sq, heads, D), float16, float32 or float64.
        k: (B, Sk, kv_heads, D), `heads` a multiple of `kv_heads`; the same dtype as q.
        v: (B, Sk, kv_heads, Dv), the same dtype.
        mask: B rows.
        scale: what scores are multiplied by; None is D**-0.5.
        query_ranges: which positions of its row the Sq queries are, as half-open ranges in the order in which they
            lie in memory; None is the whole row. Context-parallel ranks give what they hold.
        key_ranges: the same for the Sk keys.

    Returns:
        out: (B, Sq, heads, Dv) of q's dtype.
        lse: (B, Sq, heads), natural logarithm of the sum of exp(scale · q·k) over the keys seen; float64 for float64,
            otherwise float32, in which float16 is computed too.

    Raises:
        ValueError: shapes that do not fit each other, the mask or the ranges; ranges that are empty, overlap or
            leave the row.
        TypeError: dtypes that differ or are none of the three.
    """
    q, k, v = np.asarray(q), np.asarray(k), np.asarray(v)
    work = checked_work(q, k, v, mask, scale, query_ranges, key_ranges)
    out = np.zeros((*q.shape[:-1], v.shape[-1]), q.dtype)
    lse = np.full((*q.shape[:-1], 1), -np.inf, work.dtype)
    q, k, v = (x.astype(work.dtype, copy=False) for x in (q, k, v))
    scale_factor = work.dtype.type(work.scale)
    for row, kv_head, tiles in work.heads():
        k_sd, v_sd = k[row, :, kv_head], v[row, :, kv_head]
        longest_key = _longest(k_sd) if np.abs(v_sd).max(initial=0) <= _LARGEST_VALUE else np.inf
        for tile in tiles:
            q_rows = tile.take(q) * scale_factor
            bounded = longest_key * _longest(q_rows) <= _LARGEST_UNSHIFTED
            out_rows, lse_rows = _softmax_average(tile, q_rows, k_sd, v_sd, bounded=bounded)
            tile.put(out, out_rows)
            tile.put(lse, lse_rows)
    return out, lse[..., 0]


def merge(out: Floats, lse: Floats, other_out: Floats, other_lse: Floats) -> tuple[Floats, Floats]:
    """Attention of the same queries over two sets of keys, as if over both: what `attention` returns for the union.

    The sets must have no key in common. A part in which a query saw no key (lse -inf) changes nothing.

    Args:
        out, other_out: (B, Sq, heads, Dv).
        lse, other_lse: (B, Sq, heads) of one dtype.

    Returns:
        out and lse, of the same shapes and of lse's dtype; new arrays. So many float16 parts add up in float32, and
        who wants float16 rounds once, at the end.

    Raises ValueError for shapes that do not fit, TypeError for lse of two dtypes.
    """
    if out.shape != other_out.shape or lse.shape != other_lse.shape or lse.shape != out.shape[:-1]:
        raise ValueError(
            f"merge: out {out.shape} with lse {lse.shape} and out {other_out.shape} with lse {other_lse.shape} do not "
            "fit; both parts need the same queries: out (B, Sq, heads, Dv) and lse (B, Sq, heads)"
        )
    if lse.dtype != other_lse.dtype:
        raise TypeError(f"merge: lse of {lse.dtype} and of {other_lse.dtype}; use the same dtype in both parts")
    merged_lse = np.logaddexp(lse, other_lse)
    # exp(-inf - -inf) is no number; any finite shift makes weights of 0 where neither part saw a key.
    shift = np.where(np.isneginf(merged_lse), 0, merged_lse)
    merged = out * np.exp(lse - shift)[..., None]
    merged += other_out * np.exp(other_lse - shift)[..., None]
    return merged.astype(lse.dtype, copy=False), merged_lse


def _longest(rows: Floats) -> float:
    """The largest Euclidean length of a row."""
    return float(np.sqrt(np.einsum("ij,ij->i", rows, rows).max()))


def _softmax_average(tile: Tile, q_rows: Floats, k_sd: Floats, v_sd: Floats, *, bounded: bool) -> tuple[Floats, Floats]:
    """The tile's out, (rows, Dv), and lse, (rows, 1); `bounded`: no score needs a shift before its exponential."""
    rows, dtype = len(q_rows), q_rows.dtype
    weighted, sums = np.zeros((rows, v_sd.shape[1]), dtype), np.zeros((rows, 1), dtype)
    largest, shift = np.full((rows, 1), -np.inf, dtype), np.zeros((rows, 1), dtype)
    for block in tile.blocks:
        scores = block.scores(q_rows, k_sd)
        if not bounded:
            before = largest
            largest = np.maximum(before, scores.max(axis=1, keepdims=True))
            # Where no key was seen yet, any finite shift leaves weights of 0.
            shift = np.where(np.isneginf(largest), 0, largest)
            shrinking = np.exp(before - shift)
            sums *= shrinking
            weighted *= shrinking
            scores -= shift
        weights = np.exp(scores, out=scores)
        # A product with ones is several times faster than a sum along short rows.
        sums += np.matmul(weights, np.ones((weights.shape[1], 1), dtype))
        weighted += np.matmul(weights, v_sd[block.keys])
    sees_a_key = sums > 0
    weighted /= np.where(sees_a_key, sums, 1)
    lse = np.log(sums, out=np.full_like(sums, -np.inf), where=sees_a_key)
    lse += shift
    return weighted, lse
