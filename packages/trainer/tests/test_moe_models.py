"""Models with experts on one device: weights, losses against float64 NumPy for one token at a time, gradients."""

from __future__ import annotations

import numpy as np
import pytest
from attrs import evolve
from kernel_contract import SETS, kernel_set
from parallel_trainer.batch import MicroBatch, look_ahead
from parallel_trainer.kernels import kernels
from parallel_trainer.models.config import DeepseekV3Config, Qwen3MoeConfig
from parallel_trainer.models.deepseek_v3 import DeepseekV3
from parallel_trainer.models.qwen3 import Qwen3
from parallel_trainer.models.rope import Yarn, frequencies
from parallel_trainer.models.single import initial_weights, logits, loss_and_gradients, losses
from parallel_trainer.parallel.expert_parallel import ExpertParallel

DEEPSEEK = DeepseekV3Config(
    vocab_size=23,
    hidden_size=12,
    intermediate_size=10,
    num_hidden_layers=2,
    num_attention_heads=2,
    q_lora_rank=5,
    kv_lora_rank=6,
    qk_nope_head_dim=3,
    qk_rope_head_dim=4,
    v_head_dim=5,
    n_routed_experts=8,
    num_experts_per_tok=4,
    moe_intermediate_size=6,
    n_shared_experts=2,
    first_k_dense_replace=1,
    n_group=4,
    topk_group=2,
    yarn=Yarn(factor=4, original_max_position_embeddings=6, beta_fast=2, mscale=1.0, mscale_all_dim=0.7),
    mtp_loss_scaling_factor=0.3,
)
PLAIN = evolve(
    DEEPSEEK,
    q_lora_rank=None,
    num_nextn_predict_layers=0,
    moe_router_enable_expert_bias=False,
    n_shared_experts=0,
    tie_word_embeddings=True,
    yarn=None,
)
QWEN = Qwen3MoeConfig(
    vocab_size=23,
    hidden_size=12,
    intermediate_size=10,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=4,
    num_experts=8,
    num_experts_per_tok=2,
    moe_intermediate_size=6,
    norm_topk_prob=True,
    mlp_only_layers=(1,),
)
ROWS, TOKENS = 2, 9


def model_and_weights(config, kernel_set=None):
    """With weights large enough that every part of the model matters, and biases that change what is chosen."""
    kernel_set = kernel_set or kernels("cpu")
    model = (DeepseekV3 if isinstance(config, DeepseekV3Config) else Qwen3)(config, kernel_set)
    generator = np.random.default_rng(3)
    weights = {
        name: value + 0.4 * generator.standard_normal(value.shape)
        for name, value in initial_weights(model, seed=1, dtype="float64").items()
    }
    return model, weights


def batch():
    generator = np.random.default_rng(5)
    ids, labels = generator.integers(0, 23, (2, ROWS, TOKENS), dtype=np.int32)
    mask = generator.random((ROWS, TOKENS)) < 0.7
    positions = np.tile(np.arange(TOKENS, dtype=np.int32), (ROWS, 1))
    return look_ahead(MicroBatch(ids, positions, labels, mask.astype(np.float32)))


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


