"""What the kernels of every set compute, against dense formulas in float64 NumPy; and what they refuse."""

from __future__ import annotations

import numpy as np
import pytest
from kernel_contract import SETS, TYPES, Contract, kernel_set
from mask_compression import causal, from_lengths
from mindspore import Tensor
from parallel_trainer.kernels import kernels


@pytest.fixture(params=[f"{name}-{dtype}" for name in SETS for dtype in TYPES[name]])
def contract(request, monkeypatch):
    """Every kernel set in every dtype that it is tested with."""
    name, dtype = request.param.split("-")
    return Contract(kernel_set(name, monkeypatch), name, dtype)


@pytest.fixture(params=SETS)
def any_set(request, monkeypatch):
    """Every kernel set, for what does not depend on a dtype."""
    return kernel_set(request.param, monkeypatch)


def normal(*shape, seed=0):
    return np.random.default_rng([seed, *shape]).standard_normal(shape)


def dense_attention(q, k, v, scale, visible=None):
    """Attention with the whole score matrix, (B, S, heads, D) arrays; visible bool (B, S, S), None: causal."""
    group = q.shape[2] // k.shape[2]
    k, v = (np.repeat(array, group, axis=2) for array in (k, v))
    scores = np.einsum("bshd,bthd->bhst", q, k) * scale
    visible = np.tri(q.shape[1], dtype=bool)[None] if visible is None else visible
    scores = np.where(visible[:, None], scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return np.einsum("bhst,bthd->bshd", weights / weights.sum(-1, keepdims=True), v)


@pytest.mark.parametrize("shape", [(5, 3), (2, 4, 3)])
@pytest.mark.parametrize("with_bias", [False, True])
def test_linear(shape, with_bias, contract):
    x, weight, bias = normal(*shape), normal(6, 3), normal(6)
    arguments = contract.tensors(*((x, weight, bias) if with_bias else (x, weight)))
    contract.check(contract.kernels.linear(*arguments), x @ weight.T + (bias if with_bias else 0))


@pytest.mark.parametrize("shape", [(2, 3, 8), (2, 3, 4, 8)])
def test_rms_norm(shape, contract):
    x, weight = normal(*shape), normal(8)
    expected = x / np.sqrt((x**2).mean(-1, keepdims=True) + 0.1) * weight
    contract.check(contract.kernels.rms_norm(contract.tensor(x), contract.tensor(weight), 0.1), expected)


def test_rms_norm_of_zeros_is_zero(contract):
    result = contract.kernels.rms_norm(contract.tensor(np.zeros((2, 4))), contract.tensor(np.ones(4)), 1e-6)
    contract.check(result, np.zeros((2, 4)))


def test_embedding(contract):
    table = normal(7, 3)
    ids = np.array([[0, 6, 2], [2, 2, 1]])
    contract.check(contract.kernels.embedding(Tensor(ids.astype(np.int32)), contract.tensor(table)), table[ids])


def test_embedding_of_a_part_of_the_table_leaves_other_rows_zero(contract):
    part, ids = normal(3, 2), np.array([[0, 6, 2], [3, 5, 4]])
    expected = np.zeros((2, 3, 2))
    expected[0, 2], expected[1, 0], expected[1, 2] = part
    tensor = Tensor(ids.astype(np.int32))
    contract.check(contract.kernels.embedding(tensor, contract.tensor(part), first=2, vocab_size=7), expected)


@pytest.mark.parametrize("wrong", [7, -1])
def test_embedding_refuses_ids_outside_the_vocabulary(any_set, wrong):
    ids = Tensor(np.array([[0, wrong]], np.int32))
    with pytest.raises(ValueError, match=rf"1 of 2 token ids .* first is {wrong}; .* 0 to 6 for vocab_size 7"):
        any_set.embedding(ids, Tensor(np.ones((7, 3), np.float32)))


@pytest.mark.parametrize("interleaved", [False, True])
def test_rotary_turns_each_pair_by_position_times_frequency(interleaved, contract):
    frequencies, still = np.array([1.0, 0.3, 0.01]), 2
    x = normal(2, 5, 3, still + 6)
    positions = np.array([[0, 1, 2, 3, 4], [7, 0, 1, 40000, 2]])
    firsts, seconds = ([2, 4, 6], [3, 5, 7]) if interleaved else ([2, 3, 4], [5, 6, 7])
    # A pair is a complex number; turning it is multiplication by e^{i angle}.
    turned = (x[..., firsts] + 1j * x[..., seconds]) * np.exp(1j * positions[:, :, None, None] * frequencies)
    expected = x.copy()
    expected[..., firsts], expected[..., seconds] = 1.5 * turned.real, 1.5 * turned.imag
    table = contract.kernels.rotary_table(positions, frequencies, scale=1.5)
    contract.check(contract.kernels.rotary(contract.tensor(x), table, interleaved=interleaved), expected)


def test_rotary_refuses_more_pairs_than_a_head_has(any_set):
    table = any_set.rotary_table(np.zeros((1, 1), int), np.ones(3))
    with pytest.raises(ValueError, match=r"turns 6 dimensions, and heads have 5; use at most 2"):
        any_set.rotary(Tensor(np.ones((1, 1, 1, 5))), table)


@pytest.mark.parametrize(
    ("batch", "tokens", "heads", "kv_heads", "head_dim"),
    [(2, 1, 2, 2, 4), (2, 7, 4, 2, 4), (1, 150, 2, 2, 6), (1, 129, 3, 1, 4), (1, 5, 130, 1, 2)],
)
def test_attention(batch, tokens, heads, kv_heads, head_dim, contract):
    q = normal(batch, tokens, heads, head_dim)
    k, v = (normal(batch, tokens, kv_heads, head_dim, seed=seed) for seed in (1, 2))
    result = contract.kernels.attention(*contract.tensors(q, k, v), 0.7, causal(tokens, rows=batch))
    contract.check_attention(result, dense_attention(q, k, v, 0.7))


def test_attention_of_values_narrower_than_keys(contract):
    q, k, v = normal(2, 9, 4, 6), normal(2, 9, 2, 6, seed=1), normal(2, 9, 2, 3, seed=2)
    result = contract.kernels.attention(*contract.tensors(q, k, v), 0.7, causal(9, rows=2))
    contract.check_attention(result, dense_attention(q, k, v, 0.7))


PIECES = {
    "whole rows": (None, None),
    "contiguous": (((4, 8),), None),
    "zigzag": (((2, 4), (8, 10)), ((0, 2), (10, 12), (2, 4), (8, 10), (4, 6), (6, 8))),
    "whole rows in zigzag order": (((0, 3), (9, 12), (3, 6), (6, 9)),) * 2,
}


@pytest.mark.parametrize("pieces", PIECES)
@pytest.mark.parametrize("lengths", [[[12], [12]], [[5, 4, 3], [1, 11]]])
def test_attention_of_the_positions_that_a_rank_has(pieces, lengths, contract):
    mask = from_lengths(lengths)
    query_ranges, key_ranges = PIECES[pieces]
    at_queries, at_keys = (
        np.concatenate([np.arange(*piece) for piece in ranges or [(0, 12)]]) for ranges in (query_ranges, key_ranges)
    )
    q, k, v = normal(2, 12, 4, 4), normal(2, 12, 2, 4, seed=1), normal(2, 12, 2, 3, seed=2)
    expected = dense_attention(q, k, v, 0.7, mask.dense())[:, at_queries]
    tensors = contract.tensors(q[:, at_queries], k[:, at_keys], v[:, at_keys])
    result = contract.kernels.attention(*tensors, 0.7, mask, query_ranges=query_ranges, key_ranges=key_ranges)
    contract.check_attention(result, expected)


def test_attention_survives_scores_whose_exponential_overflows(contract):
    q = np.full((1, 3, 1, 2), 100.0)
    k = q * np.array([1, 2, -3])[:, None, None]
    v = normal(1, 3, 1, 2)
    result = contract.kernels.attention(*contract.tensors(q, k, v), 1.0, causal(q.shape[1], rows=len(q)))
    # Each query's whole weight is on the largest of its keys, which are 1, 2, -3 times as long.
    contract.check_attention(result, v[:, [0, 1, 1]])


def test_attention_refuses_heads_that_cannot_be_shared(any_set):
    q, k = Tensor(np.ones((1, 2, 4, 2), np.float32)), Tensor(np.ones((1, 2, 3, 2), np.float32))
    with pytest.raises(ValueError, match=r"4 query heads cannot share 3 key/value heads.*use 6 query heads"):
        any_set.attention(q, k, k, 1.0, causal(q.shape[1], rows=q.shape[0]))


def test_swiglu(contract):
    gate, up = normal(3, 5), normal(3, 5, seed=1)
    contract.check(contract.kernels.swiglu(contract.tensor(gate), contract.tensor(up)), gate / (1 + np.exp(-gate)) * up)


def test_swiglu_of_huge_gates_neither_overflows_nor_warns(contract):
    gate = contract.tensor([[-1e4, 1e4]])
    contract.check(contract.kernels.swiglu(gate, contract.tensor([[3.0, 3.0]])), [[0, 3e4]])


def test_split_and_concat_are_each_others_inverse(contract):
    x = contract.tensor(normal(2, 3, 7))
    parts = contract.kernels.split(x, (4, 1, 2))
    assert [part.shape for part in parts] == [(2, 3, 4), (2, 3, 1), (2, 3, 2)]
    contract.check(contract.kernels.concat(*parts), x.asnumpy().astype(np.float64))


def test_concat_copies_a_part_with_one_head_to_all(contract):
    heads, one = normal(2, 3, 4, 5), normal(2, 3, 1, 2)
    expected = np.concatenate([heads, np.repeat(one, 4, axis=2)], axis=3)
    contract.check(contract.kernels.concat(*contract.tensors(heads, one)), expected)


def test_split_refuses_sizes_that_do_not_add_up(any_set):
    with pytest.raises(ValueError, match=r"sizes \(2, 3\) add up to 5; they have to add up to 6"):
        any_set.split(Tensor(np.ones((1, 6))), (2, 3))


def chosen(logits, bias, top_k, groups, topk_group):
    """The published choice for one token, with Python's sort."""
    scores = 1 / (1 + np.exp(-logits)) + bias
    size = len(scores) // groups
    group_scores = [sum(sorted(scores[first : first + size])[-2:]) for first in range(0, len(scores), size)]
    best = sorted(range(groups), key=lambda group: -group_scores[group])[:topk_group]
    allowed = [expert for group in best for expert in range(group * size, (group + 1) * size)]
    return sorted(sorted(allowed), key=lambda expert: -scores[expert])[:top_k]


@pytest.mark.parametrize(
    ("experts", "top_k", "groups", "topk_group"),
    [(16, 4, 4, 2), (16, 8, 8, 4), (16, 3, 1, 1), (8, 8, 2, 2), (6, 1, 6, 2)],
)
def test_experts_are_the_best_of_the_best_groups(experts, top_k, groups, topk_group, contract):
    logits, bias = contract.tensors(3 * normal(50, experts), 0.5 * normal(experts))
    ids = contract.kernels.choose_experts(logits, top_k=top_k, bias=bias, groups=groups, topk_group=topk_group)
    assert ids.dtype == np.int64
    exact_logits, exact_bias = (x.asnumpy().astype(np.float64) for x in (logits, bias))
    assert ids.tolist() == [chosen(row, exact_bias, top_k, groups, topk_group) for row in exact_logits]


def test_without_bias_the_largest_logits_are_chosen_even_where_their_sigmoid_is_1(any_set):
    logits = Tensor(np.array([[60.0, 80.0, 70.0, -1.0]], np.float32))
    assert any_set.choose_experts(logits, top_k=3).tolist() == [[1, 2, 0]]


def test_of_equal_experts_the_first_are_chosen(any_set):
    logits = Tensor(np.zeros((2, 8)))
    assert any_set.choose_experts(logits, top_k=3).tolist() == [[0, 1, 2]] * 2
    bias = Tensor(np.array([0, 0, 0, 0, 0, 0, 0.1, 0.1]))
    assert any_set.choose_experts(logits, top_k=3, bias=bias, groups=4, topk_group=2).tolist() == [[6, 7, 0]] * 2


@pytest.mark.parametrize("wrong", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("groups", [1, 4])
def test_a_token_chooses_different_experts_whatever_its_logits(wrong, groups, contract):
    logits = normal(4, 8)
    logits[0, 1:] = logits[1, 5] = logits[2] = wrong
    bias = contract.tensor(np.zeros(8)) if groups > 1 else None
    ids = contract.kernels.choose_experts(
        contract.tensor(logits), top_k=4, bias=bias, groups=groups, topk_group=groups // 2 or 1
    )
    assert [len(set(row)) for row in ids.tolist()] == [4] * 4
    assert ids.min() >= 0
    assert ids.max() < 8


def test_no_tokens_choose_no_experts(any_set):
    assert any_set.choose_experts(Tensor.from_numpy(np.zeros((0, 8))), top_k=2, groups=4, topk_group=2).shape == (0, 2)


@pytest.mark.parametrize(("top_k", "groups", "topk_group"), [(5, 4, 2), (2, 3, 1), (2, 4, 5), (0, 1, 1), (9, 1, 1)])
def test_choices_that_cannot_be_made_are_refused(any_set, top_k, groups, topk_group):
    with pytest.raises(ValueError, match=rf"{top_k} of 8 experts out of {topk_group} of {groups} groups"):
        any_set.choose_experts(Tensor(np.ones((2, 8))), top_k=top_k, groups=groups, topk_group=topk_group)


@pytest.mark.parametrize("scoring", ["sigmoid", "softmax"])
@pytest.mark.parametrize("normalized", [False, True])
def test_router_weights_are_scores_of_the_chosen(scoring, normalized, contract):
    logits, ids = 2 * normal(5, 6), np.array([[0, 3], [5, 1], [2, 4], [4, 2], [1, 0]])
    scores = 1 / (1 + np.exp(-logits)) if scoring == "sigmoid" else np.exp(logits)
    probabilities = scores / scores.sum(axis=1, keepdims=True)
    weights = (scores if scoring == "sigmoid" else probabilities)[np.arange(5)[:, None], ids]
    if normalized:
        weights = weights / weights.sum(axis=1, keepdims=True)
    found = contract.kernels.router_weights(
        contract.tensor(logits), ids, scoring=scoring, normalized=normalized, scaling=2.5
    )
    contract.check(found[0], 2.5 * weights)
    contract.check(found[1], probabilities)


def test_router_weights_of_huge_logits_are_finite(contract):
    logits = contract.tensor([[1e4, -1e4, -1e4]])
    for scoring in ("sigmoid", "softmax"):
        weights, probabilities = contract.kernels.router_weights(
            logits, np.array([[0, 1]]), scoring=scoring, normalized=True
        )
        contract.check(weights, [[1, 0]])
        contract.check(probabilities, [[1, 0, 0]])


@pytest.mark.parametrize("counts", [[3, 0, 4, 1], [0, 0, 0, 8], [2, 2, 2, 2]])
def test_each_expert_has_its_own_rows(counts, contract):
    rows, gate_up, down = normal(8, 5), normal(4, 6, 5), normal(4, 5, 3)
    expected = []
    for row, expert in zip(rows, np.repeat(np.arange(4), counts), strict=True):
        gate, up = np.split(gate_up[expert] @ row, 2)
        expected.append(down[expert] @ (gate / (1 + np.exp(-gate)) * up))
    tensors = contract.tensors(rows, gate_up, down)
    contract.check(contract.kernels.grouped_mlp(tensors[0], np.array(counts), *tensors[1:]), expected)


def test_experts_without_any_rows(contract):
    gate_up, down = contract.tensors(normal(2, 6, 5), normal(2, 5, 3))
    result = contract.kernels.grouped_mlp(contract.tensor(np.zeros((0, 5))), np.array([0, 0]), gate_up, down)
    contract.check(result, np.zeros((0, 5)))


def test_rows_are_in_the_order_of_their_experts_and_find_back(contract):
    x, weights, ids = normal(4, 3), normal(4, 2), np.array([[5, 0], [3, 5], [0, 3], [2, 0]])
    rows, counts, order = contract.kernels.permute(contract.tensor(x), ids, 6)
    assert counts.tolist() == [3, 0, 1, 2, 0, 2]
    of_slots = [(expert, token) for token, experts in enumerate(ids) for expert in experts]
    contract.check(rows, x[[token for _, token in sorted(of_slots)]])
    of_weights = contract.tensor(weights)
    if contract.dtype in ("bfloat16", "float16"):
        of_weights = Tensor(weights.astype(np.float32))
    contract.check(contract.kernels.unpermute(rows, of_weights, order), weights.sum(1, keepdims=True) * x)


@pytest.mark.parametrize("counts", [[3, 4], [8], [9, -1]])
def test_counts_that_are_not_of_the_rows_are_refused(any_set, counts):
    rows, gate_up, down = (Tensor(np.ones(shape)) for shape in ((8, 5), (2, 6, 5), (2, 5, 3)))
    with pytest.raises(ValueError, match=r"for 2 experts and 8 rows"):
        any_set.grouped_mlp(rows, np.array(counts), gate_up, down)


def test_cross_entropy_is_the_sum_over_tokens_that_count(contract):
    logits = normal(2, 3, 5)
    labels = np.array([[0, 4, -100], [2, 2, 1]])
    mask = np.array([[1, 1, 1], [0, 1, 1]], np.float32)
    likelihood = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    counted = [(0, 0, 0), (0, 1, 4), (1, 1, 2), (1, 2, 1)]
    result = contract.kernels.cross_entropy_sum(contract.tensor(logits), labels, mask)
    assert result.shape == ()
    contract.check_loss(result, -sum(np.log(likelihood[place]) for place in counted))


def test_cross_entropy_of_uniform_logits_is_log_of_the_vocabulary(contract):
    result = contract.kernels.cross_entropy_sum(contract.tensor(np.full((4, 8), 3.0)), np.arange(4), None)
    contract.check_loss(result, 4 * np.log(8))


def test_cross_entropy_of_huge_logits_stays_finite(contract):
    logits = contract.tensor([[1e4, -1e4], [-1e4, 1e4]])
    contract.check_loss(contract.kernels.cross_entropy_sum(logits, np.array([0, 0]), None), 2e4)


def test_cross_entropy_without_a_token_that_counts_is_zero(contract):
    result = contract.kernels.cross_entropy_sum(contract.tensor(normal(2, 3)), np.array([-100, -100]), None)
    contract.check_loss(result, 0.0)


@pytest.mark.parametrize("wrong", [5, -1])
def test_cross_entropy_refuses_labels_outside_the_vocabulary(any_set, wrong):
    logits = Tensor(np.ones((3, 5), np.float32))
    labels = np.array([1, wrong, 2])
    with pytest.raises(ValueError, match=rf"1 of 3 labels .* first is {wrong}; .* 0 to 4 for vocab_size 5"):
        any_set.cross_entropy_sum(logits, labels, None)
    counted = any_set.cross_entropy_sum(logits, labels, np.array([1, 0, 1]))
    np.testing.assert_allclose(counted.asnumpy(), 2 * np.log(5), rtol=1e-6)


@pytest.mark.skipif("ascend" not in SETS, reason="weights wider than activations are of Ascend alone")
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_wider_weight_is_multiplied_in_its_own_type(dtype, monkeypatch):
    contract = Contract(kernel_set("ascend", monkeypatch), "ascend", dtype)
    x, weight = contract.tensor(normal(4, 64)), normal(5, 64).astype(np.float32)
    result = contract.kernels.linear(x, Tensor(weight)).asnumpy()
    assert result.dtype == np.float32
    # Nearer than a product of this type could be.
    expected = x.asnumpy().astype(np.float64) @ weight.astype(np.float64).T
    np.testing.assert_allclose(result, expected, rtol=1e-4, atol=1e-4)


def test_an_unknown_device_is_refused():
    with pytest.raises(ValueError, match=r"'gpu' has no kernel set.*use 'cpu' or 'ascend'"):
        kernels("gpu")
