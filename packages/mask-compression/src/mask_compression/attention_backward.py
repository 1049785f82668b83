"""The gradient of attention under a compressed mask, tile by tile; weights are computed again from the kept logarithms.

Dao, "FlashAttention-2", arXiv:2307.08691, algorithm 2. With P the softmax weights, dP = dO Vᵀ and δ the row sums of
dO ∘ O: dV = Pᵀ dO, dS = P ∘ (dP - δ), dQ = scale · dS K, dK = scale · dSᵀ Q.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from mask_compression.attention_tiles import Floats, Tile, checked_work
from mask_compression.mask import CompressedMask, Range


def attention_backward(
    d_out: Floats,
    q: Floats,
    k: Floats,
    v: Floats,
    out: Floats,
    lse: Floats,
    mask: CompressedMask,
    *,
    scale: float | None = None,
    query_ranges: Sequence[Range] | None = None,
    key_ranges: Sequence[Range] | None = None,
) -> tuple[Floats, Floats, Floats]:
    """Gradients of `sum(d_out * out)` by q, k and v, for the keys that are given.

    Queries and keys may be a part of the whole, as long as `out` and `lse` are merged over all keys. A call then gives
    this part's terms of the gradients; over all parts they add up to the whole gradients.

    Args:
        d_out: (B, Sq, heads, Dv), gradient of `out`.
        q, k, v, mask, scale, query_ranges, key_ranges: as for `attention`.
        out: (B, Sq, heads, Dv), the final output.
        lse: (B, Sq, heads), the final logarithms.

    Returns:
        dq, dk, dv: of the shapes and dtypes of q, k and v; float16 is computed and summed in float32.

    Raises:
        ValueError, TypeError: as `attention`; and for d_out, out or lse of another shape or dtype.
    """
    q, k, v, d_out, out, lse = (np.asarray(x) for x in (q, k, v, d_out, out, lse))
    work = checked_work(q, k, v, mask, scale, query_ranges, key_ranges)
    _check_results(d_out, out, lse, (*q.shape[:-1], v.shape[-1]), q.dtype, work.dtype)
    dq, dk, dv = (np.zeros(x.shape, x.dtype) for x in (q, k, v))
    d_out, q, k, v, out = (x.astype(work.dtype, copy=False) for x in (d_out, q, k, v, out))
    scale_factor = work.dtype.type(work.scale)
    # Where a query saw no key, all its scores are -inf; any finite number makes their weights 0.
    shift = np.where(np.isneginf(lse), 0, lse)[..., None]
    for row, kv_head, tiles in work.heads():
        k_sd, v_sd = _with_ones(k[row, :, kv_head]), _with_ones(v[row, :, kv_head])
        dk_sd, dv_sd = np.zeros_like(k_sd[:, :-1]), np.zeros_like(v_sd[:, :-1])
        for tile in tiles:
            # One more column, against the ones in k_sd and v_sd, subtracts within the matrix product and saves a pass.
            q_rows, d_out_rows = tile.take(q) * scale_factor, tile.take(d_out)
            delta = np.einsum("ij,ij->i", d_out_rows, tile.take(out))[:, None]
            q_shift, d_out_delta = np.hstack((q_rows, -tile.take(shift))), np.hstack((d_out_rows, -delta))
            dq_rows = _add_gradients(tile, q_shift, d_out_delta, k_sd, v_sd, dk_sd, dv_sd)
            dq_rows *= scale_factor
            tile.put(dq, dq_rows)
        dk[row, :, kv_head], dv[row, :, kv_head] = dk_sd, dv_sd
    return dq, dk, dv


def _add_gradients(
    tile: Tile, q_shift: Floats, d_out_delta: Floats, k_sd: Floats, v_sd: Floats, dk_sd: Floats, dv_sd: Floats
) -> Floats:
    """Add a tile's terms to `dk_sd` (keys, D) and `dv_sd` (keys, Dv); returns its dS K, (rows, D).

    q_shift, d_out_delta: scaled queries (rows, D + 1) and gradients of the output (rows, Dv + 1); the last column is
        what to subtract from scores and from dP, with its sign changed.
    k_sd, v_sd: (keys, D + 1) and (keys, Dv + 1), the last column all ones.
    """
    q_rows, d_out_rows = np.ascontiguousarray(q_shift[:, :-1]), np.ascontiguousarray(d_out_delta[:, :-1])
    dq_rows = np.zeros_like(q_rows)
    for block in tile.blocks:
        scores = block.scores(q_shift, k_sd)
        weights = np.exp(scores, out=scores)
        dv_sd[block.keys] += np.matmul(weights.T, d_out_rows)
        d_scores = np.matmul(d_out_delta, v_sd[block.keys].T)
        d_scores *= weights
        dq_rows += np.matmul(d_scores, k_sd[block.keys, :-1])
        dk_sd[block.keys] += np.matmul(d_scores.T, q_rows)
    return dq_rows


def _check_results(
    d_out: Floats, out: Floats, lse: Floats, shape: tuple[int, ...], dtype: np.dtype[Any], lse_dtype: np.dtype[Any]
) -> None:
    for name, x, needed_shape, needed_dtype in (
        ("d_out", d_out, shape, dtype),
        ("out", out, shape, dtype),
        ("lse", lse, shape[:-1], lse_dtype),
    ):
        if x.shape != needed_shape:
            raise ValueError(f"attention_backward: {name} has shape {x.shape}; q and v make it {needed_shape}")
        if x.dtype != needed_dtype:
            raise TypeError(f"attention_backward: {name} is {x.dtype}; for {dtype} inputs it has to be {needed_dtype}")


def _with_ones(x_sd: Floats) -> Floats:
    """The rows with a last column of ones, (S, D + 1)."""
    return np.hstack((x_sd, np.ones((len(x_sd), 1), x_sd.dtype)))
