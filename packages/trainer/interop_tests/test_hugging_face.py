"""Models here and in Hugging Face `transformers`: same weights in, same logits, losses and gradients out."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import transformers
from attrs import asdict
from parallel_trainer.batch import MicroBatch, look_ahead
from parallel_trainer.kernels import kernels
from parallel_trainer.models.config import DeepseekV3Config, Qwen3Config, Qwen3MoeConfig
from parallel_trainer.models.deepseek_v3 import DeepseekV3
from parallel_trainer.models.qwen3 import Qwen3
from parallel_trainer.models.rope import Yarn
from parallel_trainer.models.single import logits, loss_and_gradients, losses
from transformers.modeling_layers import MtpModel

ROWS, TOKENS, VOCABULARY = 2, 70, 61
# Logits and gradients: relative to the largest element of the array.
TOLERANCE = {"float32": 2e-4, "float64": 1e-9}

SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
QWEN = SIZES | {"num_key_value_heads": 4, "head_dim": 8}
QWEN_EXPERTS = QWEN | {
    "num_key_value_heads": 2,
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 12,
}
DEEPSEEK = SIZES | {
    "q_lora_rank": 12,
    "kv_lora_rank": 10,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
    "n_routed_experts": 8,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 12,
    "first_k_dense_replace": 1,
    "n_group": 4,
    "topk_group": 2,
    "num_nextn_predict_layers": 0,
}
# Short enough for some pairs to be slowed down, some kept and some blended.
YARN = {"factor": 4.0, "original_max_position_embeddings": 64, "beta_fast": 4.0}

CASES = {
    "qwen3 untied": Qwen3Config(**QWEN),
    "qwen3 tied": Qwen3Config(**QWEN, tie_word_embeddings=True),
    "qwen3 two heads share keys": Qwen3Config(**QWEN | {"num_key_value_heads": 2}),
    "qwen3 four heads share keys": Qwen3Config(**QWEN | {"num_key_value_heads": 1}),
    "qwen3 wide heads": Qwen3Config(**QWEN | {"head_dim": 20, "num_key_value_heads": 2}),
    "qwen3 attention bias": Qwen3Config(**QWEN, attention_bias=True),
    "qwen3 long rotary": Qwen3Config(**QWEN, rope_theta=1e6, rms_norm_eps=1e-5),
    "qwen3 yarn": Qwen3Config(**QWEN, yarn=Yarn(**YARN)),
    "qwen3 all at once": Qwen3Config(
        **QWEN | {"num_key_value_heads": 2, "head_dim": 12},
        attention_bias=True,
        rope_theta=1e6,
        tie_word_embeddings=True,
    ),
    "qwen3_moe": Qwen3MoeConfig(**QWEN_EXPERTS),
    "qwen3_moe normalized": Qwen3MoeConfig(**QWEN_EXPERTS, norm_topk_prob=True),
    "qwen3_moe one expert a token": Qwen3MoeConfig(**QWEN_EXPERTS | {"num_experts_per_tok": 1}),
    "qwen3_moe every second layer": Qwen3MoeConfig(**QWEN_EXPERTS, decoder_sparse_step=2),
    "qwen3_moe one dense layer": Qwen3MoeConfig(**QWEN_EXPERTS, mlp_only_layers=[1], norm_topk_prob=True),
    "deepseek_v3": DeepseekV3Config(**DEEPSEEK),
    "deepseek_v3 no query rank": DeepseekV3Config(**DEEPSEEK | {"q_lora_rank": None}),
    "deepseek_v3 yarn": DeepseekV3Config(**DEEPSEEK, yarn=Yarn(**YARN, mscale=1.0, mscale_all_dim=1.0)),
    "deepseek_v3 yarn that scales": DeepseekV3Config(**DEEPSEEK, yarn=Yarn(**YARN, mscale=1.0, mscale_all_dim=0.7)),
    "deepseek_v3 yarn by factor": DeepseekV3Config(**DEEPSEEK, yarn=Yarn(**YARN)),
    "deepseek_v3 not interleaved": DeepseekV3Config(**DEEPSEEK, rope_interleave=False),
    "deepseek_v3 one group": DeepseekV3Config(**DEEPSEEK | {"n_group": 1, "topk_group": 1}),
    "deepseek_v3 two shared experts": DeepseekV3Config(**DEEPSEEK, n_shared_experts=2, routed_scaling_factor=1.0),
    "deepseek_v3 weights not normalized": DeepseekV3Config(**DEEPSEEK, norm_topk_prob=False),
    "deepseek_v3 all dense": DeepseekV3Config(**DEEPSEEK | {"first_k_dense_replace": 2}),
    "deepseek_v3 wide values": DeepseekV3Config(
        **DEEPSEEK | {"v_head_dim": 20}, attention_bias=True, tie_word_embeddings=True, rms_norm_eps=1e-5
    ),
}
FURTHER = {
    "deepseek_v3 further": DeepseekV3Config(**DEEPSEEK | {"num_nextn_predict_layers": 1}),
    "deepseek_v3 further, tied, yarn": DeepseekV3Config(
        **DEEPSEEK | {"num_nextn_predict_layers": 1}, tie_word_embeddings=True, yarn=Yarn(**YARN)
    ),
}


@pytest.fixture(params=["float32", "float64"])
def dtype(request, monkeypatch):
    """The peer computes norms, routers and angles in float32 whatever the model's type; for float64 that is float64."""
    if request.param == "float64":
        monkeypatch.setattr(torch, "float32", torch.float64)
        monkeypatch.setattr(torch, "float", torch.float64)
    return request.param


