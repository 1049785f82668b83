"""The Qwen3 model on one device: its weights, values against NumPy, gradients, and how units may be run."""

from __future__ import annotations

import gc
import weakref

import numpy as np
import pytest
from attrs import evolve
from mindspore import Tensor, ops
from parallel_trainer.batch import MicroBatch
from parallel_trainer.kernels import kernels
from parallel_trainer.models.config import Qwen3Config
from parallel_trainer.models.qwen3 import Qwen3
from parallel_trainer.models.single import initial_weights, logits, loss_and_gradients, losses

TINY = Qwen3Config(
    vocab_size=29,
    hidden_size=12,
    intermediate_size=20,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=6,
    rms_norm_eps=1e-5,
    attention_bias=True,
)
TIED = Qwen3Config(
    vocab_size=29,
    hidden_size=8,
    intermediate_size=12,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_key_value_heads=2,
    head_dim=4,
    tie_word_embeddings=True,
)
ROWS, TOKENS = 2, 9


def model_and_weights(config, dtype="float64"):
    """With weights large enough that every part of the model matters."""
    model = Qwen3(config, kernels("cpu"))
    generator = np.random.default_rng(3)
    weights = {
        name: (value + 0.3 * generator.standard_normal(value.shape)).astype(dtype)
        for name, value in initial_weights(model, seed=1).items()
    }
    return model, weights


def batch(seed=5):
    generator = np.random.default_rng(seed)
    ids, labels = generator.integers(0, 29, (2, ROWS, TOKENS), dtype=np.int32)
    mask = generator.random((ROWS, TOKENS)) < 0.7
    return MicroBatch(ids, np.tile(np.arange(TOKENS, dtype=np.int32), (ROWS, 1)), labels, mask.astype(np.float32))


