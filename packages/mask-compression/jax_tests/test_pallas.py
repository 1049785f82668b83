"""JAX's Pallas kernels, interpreted on a CPU: with our segment ids they compute what the mask means."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from jax.experimental.pallas import tpu
from jax.experimental.pallas.ops.tpu import flash_attention
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel, splash_attention_mask
from mask_compression import from_lengths
from mask_compression.pallas import segment_ids

LENGTHS = [[100, 156], [256], [1, 127, 128]]
HEADS, S, D = 2, 256, 128


@pytest.fixture(scope="module")
def qkv() -> list[np.ndarray]:
    generator = np.random.default_rng(0)
    return [generator.standard_normal((len(LENGTHS), HEADS, S, D)).astype(np.float32) for _ in "qkv"]


def expected(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
    """Dense attention in float64, one document at a time, without a scale."""
    out = np.zeros(q.shape)
    for row, lengths in enumerate(LENGTHS):
        start = 0
        for length in lengths:
            here = (row, slice(None), slice(start, start + length))
            scores = q[here].astype(np.float64) @ k[here].swapaxes(-1, -2)
            scores[:, np.triu(np.ones((length, length), bool), 1)] = -np.inf
            weights = np.exp(scores - scores.max(-1, keepdims=True))
            out[here] = weights / weights.sum(-1, keepdims=True) @ v[here]
            start += length
    return out


@pytest.mark.parametrize(("start", "stop"), [(0, 256), (0, 128), (128, 256)])
def test_splash_attention_of_a_piece_of_every_row(qkv: list[np.ndarray], start: int, stop: int) -> None:
    q, k, v = qkv
    causal = splash_attention_mask.CausalMask((stop - start, S), offset=start)
    kernel = splash_attention_kernel.make_splash_mha(
        splash_attention_mask.MultiHeadMask([causal] * HEADS), head_shards=1, q_seq_shards=1, interpret=True
    )
    ids = splash_attention_kernel.SegmentIds(*segment_ids(from_lengths(LENGTHS), (start, stop)))
    out = jax.vmap(kernel)(q[:, :, start:stop], k, v, ids)
    np.testing.assert_allclose(out, expected(q, k, v)[:, :, start:stop], atol=1e-4)


def test_flash_attention(qkv: list[np.ndarray]) -> None:
    ids = flash_attention.SegmentIds(*segment_ids(from_lengths(LENGTHS)))
    with tpu.force_tpu_interpret_mode():
        out = flash_attention.flash_attention(*qkv, segment_ids=ids, causal=True)
    np.testing.assert_allclose(out, expected(*qkv), atol=1e-4)