class Written:
    """DeepSeek-V3 written out, one row, one token and one head at a time."""

    def __init__(self, config, weights):
        self.config, self.weights = config, weights

    def norm(self, x, name, eps=None):
        eps = self.config.rms_norm_eps if eps is None else eps
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * self.weights[f"{name}.weight"]

    def linear(self, x, name):
        return x @ self.weights[f"{name}.weight"].T

    def mlp(self, x, name):
        gate = self.linear(x, f"{name}.gate_proj")
        return self.linear(gate * sigmoid(gate) * self.linear(x, f"{name}.up_proj"), f"{name}.down_proj")

    def turn(self, x):
        """Neighbouring dimensions are a complex number."""
        yarn = self.config.yarn
        angles = np.arange(len(x))[:, None] * frequencies(x.shape[1], self.config.rope_theta, yarn)
        turned = (x[:, ::2] + 1j * x[:, 1::2]) * np.exp(1j * angles) * (yarn.table_scale if yarn else 1)
        return np.stack([turned.real, turned.imag], axis=2).reshape(x.shape)

    def attention(self, x, name):
        config = self.config
        nope, v_size = config.qk_nope_head_dim, config.v_head_dim
        if config.q_lora_rank is None:
            q = self.linear(x, f"{name}.q_proj")
        else:
            latent = self.norm(self.linear(x, f"{name}.q_a_proj"), f"{name}.q_a_layernorm", 1e-6)
            q = self.linear(latent, f"{name}.q_b_proj")
        compressed = self.linear(x, f"{name}.kv_a_proj_with_mqa")
        latent = self.norm(compressed[:, : config.kv_lora_rank], f"{name}.kv_a_layernorm", 1e-6)
        k_rotary = self.turn(compressed[:, config.kv_lora_rank :])
        kv = self.linear(latent, f"{name}.kv_b_proj")
        scale = (nope + config.qk_rope_head_dim) ** -0.5 * (config.yarn.softmax_scale if config.yarn else 1)
        heads = []
        for head in range(config.num_attention_heads):
            of_q, of_kv = (
                np.split(q, config.num_attention_heads, 1)[head],
                np.split(kv, config.num_attention_heads, 1)[head],
            )
            assert of_kv.shape[1] == nope + v_size
            q_nope, q_rotary = of_q[:, :nope], self.turn(of_q[:, nope:])
            outputs = []
            for token in range(len(x)):
                seen = slice(0, token + 1)
                scores = scale * (of_kv[seen, :nope] @ q_nope[token] + k_rotary[seen] @ q_rotary[token])
                outputs.append(np.exp(scores) / np.exp(scores).sum() @ of_kv[seen, nope:])
            heads.append(np.array(outputs))
        return self.linear(np.concatenate(heads, axis=1), f"{name}.o_proj")

    def chosen(self, scores, bias):
        """Ids of a token's experts: the best of the groups whose two best are best together."""
        config = self.config
        size = config.n_routed_experts // config.n_group
        ranked = [
            sorted(range(g * size, (g + 1) * size), key=lambda e: -(scores + bias)[e]) for g in range(config.n_group)
        ]
        best = sorted(ranked, key=lambda group: -sum((scores + bias)[expert] for expert in group[:2]))
        allowed = [expert for group in best[: config.topk_group] for expert in group]
        return sorted(allowed, key=lambda expert: -(scores + bias)[expert])[: config.num_experts_per_tok]

    def experts(self, x, name):
        config, weights = self.config, self.weights
        bias = weights.get(f"{name}.gate.e_score_correction_bias", np.zeros(config.n_routed_experts))
        out = self.mlp(x, f"{name}.shared_experts") if config.n_shared_experts else np.zeros_like(x)
        for token, row in enumerate(x):
            scores = sigmoid(weights[f"{name}.gate.weight"] @ row)
            ids = self.chosen(scores, bias)
            for expert in ids:
                gate, up = np.split(weights[f"{name}.experts.gate_up_proj"][expert] @ row, 2)
                made = weights[f"{name}.experts.down_proj"][expert] @ (gate * sigmoid(gate) * up)
                out[token] += config.routed_scaling_factor * scores[expert] / scores[ids].sum() * made
        return out

    def layer(self, x, name, has_experts):
        x = x + self.attention(self.norm(x, f"{name}.input_layernorm"), f"{name}.self_attn")
        normed = self.norm(x, f"{name}.post_attention_layernorm")
        return x + (self.experts if has_experts else self.mlp)(normed, f"{name}.mlp")

    def logits(self, ids, ahead):
        """Of a row, (S, V) each: of the next token, and of the one after it if the model predicts that."""
        config, table = self.config, self.weights["model.embed_tokens.weight"]
        x = table[ids]
        for layer in range(config.num_hidden_layers):
            x = self.layer(x, f"model.layers.{layer}", layer >= config.first_k_dense_replace)
        x = self.norm(x, "model.norm")
        head = "model.embed_tokens" if config.tie_word_embeddings else "lm_head"
        found = [self.linear(x, head)]
        if config.num_nextn_predict_layers:
            name = f"model.layers.{config.num_hidden_layers}"
            pair = np.concatenate([self.norm(table[ahead], f"{name}.enorm"), self.norm(x, f"{name}.hnorm")], axis=1)
            x = self.layer(self.linear(pair, f"{name}.eh_proj"), name, True)
            found.append(self.linear(self.norm(x, f"{name}.shared_head.norm"), head))
        return found