def numpy_logits(config, weights, ids):
    """Qwen3 written out for one token of one row at a time, with Python loops over layers and heads."""

    def norm(x, name):
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + config.rms_norm_eps) * weights[f"{name}.weight"]

    def linear(x, name):
        return x @ weights[f"{name}.weight"].T + weights.get(f"{name}.bias", 0)

    def turn(x):
        half = config.head_dim // 2
        angles = np.arange(len(x))[:, None] * config.rope_theta ** (-np.arange(half) / half)
        turned = (x[:, :half] + 1j * x[:, half:]) * np.exp(1j * angles)
        return np.concatenate([turned.real, turned.imag], axis=1)

    def softmax(x):
        return np.exp(x - x.max()) / np.exp(x - x.max()).sum()

    def head(index, x):
        return x[:, index * config.head_dim : (index + 1) * config.head_dim]

    x = weights["model.embed_tokens.weight"][ids]
    group = config.num_attention_heads // config.num_key_value_heads
    for layer in range(config.num_hidden_layers):
        prefix = f"model.layers.{layer}"
        h = norm(x, f"{prefix}.input_layernorm")
        q, k, v = (linear(h, f"{prefix}.self_attn.{name}_proj") for name in "qkv")
        outputs = []
        for index in range(config.num_attention_heads):
            q_head = turn(norm(head(index, q), f"{prefix}.self_attn.q_norm"))
            k_head = turn(norm(head(index // group, k), f"{prefix}.self_attn.k_norm"))
            v_head = head(index // group, v)
            outputs.append(
                [
                    softmax(q_head[i] @ k_head[: i + 1].T / np.sqrt(config.head_dim)) @ v_head[: i + 1]
                    for i in range(len(ids))
                ]
            )
        x = x + linear(np.concatenate(outputs, axis=1), f"{prefix}.self_attn.o_proj")
        h = norm(x, f"{prefix}.post_attention_layernorm")
        gate = linear(h, f"{prefix}.mlp.gate_proj")
        x = x + linear(gate / (1 + np.exp(-gate)) * linear(h, f"{prefix}.mlp.up_proj"), f"{prefix}.mlp.down_proj")
    table = "model.embed_tokens" if config.tie_word_embeddings else "lm_head"
    return linear(norm(x, "model.norm"), table)


def test_weights_have_the_names_and_shapes_of_hugging_face_checkpoints():
    shapes = {weight.name: weight.shape for weight in Qwen3(TINY, kernels("cpu")).weights}
    layer = {
        "input_layernorm.weight": (12,),
        "self_attn.q_proj.weight": (24, 12),
        "self_attn.q_proj.bias": (24,),
        "self_attn.k_proj.weight": (12, 12),
        "self_attn.k_proj.bias": (12,),
        "self_attn.v_proj.weight": (12, 12),
        "self_attn.v_proj.bias": (12,),
        "self_attn.q_norm.weight": (6,),
        "self_attn.k_norm.weight": (6,),
        "self_attn.o_proj.weight": (12, 24),
        "self_attn.o_proj.bias": (12,),
        "post_attention_layernorm.weight": (12,),
        "mlp.gate_proj.weight": (20, 12),
        "mlp.up_proj.weight": (20, 12),
        "mlp.down_proj.weight": (12, 20),
    }
    assert shapes == {
        "model.embed_tokens.weight": (29, 12),
        **{f"model.layers.{index}.{name}": shape for index in (0, 1) for name, shape in layer.items()},
        "model.norm.weight": (12,),
        "lm_head.weight": (29, 12),
    }


def test_tensor_parallelism_splits_outputs_then_inputs_and_never_norms():
    split = {weight.name: weight.tp_dim for weight in Qwen3(TINY, kernels("cpu")).weights}
    assert {name for name, dim in split.items() if dim == 1} == {
        f"model.layers.{layer}.{name}.weight" for layer in (0, 1) for name in ("self_attn.o_proj", "mlp.down_proj")
    }
    whole = {name for name, dim in split.items() if dim is None}
    assert all("norm" in name or name.endswith("o_proj.bias") for name in whole)
    assert not any("norm" in name for name in split.keys() - whole)


def test_a_tied_head_is_the_embeddings_own_weight():
    embedding, _, head = Qwen3(TIED, kernels("cpu")).units
    assert head.weights[-1] is embedding.weights[0]
    assert "lm_head.weight" not in {weight.name for weight in Qwen3(TIED, kernels("cpu")).weights}


def test_initial_values_norms_one_biases_zero_matrices_normal():
    for name, value in initial_weights(Qwen3(TINY, kernels("cpu")), seed=1).items():
        if value.ndim == 1:
            np.testing.assert_array_equal(value, 0 if name.endswith("bias") else 1)
        else:
            assert 0.01 < value.std() < 0.03


@pytest.mark.parametrize("config", [TINY, TIED], ids=["tiny", "tied"])
@pytest.mark.parametrize(("dtype", "tolerance"), [("float64", 1e-11), ("float32", 1e-4)])
def test_logits_and_loss_are_those_of_a_plain_numpy_model(config, dtype, tolerance):
    model, weights = model_and_weights(config)
    narrow = {name: value.astype(dtype) for name, value in weights.items()}
    micro_batch = batch()
    expected = np.array([numpy_logits(config, weights, row) for row in micro_batch.input_ids])
    result = logits(model, narrow, micro_batch.input_ids)
    assert result.dtype == dtype
    np.testing.assert_allclose(result, expected, rtol=tolerance, atol=tolerance)

    log_likelihood = expected - np.log(np.exp(expected).sum(-1, keepdims=True))
    of_labels = np.take_along_axis(log_likelihood, micro_batch.labels[..., None].astype(int), -1)[..., 0]
    np.testing.assert_allclose(
        loss(model, narrow, micro_batch), -(of_labels * micro_batch.loss_mask).sum(), rtol=tolerance
    )


@pytest.mark.parametrize("config", [TINY, TIED], ids=["tiny", "tied"])
def test_the_gradient_of_every_weight_is_the_slope_of_the_loss(config):
    model, weights = model_and_weights(config)
    micro_batch = batch()
    _, gradients = loss_and_gradients(model, weights, micro_batch)
    assert gradients.keys() == weights.keys()
    generator = np.random.default_rng(11)
    step = 1e-5
    for name, value in weights.items():
        move = step * generator.standard_normal(value.shape)
        change = loss(model, {**weights, name: value + move}, micro_batch) - loss(
            model, {**weights, name: value - move}, micro_batch
        )
        np.testing.assert_allclose(
            2 * (gradients[name] * move).sum(), change, rtol=1e-6, atol=1e-7 * step, err_msg=name
        )


def loss(model, weights, micro_batch):
    return losses(model, weights, micro_batch).item()


def test_a_token_does_not_see_those_after_it():
    model, weights = model_and_weights(TINY)
    ids = batch().input_ids
    changed = ids.copy()
    changed[:, 5:] = (changed[:, 5:] + 1) % 29
    before, after = logits(model, weights, ids), logits(model, weights, changed)
    np.testing.assert_array_equal(before[:, :5], after[:, :5])
    assert (before[:, 5:] != after[:, 5:]).any(axis=-1).all()


def test_micro_batches_of_different_mask_add_up_to_the_whole():
    """PUB-LOSS-01: loss and gradient are sums, so how tokens are grouped into micro-batches does not matter."""
    model, weights = model_and_weights(TINY)
    whole = batch()
    parts = [
        MicroBatch(
            *(getattr(whole, name)[row : row + 1] for name in ("input_ids", "position_ids", "labels", "loss_mask"))
        )
        for row in range(ROWS)
    ]
    total, gradients = loss_and_gradients(model, weights, whole)
    losses, of_parts = zip(*(loss_and_gradients(model, weights, part) for part in parts), strict=True)
    np.testing.assert_allclose(sum(losses), total, rtol=1e-12)
    for name, gradient in gradients.items():
        np.testing.assert_allclose(sum(part[name] for part in of_parts), gradient, rtol=1e-9, atol=1e-11)


def test_the_same_inputs_give_the_same_bits():
    model, weights = model_and_weights(TINY, "float32")
    (once, first), (again, second) = (loss_and_gradients(model, weights, batch()) for _ in range(2))
    assert once == again
    for name in first:
        np.testing.assert_array_equal(first[name], second[name])


def test_weights_may_be_freed_after_each_forward_and_filled_again_for_the_backward():
    model, weights = model_and_weights(TINY)
    micro_batches = [batch(5), batch(6)]
    expected = [loss_and_gradients(model, weights, micro_batch)[1] for micro_batch in micro_batches]
    block, name_of = model.units[1], [weight.name for weight in model.units[1].weights]
    tensors = [Tensor(weights[name]) for name in name_of]

    def free():
        for tensor in tensors:
            tensor.untyped_storage().resize_(0)

    def fill():
        for tensor, name in zip(tensors, name_of, strict=True):
            tensor.untyped_storage().resize_(weights[name].nbytes)
            tensor.asnumpy()[...] = weights[name]

    # Both forwards, then both backwards in the same order: not the order of a stack.
    block.set_grad(True)
    runs = []
    for micro_batch in micro_batches:
        x = Tensor(weights["model.embed_tokens.weight"][micro_batch.input_ids.reshape(-1)])
        runs.append((x, block(x, micro_batch, *tensors)))
        runs[-1][1].asnumpy()
        free()
        fill()
    free()
    garbage = [np.full_like(weights[name], np.nan) for name in name_of]
    for (x, y), micro_batch, gradients in zip(runs, micro_batches, expected, strict=True):
        dy = _gradient_above(model, weights, micro_batch, y)
        fill()
        _, *of_weights = ops.GradOperation(get_all=True, sens_param=True)(block)(x, micro_batch, *tensors, dy)
        for name, gradient in zip(name_of, of_weights, strict=True):
            np.testing.assert_allclose(gradient.asnumpy(), gradients[name], rtol=1e-12, atol=1e-13, err_msg=name)
        free()
    del garbage


def _gradient_above(model, weights, micro_batch, y):
    """Gradient of the loss for what the first block returned."""
    inputs = [y]
    units = model.units[2:]
    tensors = [[Tensor(weights[weight.name]) for weight in unit.weights] for unit in units]
    for unit, of_unit in zip(units, tensors, strict=True):
        unit.set_grad(True)
        inputs.append(unit(inputs[-1], micro_batch, *of_unit))
    dy = Tensor(np.ones(1))
    for unit, x, of_unit in reversed(list(zip(units, inputs[:-1], tensors, strict=True))):
        dy = ops.GradOperation(get_all=True, sens_param=True)(unit)(x, micro_batch, *of_unit, dy)[0]
    return dy


def test_rotary_angles_are_shared_by_equal_positions_and_go_with_the_last_that_uses_them():
    model, weights = model_and_weights(TIED)
    tables = model.units[1].part.attention._rotary_tables
    first, again = batch(), batch()
    assert again.position_ids is not first.position_ids
    other = evolve(first, position_ids=first.position_ids + 1)
    assert tables[first] is tables[again]
    used = weakref.ref(tables[first])
    block = model.units[1]
    block.set_grad(True)
    hidden = Tensor(weights["model.embed_tokens.weight"][first.input_ids.reshape(-1)])
    inputs = (hidden, first, *(Tensor(weights[weight.name]) for weight in block.weights))
    out = block(*inputs)
    np.testing.assert_array_equal(tables[other].cos[:, :, 0, 0], np.cos(other.position_ids))
    assert used() is not None, "a backward is still to come"
    ops.GradOperation(get_all=True, sens_param=True)(block)(*inputs, out)
    del out
    gc.collect()
    assert used() is None


def test_ids_outside_the_vocabulary_are_refused():
    model, weights = model_and_weights(TIED)
    with pytest.raises(ValueError, match="0 to 28 for vocab_size 29"):
        logits(model, weights, np.array([[3, 29]], np.int32))
