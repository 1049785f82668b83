"""Attention at its limits: queries without keys, extreme scores, half precision, memory, arguments that do not fit."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
from mask_compression.attention import attention, merge
from mask_compression.attention_backward import attention_backward
from mask_compression.mask import CompressedMask


def causal(seq_length, rows=1):
    return CompressedMask(rows, seq_length, seq_length * np.arange(1, rows + 1))


def normal(*shape, dtype=np.float64, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


@pytest.mark.parametrize("scale", [1.0, 1e4])
def test_a_query_that_sees_no_key_is_zero_and_merges_as_nothing(scale):
    # Documents (0, 4) and (4, 8): of the keys 0 to 3 the queries 4 to 7 see none, in memory they come first.
    mask = CompressedMask(1, 8, np.array([4, 8]))
    q, k, v, d_out = (normal(1, size, 2, 3, seed=seed) for seed, size in enumerate((6, 4, 4, 6)))
    ranges = {"query_ranges": ((4, 8), (2, 4)), "key_ranges": ((0, 4),)}
    out, lse = attention(q, k, v, mask, scale=scale, **ranges)
    assert not out[:, :4].any()
    assert np.isneginf(lse[:, :4]).all()
    assert np.isfinite(lse[:, 4:]).all()
    gradients = attention_backward(d_out, q, k, v, out, lse, mask, scale=scale, **ranges)
    assert not gradients[0][:, :4].any()
    assert all(np.isfinite(gradient).all() for gradient in gradients)

    nothing = np.zeros_like(out), np.full_like(lse, -np.inf)
    for parts in ((out, lse, *nothing), (*nothing, out, lse)):
        merged = merge(*parts)
        np.testing.assert_array_equal(merged[0], out)
        np.testing.assert_array_equal(merged[1], lse)


def test_a_block_of_keys_that_nobody_sees_costs_nothing_and_gives_zeros():
    q, k = normal(1, 4, 1, 2), np.full((1, 4, 1, 2), np.nan)
    ranges = {"query_ranges": ((0, 4),), "key_ranges": ((4, 8),)}
    out, lse = attention(q, k, k, causal(8), **ranges)
    np.testing.assert_array_equal(out, 0)
    np.testing.assert_array_equal(lse, -np.inf)
    for gradient in attention_backward(q, q, k, k, out, lse, causal(8), **ranges):
        np.testing.assert_array_equal(gradient, 0)


@pytest.mark.parametrize("sign", [1, -1])
def test_scores_of_ten_thousand_do_not_overflow(sign):
    # One dimension; key j scores sign · 100 · j, up to 10⁴ and far apart: the softmax is one-hot to rounding.
    keys = 101
    q, k = np.full((1, keys, 1, 1), 100, np.float32), sign * np.arange(keys, dtype=np.float32).reshape(1, keys, 1, 1)
    v = normal(1, keys, 1, 4, dtype=np.float32)
    out, lse = attention(q, k, v, causal(keys), scale=1)
    chosen = np.arange(keys) if sign == 1 else np.zeros(keys, int)
    np.testing.assert_allclose(out, v[:, chosen], rtol=1e-6)
    np.testing.assert_allclose(lse[0, :, 0], sign * 100 * chosen, rtol=1e-6)
    d_out = normal(1, keys, 1, 4, dtype=np.float32, seed=1)
    dq, dk, dv = attention_backward(d_out, q, k, v, out, lse, causal(keys), scale=1)
    np.testing.assert_allclose(dq, 0, atol=1e-3)
    np.testing.assert_allclose(dk, 0, atol=1e-3)
    expected = np.zeros_like(v)
    np.add.at(expected[0], chosen, d_out[0])
    np.testing.assert_allclose(dv, expected, rtol=1e-5, atol=1e-5)


def test_all_scores_far_below_zero_in_one_block_and_far_above_in_the_next():
    # 600 keys of -10⁴ and 600 of 10⁴, more than one block each; the last query averages the second half.
    k = np.repeat(np.array([-1e4, 1e4], np.float32), 600).reshape(1, 1200, 1, 1)
    q, v = np.ones_like(k), np.arange(1200, dtype=np.float32).reshape(1, 1200, 1, 1)
    out, lse = attention(q, k, v, causal(1200), scale=1)
    expected = np.concatenate((np.arange(600) / 2, 600 + np.arange(600) / 2))
    np.testing.assert_allclose(out[0, :, 0, 0], expected, rtol=1e-6)
    np.testing.assert_allclose(lse[0, [0, -1], 0], [-1e4, 1e4 + np.log(600)], rtol=1e-6)


def test_half_precision_is_computed_in_single():
    half = [normal(1, 200, heads, 8, dtype=np.float16, seed=heads) for heads in (4, 2, 2, 4)]
    wide = [x.astype(np.float32) for x in half]
    mask = causal(200)
    results = []
    for q, k, v, d_out in (half, wide):
        out, lse = attention(q, k, v, mask)
        results.append((lse, out, *attention_backward(d_out, q, k, v, out, lse, mask)))
    assert [x.dtype for x in results[0]] == [np.float32, *[np.float16] * 4]
    np.testing.assert_allclose(results[0][0], results[1][0], rtol=1e-5)  # half precision would be off by 1e-3
    for mine, right in zip(results[0][1:], results[1][1:], strict=True):
        np.testing.assert_allclose(mine, right, rtol=2e-3, atol=4e-3)


def test_inputs_may_be_views_of_another_layout_and_stay_as_they_are():
    packed = normal(3, 1, 2, 50, 4)
    before = packed.copy()
    q, k, v = (x.transpose(0, 2, 1, 3)[:, ::-1] for x in packed)
    views = q, k, v, *attention(q, k, v, causal(50))
    plain = [np.ascontiguousarray(x) for x in views]
    ours = *views[3:], *attention_backward(views[3], *views, causal(50))
    expected = *attention(*plain[:3], causal(50)), *attention_backward(plain[3], *plain, causal(50))
    for mine, right in zip(ours, expected, strict=True):
        np.testing.assert_allclose(mine, right, rtol=1e-12, atol=1e-12)
    np.testing.assert_array_equal(packed, before)


def peak_bytes(seq_length):
    """Of a forward and a backward pass of one head, inputs not counted."""
    q = normal(1, seq_length, 1, 16, dtype=np.float32)
    tracemalloc.start()
    try:
        out, lse = attention(q, q, q, causal(seq_length))
        attention_backward(q, q, q, q, out, lse, causal(seq_length))
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_memory_grows_with_the_tokens_and_not_with_their_square():
    shorter, longer = peak_bytes(2048), peak_bytes(8192)
    assert longer < 4 * shorter
    assert longer < 8192**2 * 4 / 20


X, MASK = normal(2, 8, 4, 3), causal(8, rows=2)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((X[0], X, X, MASK), r"q has shape \(8, 4, 3\); use \(batch, tokens, heads, head_dim\)"),
        ((X, X[:1], X, MASK), r"k has 1 rows .* the mask has 2"),
        ((X, X, X[:, :, :2], MASK), r"k \(2, 8, 4, 3\) and v \(2, 8, 2, 3\) differ in more than the last dimension"),
        ((X, X[..., :2], X, MASK), r"q .* and k .* need the same last dimension"),
        ((X, X[:, :, :3], X[:, :, :3], MASK), "4 query heads cannot share 3 key/value heads; .* use 6 query heads"),
        ((X[:, :7], X, X, MASK), r"q has 7 tokens .* a row of the mask has 8"),
        ((X, X[:, :7], X[:, :7], MASK), r"k has 7 tokens .* a row of the mask has 8"),
    ],
)
def test_shapes_that_do_not_fit_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        attention(*arguments)


def test_ranges_of_another_length_are_named():
    with pytest.raises(ValueError, match=r"q has 8 tokens .* the ranges \(\(0, 2\), \(6, 8\)\) have 4"):
        attention(X, X, X, MASK, query_ranges=((0, 2), (6, 8)))
    with pytest.raises(ValueError, match=r"key_ranges = \(4, 9\)"):
        attention(X, X, X, MASK, key_ranges=((4, 9),))


@pytest.mark.parametrize("other", [np.float32, np.int64, np.complex128])
def test_dtypes_that_cannot_be_used_are_type_errors(other):
    with pytest.raises(TypeError, match="of one dtype, float16, float32, float64"):
        attention(X, X.astype(other), X, MASK)
    if other != np.float32:
        with pytest.raises(TypeError, match="of one dtype"):
            attention(*[X.astype(other)] * 3, MASK)


def test_backward_names_results_that_are_not_those_of_its_inputs():
    out, lse = attention(X, X, X, MASK)
    with pytest.raises(ValueError, match=r"out has shape \(2, 8, 4, 2\); q and v make it \(2, 8, 4, 3\)"):
        attention_backward(X, X, X, X, out[..., :2], lse, MASK)
    with pytest.raises(ValueError, match=r"lse has shape \(2, 8, 4, 1\)"):
        attention_backward(X, X, X, X, out, lse[..., None], MASK)
    with pytest.raises(TypeError, match="d_out is float32; for float64 inputs it has to be float64"):
        attention_backward(X.astype(np.float32), X, X, X, out, lse, MASK)


def test_merge_names_parts_that_do_not_fit():
    out, lse = attention(X, X, X, MASK)
    with pytest.raises(ValueError, match="do not fit"):
        merge(out, lse, out[:, :4], lse[:, :4])
    with pytest.raises(ValueError, match="do not fit"):
        merge(out, lse[..., None], out, lse[..., None])
    with pytest.raises(TypeError, match="lse of float64 and of float32"):
        merge(out, lse, out, lse.astype(np.float32))


def test_many_float16_parts_merge_as_exactly_as_float32():
    generator = np.random.default_rng(0)
    q, k, v = (generator.standard_normal((1, 64, 1, 8)).astype(np.float16) for _ in range(3))
    mask = causal(64)
    parts = [
        attention(q, k[:, at : at + 4], v[:, at : at + 4], mask, key_ranges=[(at, at + 4)]) for at in range(0, 64, 4)
    ]
    merged = parts[0]
    for part in parts[1:]:
        merged = merge(*merged, *part)
    exact, _ = attention(*(x.astype(np.float64) for x in (q, k, v)), mask)
    assert merged[0].dtype == np.float32
    # Each part is rounded to float16 once; rounding every sum as well would be several times as far off.
    assert np.abs(merged[0] - exact).max() < 6e-4


def test_huge_values_do_not_overflow():
    q = np.full((1, 4, 1, 2), 3.6, np.float32)
    v = np.full((1, 4, 1, 2), 1e27, np.float32)
    out, _ = attention(q, q, v, causal(4), scale=1.0)
    np.testing.assert_allclose(out, v, rtol=1e-6)