def peer_model(config, dtype):
    """A Hugging Face model with random weights, large enough for every part to matter."""
    name = {Qwen3Config: "Qwen3", Qwen3MoeConfig: "Qwen3Moe", DeepseekV3Config: "DeepseekV3"}[type(config)]
    fields = {name: value for name, value in asdict(config).items() if not name.startswith("moe_router")}
    if name == "Qwen3Moe":
        fields["mlp_only_layers"] = list(fields["mlp_only_layers"])
    fields.setdefault("num_key_value_heads", config.num_attention_heads)
    rope, yarn = {"rope_type": "default", "rope_theta": fields.pop("rope_theta")}, fields.pop("yarn")
    if yarn is not None:
        rope |= {"rope_type": "yarn", **{name: value for name, value in yarn.items() if value is not None}}
    model = getattr(transformers, f"{name}ForCausalLM")(
        getattr(transformers, f"{name}Config")(
            **fields, rope_parameters=rope, attn_implementation="eager", experts_implementation="eager"
        )
    )
    return randomized(model, 4).to(getattr(torch, dtype))


def randomized(model, seed):
    generator = torch.Generator().manual_seed(seed)
    biases = [bias for name, bias in model.named_buffers() if name.endswith("e_score_correction_bias")]
    with torch.no_grad():
        for weight in (*model.parameters(), *biases):
            # What a part of a model starts with may be memory as it was.
            center = 1.0 if weight.ndim == 1 else 0.0
            weight.copy_(center + 0.2 * torch.randn(weight.shape, generator=generator, dtype=weight.dtype))
    return model


def our_model(config):
    return (DeepseekV3 if isinstance(config, DeepseekV3Config) else Qwen3)(config, kernels("cpu"))


def micro_batch():
    generator = np.random.default_rng(5)
    ids, labels = generator.integers(0, VOCABULARY, (2, ROWS, TOKENS), dtype=np.int32)
    labels[generator.random(labels.shape) < 0.3] = -100
    return MicroBatch(ids, np.tile(np.arange(TOKENS, dtype=np.int32), (ROWS, 1)), labels)


