"""Causal attention in tiles of queries: no score above the diagonal block is computed or stored.

Dao, "FlashAttention-2", 2023: forward keeps the logarithm of each row's sum of exponentials, and backward
computes the probabilities again from it. A tile holds the query heads that share one key/value head, so
grouped-query attention is the same matrix products with more rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

import numpy as np
from attrs import frozen
from mindspore import Tensor
from mindspore.common import _Function

# Rows of a tile, tokens times heads that share a key: a tile's scores (rows x S) should stay in the cache.
_TILE_ROWS = 128


@frozen
class _Tile:
    """Tokens `start` to `stop` of row `b`, for the query heads that read key/value head `h`."""

    b: int
    h: int
    start: int
    stop: int
    heads: slice

    def rows(self, x_bshd: np.ndarray) -> np.ndarray:
        """The tile's part of an array laid out as q, (tokens * heads, D)."""
        return x_bshd[self.b, self.start : self.stop, self.heads].reshape(-1, x_bshd.shape[-1])

    def put(self, x_bshd: np.ndarray, rows: np.ndarray) -> None:
        """Write what `rows` would return."""
        target = x_bshd[self.b, self.start : self.stop, self.heads]
        target[...] = rows.reshape(target.shape)

    def scores(self, q_rows: np.ndarray, k_sd: np.ndarray) -> np.ndarray:
        """`q kᵀ` for the keys up to the tile's last token, -inf where the key comes after the query."""
        tokens = self.stop - self.start
        scores = np.matmul(q_rows, k_sd[: self.stop].T)
        diagonal = scores.reshape(tokens, -1, self.stop)[:, :, self.start :]
        np.copyto(diagonal, -np.inf, where=~np.tri(tokens, dtype=bool)[:, None])
        return scores


def _tiles(q: np.ndarray, k: np.ndarray) -> Iterator[_Tile]:
    """All tiles; those of one key/value head follow each other, the one with the most keys first."""
    batch, tokens, heads, _ = q.shape
    kv_heads = k.shape[2]
    group = heads // kv_heads
    step = max(1, _TILE_ROWS // group)
    for b, h in product(range(batch), range(kv_heads)):
        for start in reversed(range(0, tokens, step)):
            yield _Tile(b, h, start, min(start + step, tokens), slice(h * group, (h + 1) * group))


class _Attention(_Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        q_bshd, k_bshd, v_bshd = q.asnumpy(), k.asnumpy(), v.asnumpy()
        out = np.empty_like(q_bshd)
        log_sums = np.empty((*q_bshd.shape[:-1], 1), q_bshd.dtype)
        for tile in _tiles(q_bshd, k_bshd):
            scores = tile.scores(tile.rows(q_bshd) * q_bshd.dtype.type(scale), k_bshd[tile.b, :, tile.h])
            largest = scores.max(axis=1, keepdims=True)
            scores -= largest
            weights = np.exp(scores, out=scores)
            sums = weights.sum(axis=1, keepdims=True)
            tile.put(out, np.matmul(weights, v_bshd[tile.b, : tile.stop, tile.h]) / sums)
            tile.put(log_sums, largest + np.log(sums))
        ctx.save_for_backward(q, k, v)
        ctx.out, ctx.log_sums, ctx.scale = out, log_sums, q_bshd.dtype.type(scale)
        return Tensor.from_numpy(out)

    @staticmethod
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        q_bshd, k_bshd, v_bshd = (tensor.asnumpy() for tensor in ctx.saved_tensors)
        d_out_bshd = d_out.asnumpy()
        dq, dk, dv = np.empty_like(q_bshd), np.zeros_like(k_bshd), np.zeros_like(v_bshd)
        for tile in _tiles(q_bshd, k_bshd):
            q_rows, d_out_rows = tile.rows(q_bshd) * ctx.scale, tile.rows(d_out_bshd)
            keys, values = k_bshd[tile.b, : tile.stop, tile.h], v_bshd[tile.b, : tile.stop, tile.h]
            scores = tile.scores(q_rows, keys)
            scores -= tile.rows(ctx.log_sums)
            weights = np.exp(scores, out=scores)
            dv[tile.b, : tile.stop, tile.h] += np.matmul(weights.T, d_out_rows)

            d_scores = np.matmul(d_out_rows, values.T)
            d_scores -= np.einsum("ij,ij->i", d_out_rows, tile.rows(ctx.out))[:, None]
            d_scores *= weights
            dq_rows = np.matmul(d_scores, keys)
            dq_rows *= ctx.scale
            tile.put(dq, dq_rows)
            dk[tile.b, : tile.stop, tile.h] += np.matmul(d_scores.T, q_rows)
        return Tensor.from_numpy(dq), Tensor.from_numpy(dk), Tensor.from_numpy(dv), None


def attention(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """See `Kernels.attention`."""
    if q.shape[2] % k.shape[2]:
        raise ValueError(
            f"attention: {q.shape[2]} query heads cannot share {k.shape[2]} key/value heads; the first has "
            f"to be a multiple of the second; use {k.shape[2] * -(-q.shape[2] // k.shape[2])} query heads"
        )
    return _Attention.apply(q, k, v, scale)
