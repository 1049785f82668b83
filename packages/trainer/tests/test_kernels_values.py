"""What the CPU kernels compute, against dense formulas in NumPy; and what they refuse."""

from __future__ import annotations

import numpy as np
import pytest
from mask_compression import causal
from mindspore import Tensor
from parallel_trainer.kernels import kernels

CPU = kernels("cpu")
TOLERANCE = {"float32": 2e-5, "float64": 1e-12}


@pytest.fixture(params=["float32", "float64"])
def dtype(request):
    return request.param


def normal(*shape, seed=0):
    return np.random.default_rng([seed, *shape]).standard_normal(shape)


def check(result, expected, dtype):
    values = result.asnumpy()
    assert values.dtype == dtype
    np.testing.assert_allclose(values, expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


def dense_attention(q, k, v, scale):
    """Causal attention with the whole score matrix, (B, S, heads, D) arrays."""
    group = q.shape[2] // k.shape[2]
    k, v = (np.repeat(array, group, axis=2) for array in (k, v))
    scores = np.einsum("bshd,bthd->bhst", q, k) * scale
    scores = np.where(np.tri(q.shape[1], dtype=bool), scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return np.einsum("bhst,bthd->bshd", weights / weights.sum(-1, keepdims=True), v)


@pytest.mark.parametrize("shape", [(5, 3), (2, 4, 3)])
@pytest.mark.parametrize("with_bias", [False, True])
def test_linear(shape, with_bias, dtype):
    x, weight, bias = normal(*shape), normal(6, 3), normal(6)
    arguments = [Tensor(array.astype(dtype)) for array in ((x, weight, bias) if with_bias else (x, weight))]
    check(CPU.linear(*arguments), x @ weight.T + (bias if with_bias else 0), dtype)


@pytest.mark.parametrize("shape", [(2, 3, 8), (2, 3, 4, 8)])
def test_rms_norm(shape, dtype):
    x, weight = normal(*shape), normal(8)
    expected = x / np.sqrt((x**2).mean(-1, keepdims=True) + 0.1) * weight
    check(CPU.rms_norm(Tensor(x.astype(dtype)), Tensor(weight.astype(dtype)), 0.1), expected, dtype)


def test_rms_norm_of_zeros_is_zero(dtype):
    result = CPU.rms_norm(Tensor(np.zeros((2, 4), dtype)), Tensor(np.ones(4, dtype)), 1e-6)
    check(result, np.zeros((2, 4)), dtype)


def test_embedding(dtype):
    table = normal(7, 3)
    ids = np.array([[0, 6, 2], [2, 2, 1]])
    check(CPU.embedding(Tensor(ids.astype(np.int32)), Tensor(table.astype(dtype))), table[ids], dtype)


@pytest.mark.parametrize("wrong", [7, -1])
def test_embedding_refuses_ids_outside_the_vocabulary(wrong):
    ids = Tensor(np.array([[0, wrong]], np.int32))
    with pytest.raises(ValueError, match=rf"1 of 2 token ids .* first is {wrong}; .* 0 to 6 for vocab_size 7"):
        CPU.embedding(ids, Tensor(np.ones((7, 3), np.float32)))


def test_rotary_turns_each_pair_by_position_times_frequency(dtype):
    head_dim, theta = 6, 100.0
    x = normal(2, 5, 3, head_dim)
    positions = np.array([[0, 1, 2, 3, 4], [7, 0, 1, 40000, 2]])
    # A pair (i, i + D/2) is a complex number; turning it is multiplication by e^{i angle}.
    angles = positions[:, :, None, None] * theta ** (-2 * np.arange(head_dim // 2) / head_dim)
    turned = (x[..., : head_dim // 2] + 1j * x[..., head_dim // 2 :]) * np.exp(1j * angles)
    expected = np.concatenate([turned.real, turned.imag], axis=-1)
    table = CPU.rotary_table(positions, head_dim=head_dim, theta=theta)
    check(CPU.rotary(Tensor(x.astype(dtype)), table), expected, dtype)


def test_rotary_refuses_an_odd_head():
    with pytest.raises(ValueError, match=r"head_dim 5 is odd.*use 6"):
        CPU.rotary_table(np.zeros((1, 1), int), head_dim=5, theta=1e4)


@pytest.mark.parametrize(
    ("batch", "tokens", "heads", "kv_heads", "head_dim"),
    [(2, 1, 2, 2, 4), (2, 7, 4, 2, 4), (1, 150, 2, 2, 6), (1, 129, 3, 1, 4), (1, 5, 130, 1, 2)],
)
def test_attention(batch, tokens, heads, kv_heads, head_dim, dtype):
    q = normal(batch, tokens, heads, head_dim)
    k, v = (normal(batch, tokens, kv_heads, head_dim, seed=seed) for seed in (1, 2))
    result = CPU.attention(*(Tensor(array.astype(dtype)) for array in (q, k, v)), 0.7, causal(tokens, rows=batch))
    check(result, dense_attention(q, k, v, 0.7), dtype)


def test_attention_survives_scores_whose_exponential_overflows(dtype):
    q = np.full((1, 3, 1, 2), 100.0)
    k = q * np.array([1, 2, -3])[:, None, None]
    v = normal(1, 3, 1, 2)
    result = CPU.attention(*(Tensor(array.astype(dtype)) for array in (q, k, v)), 1.0, causal(q.shape[1], rows=len(q)))
    # Each query's whole weight is on the largest of its keys, which are 1, 2, -3 times as long.
    check(result, v[:, [0, 1, 1]], dtype)


def test_attention_refuses_heads_that_cannot_be_shared():
    q, k = Tensor(np.ones((1, 2, 4, 2), np.float32)), Tensor(np.ones((1, 2, 3, 2), np.float32))
    with pytest.raises(ValueError, match=r"4 query heads cannot share 3 key/value heads.*use 6 query heads"):
        CPU.attention(q, k, k, 1.0, causal(q.shape[1], rows=q.shape[0]))


def test_swiglu(dtype):
    gate, up = normal(3, 5), normal(3, 5, seed=1)
    check(CPU.swiglu(Tensor(gate.astype(dtype)), Tensor(up.astype(dtype))), gate / (1 + np.exp(-gate)) * up, dtype)


def test_swiglu_of_huge_gates_neither_overflows_nor_warns(dtype):
    gate = Tensor(np.array([[-1e4, 1e4]], dtype))
    check(CPU.swiglu(gate, Tensor(np.array([[3.0, 3.0]], dtype))), [[0, 3e4]], dtype)


def test_cross_entropy_is_the_sum_over_tokens_that_count(dtype):
    logits = normal(2, 3, 5)
    labels = np.array([[0, 4, -100], [2, 2, 1]])
    mask = np.array([[1, 1, 1], [0, 1, 1]], np.float32)
    likelihood = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    counted = [(0, 0, 0), (0, 1, 4), (1, 1, 2), (1, 2, 1)]
    result = CPU.cross_entropy_sum(Tensor(logits.astype(dtype)), labels, mask)
    assert result.shape == ()
    check(result, -sum(np.log(likelihood[place]) for place in counted), dtype)


def test_cross_entropy_of_uniform_logits_is_log_of_the_vocabulary(dtype):
    result = CPU.cross_entropy_sum(Tensor(np.full((4, 8), 3.0, dtype)), np.arange(4), None)
    check(result, 4 * np.log(8), dtype)


def test_cross_entropy_of_huge_logits_stays_finite(dtype):
    logits = np.array([[1e4, -1e4], [-1e4, 1e4]], dtype)
    check(CPU.cross_entropy_sum(Tensor(logits), np.array([0, 0]), None), 2e4, dtype)


def test_cross_entropy_without_a_token_that_counts_is_zero(dtype):
    result = CPU.cross_entropy_sum(Tensor(normal(2, 3).astype(dtype)), np.array([-100, -100]), None)
    check(result, 0.0, dtype)


@pytest.mark.parametrize("wrong", [5, -1])
def test_cross_entropy_refuses_labels_outside_the_vocabulary(wrong):
    logits = Tensor(np.ones((3, 5), np.float32))
    labels = np.array([1, wrong, 2])
    with pytest.raises(ValueError, match=rf"1 of 3 labels .* first is {wrong}; .* 0 to 4 for vocab_size 5"):
        CPU.cross_entropy_sum(logits, labels, None)
    counted = CPU.cross_entropy_sum(logits, labels, np.array([1, 0, 1]))
    np.testing.assert_allclose(counted.asnumpy(), 2 * np.log(5), rtol=1e-6)


def test_an_unknown_device_is_refused():
    with pytest.raises(ValueError, match=r"'gpu' has no kernel set.*use 'cpu'"):
        kernels("gpu")