def values(model):
    biases = {name: bias for name, bias in model.named_buffers() if name.endswith("e_score_correction_bias")}
    return {name: tensor.detach().numpy() for name, tensor in {**dict(model.named_parameters()), **biases}.items()}


def loss_of(found, labels, mask=None):
    each = torch.nn.functional.cross_entropy(
        found.flatten(0, 1), torch.from_numpy(labels).long().flatten(), reduction="none"
    )
    return (each if mask is None else each * torch.from_numpy(mask).flatten()).sum()


def assert_close(ours, theirs, dtype, name):
    scale = np.abs(theirs).max()
    assert scale > 0, name
    difference = np.abs(ours - theirs).max() / scale
    assert difference < TOLERANCE[dtype], f"{name}: {difference:.1e}"


@pytest.mark.parametrize("case", CASES)
def test_logits_loss_and_gradients(case, dtype):
    theirs, ours, batch = peer_model(CASES[case], dtype), our_model(CASES[case]), micro_batch()
    weights = values(theirs)
    assert {name: value.shape for name, value in weights.items()} == {
        weight.name: weight.shape for weight in ours.weights
    }
    their_logits = theirs(torch.from_numpy(batch.input_ids).long()).logits
    their_loss = loss_of(their_logits, batch.labels)
    their_loss.backward()
    loss, gradients = loss_and_gradients(ours, weights, batch)

    assert_close(logits(ours, weights, batch.input_ids), their_logits.detach().numpy(), dtype, "logits")
    assert_close(np.array(loss), their_loss.detach().numpy(), dtype, "loss")
    assert gradients.keys() == dict(theirs.named_parameters()).keys()
    for name, weight in theirs.named_parameters():
        assert_close(gradients[name], weight.grad.numpy(), dtype, name)


def our_name(name, layer):
    for theirs, ours in (
        ("mtp_block.", ""),
        ("post_norm.", "shared_head.norm."),
        ("layers.0.", f"model.layers.{layer}."),
    ):
        name = name.replace(theirs, ours)
    return name


@pytest.mark.parametrize("case", FURTHER)
def test_prediction_of_one_token_further(case, dtype):
    config = FURTHER[case]
    main, ours, batch = peer_model(config, dtype), our_model(config), look_ahead(micro_batch())
    module = randomized(MtpModel(main, 1), 6).to(getattr(torch, dtype))
    own = {our_name(name, config.num_hidden_layers): name for name in values(module) if name.startswith("layers.0.")}
    weights = values(main) | {ours: values(module)[theirs] for ours, theirs in own.items()}
    assert weights.keys() == {weight.name for weight in ours.weights}

    ids, ahead = (torch.from_numpy(found.input_ids).long() for found in (batch, batch.ahead))
    hidden = main.model(ids).last_hidden_state
    angles = main.model.rotary_emb(hidden, torch.arange(TOKENS)[None])
    mask = torch.full((TOKENS, TOKENS), -torch.inf, dtype=hidden.dtype).triu(1)[None, None]
    further = module.layers[0](main.model.embed_tokens(ahead), hidden, angles, mask, None, None)
    theirs = [
        loss_of(main.lm_head(hidden), batch.labels),
        loss_of(main.lm_head(further), batch.ahead.labels, batch.ahead.loss_mask),
    ]
    (theirs[0] + 0.3 * theirs[1]).backward()

    assert_close(losses(ours, weights, batch), np.array([loss.item() for loss in theirs]), dtype, "losses")
    assert_close(logits(ours, weights, batch.input_ids), main.lm_head(hidden).detach().numpy(), dtype, "logits")
    _, gradients = loss_and_gradients(ours, weights, batch, loss_weights=(1, 0.3))
    expected = dict(main.named_parameters()) | {
        ours: module.get_parameter(theirs) for ours, theirs in own.items() if "correction_bias" not in theirs
    }
    assert gradients.keys() == expected.keys()
    for name, weight in expected.items():
        assert_close(gradients[name], weight.grad.numpy(), dtype, name)