@pytest.mark.parametrize("config", [DEEPSEEK, PLAIN], ids=["all", "plain"])
def test_losses_and_logits_are_those_of_deepseek_written_out(config):
    model, weights = model_and_weights(config)
    micro_batch = batch()
    written, expected, of_rows = Written(config, weights), np.zeros(len(model.losses)), []
    for row in range(ROWS):
        found = written.logits(micro_batch.input_ids[row], micro_batch.ahead.input_ids[row])
        of_rows.append(found[0])
        for number, (of_loss, part) in enumerate(zip(found, (micro_batch, micro_batch.ahead), strict=False)):
            likelihood = of_loss - np.log(np.exp(of_loss).sum(axis=1, keepdims=True))
            each = likelihood[np.arange(TOKENS), part.labels[row]]
            expected[number] -= (each * part.loss_mask[row]).sum()
    assert len(expected) == 1 + config.num_nextn_predict_layers
    np.testing.assert_allclose(losses(model, weights, micro_batch), expected, rtol=1e-12)
    np.testing.assert_allclose(logits(model, weights, micro_batch.input_ids), of_rows, rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("config", [DEEPSEEK, PLAIN, QWEN], ids=["deepseek", "plain deepseek", "qwen"])
def test_the_gradient_of_every_weight_is_the_slope_of_the_loss(config):
    model, weights = model_and_weights(config)
    micro_batch, generator, step = batch(), np.random.default_rng(11), 1e-6
    value, gradients = loss_and_gradients(model, weights, micro_batch, loss_weights=model.loss_weights)
    assert value == pytest.approx(losses(model, weights, micro_batch) @ model.loss_weights, rel=1e-14)
    assert gradients.keys() == {weight.name for weight in model.weights if weight.trainable}
    for name, gradient in gradients.items():
        move = step * generator.standard_normal(gradient.shape)
        sides = [losses(model, {**weights, name: weights[name] + sign * move}, micro_batch) for sign in (1, -1)]
        change = (sides[0] - sides[1]) @ model.loss_weights
        np.testing.assert_allclose(2 * (gradient * move).sum(), change, rtol=2e-5, atol=1e-6 * step, err_msg=name)


def test_weights_of_deepseek_have_the_names_shapes_and_splits_of_a_checkpoint_with_stacked_experts():
    found = {
        weight.name: (weight.shape, weight.tp_dim, weight.tp_block)
        for weight in DeepseekV3(DEEPSEEK, kernels("cpu")).weights
    }
    attention = {
        "input_layernorm.weight": ((12,), None, 1),
        "self_attn.q_a_proj.weight": ((5, 12), None, 1),
        "self_attn.q_a_layernorm.weight": ((5,), None, 1),
        "self_attn.q_b_proj.weight": ((14, 5), 0, 7),
        "self_attn.kv_a_proj_with_mqa.weight": ((10, 12), None, 1),
        "self_attn.kv_a_layernorm.weight": ((6,), None, 1),
        "self_attn.kv_b_proj.weight": ((16, 6), 0, 8),
        "self_attn.o_proj.weight": ((12, 10), 1, 5),
        "post_attention_layernorm.weight": ((12,), None, 1),
    }
    dense = {
        "mlp.gate_proj.weight": ((10, 12), 0, 1),
        "mlp.up_proj.weight": ((10, 12), 0, 1),
        "mlp.down_proj.weight": ((12, 10), 1, 1),
    }
    experts = {
        "mlp.gate.weight": ((8, 12), None, 1),
        "mlp.gate.e_score_correction_bias": ((8,), None, 1),
        "mlp.experts.gate_up_proj": ((8, 12, 12), None, 1),
        "mlp.experts.down_proj": ((8, 12, 6), None, 1),
        "mlp.shared_experts.gate_proj.weight": ((12, 12), 0, 1),
        "mlp.shared_experts.up_proj.weight": ((12, 12), 0, 1),
        "mlp.shared_experts.down_proj.weight": ((12, 12), 1, 1),
    }
    further = {
        "enorm.weight": ((12,), None, 1),
        "hnorm.weight": ((12,), None, 1),
        "eh_proj.weight": ((12, 24), None, 1),
        "shared_head.norm.weight": ((12,), None, 1),
    }
    layers = [attention | dense, attention | experts, attention | experts | further]
    assert found == {
        "model.embed_tokens.weight": ((23, 12), 0, 1),
        "model.norm.weight": ((12,), None, 1),
        "lm_head.weight": ((23, 12), 0, 1),
        **{
            f"model.layers.{number}.{name}": value
            for number, layer in enumerate(layers)
            for name, value in layer.items()
        },
    }


@pytest.mark.parametrize(("config", "layers"), [(DEEPSEEK, (1, 2)), (QWEN, (0, 2))], ids=["deepseek", "qwen"])
def test_experts_are_split_over_expert_parallel_ranks_and_nothing_else_is(config, layers):
    model, _ = model_and_weights(config)
    split = {weight.name for weight in model.weights if weight.ep_dim == 0}
    names = ("gate_up_proj", "down_proj")
    assert split == {f"model.layers.{layer}.mlp.experts.{name}" for layer in layers for name in names}
    assert all(weight.ep_dim is None for weight in model.weights if weight.name not in split)


def test_a_model_names_its_losses_and_the_biases_that_a_step_moves():
    model, _ = model_and_weights(DEEPSEEK)
    assert model.losses == ("lm", "mtp")
    assert model.loss_weights == (1.0, 0.3)
    assert model.bias_update_rate == 1e-3
    assert {layer: bias.name for layer, bias in model.expert_biases.items()} == {
        f"model.layers.{layer}": f"model.layers.{layer}.mlp.gate.e_score_correction_bias" for layer in (1, 2)
    }
    assert {weight.name for weight in model.weights if not weight.trainable} == {
        bias.name for bias in model.expert_biases.values()
    }
    for config in (PLAIN, QWEN):
        model, _ = model_and_weights(config)
        assert (model.losses, model.loss_weights, model.expert_biases) == (("lm",), (1.0,), {})


def test_embedding_and_head_are_shared_by_both_predictions():
    units = DeepseekV3(DEEPSEEK, kernels("cpu")).units
    embedding, further, head = units[0], units[-2], units[-1]
    assert embedding.weights[0] is further.weights[1]
    assert [weight.name for weight in head.weights] == ["lm_head.weight"]
    tied = DeepseekV3(evolve(DEEPSEEK, tie_word_embeddings=True), kernels("cpu")).units
    assert tied[0].weights[0] is tied[-2].weights[1] is tied[-1].weights[0]


def test_the_further_prediction_sees_one_token_more_and_not_two():
    model, weights = model_and_weights(DEEPSEEK)
    micro_batch = batch()

    def of_token(place, ids):
        """Both losses of one prediction, with everything else masked."""
        mask = np.zeros((ROWS, TOKENS), np.float32)
        mask[:, place] = 1
        part = look_ahead(evolve(micro_batch, input_ids=ids))
        ahead = evolve(part.ahead, loss_mask=mask, labels=micro_batch.ahead.labels)
        return losses(model, weights, evolve(part, loss_mask=mask, ahead=ahead))

    before = of_token(4, micro_batch.input_ids)
    for place, changes in ((5, [False, True]), (6, [False, False]), (4, [True, True])):
        ids = micro_batch.input_ids.copy()
        ids[:, place] = (ids[:, place] + 1) % 23
        assert (of_token(4, ids) != before).tolist() == changes


class Asked:
    """Experts on one rank, and a list of what is to be balanced."""

    def __init__(self):
        self.experts = ExpertParallel.none(kernels("cpu"), [f"model.layers.{n}" for n in (1, 2)], 8).experts
        self.asked = []

    def balanced(self, layer, weights_TK, probabilities_TE, batch, routing):
        self.asked.append((layer, probabilities_TE.asnumpy(), batch, routing))
        return weights_TK


def test_each_layer_with_experts_is_balanced_where_the_file_asks_for_it():
    ep = Asked()
    _, weights = model_and_weights(DEEPSEEK)
    micro_batch = batch()
    losses(DeepseekV3(DEEPSEEK, kernels("cpu"), ep=ep), weights, micro_batch)
    assert ep.asked == []
    losses(DeepseekV3(evolve(DEEPSEEK, moe_aux_loss_coeff=0.01), kernels("cpu"), ep=ep), weights, micro_batch)
    layers, probabilities, batches, routings = zip(*ep.asked, strict=True)
    assert layers == ("model.layers.1", "model.layers.2")
    assert batches == (micro_batch, micro_batch)
    assert [(routing.balance, routing.balanced_over) for routing in routings] == [(0.01, "sequence")] * 2
    for of_layer in probabilities:
        np.testing.assert_allclose(of_layer.sum(axis=1), np.ones(ROWS * TOKENS), rtol=1e-14)


@pytest.mark.skipif("cpu" not in SETS, reason="float64 is for a CPU: run this on a machine without an NPU")
@pytest.mark.parametrize("config", [QWEN, DEEPSEEK, PLAIN], ids=["qwen3_moe", "deepseek_v3", "deepseek_v3 plain"])
def test_the_kernels_of_ascend_make_the_same_model(config, monkeypatch):
    model, weights = model_and_weights(config)
    on_ascend, _ = model_and_weights(config, kernel_set("ascend", monkeypatch, exact=True))
    (loss, gradients), (other, others) = (loss_and_gradients(made, weights, batch()) for made in (model, on_ascend))
    np.testing.assert_allclose(other, loss, rtol=1e-11)
    assert others.keys() == gradients.keys()
    for name, gradient in gradients.items():
        np.testing.assert_allclose(others[name], gradient, rtol=1e-9, atol=1e-11, err_msg=name)
