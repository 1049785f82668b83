"""Small models of every kind, here and in Hugging Face `transformers`, and rows of tokens for them."""

from __future__ import annotations

import numpy as np
import torch
import transformers
from parallel_trainer.batch import MicroBatch
from parallel_trainer.checkpoint.hugging_face_config import write_config
from parallel_trainer.kernels import kernels
from parallel_trainer.models import build_model
from parallel_trainer.models.config import DeepseekV3Config, Qwen3Config, Qwen3MoeConfig
from parallel_trainer.models.rope import Yarn

ROWS, TOKENS, VOCABULARY = 2, 70, 61

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


def peer_model(config, dtype="float32"):
    """A Hugging Face model with random weights, large enough for every part to matter."""
    values = write_config(config, dtype=dtype)
    peer = transformers.AutoConfig.for_model(**values, attn_implementation="eager", experts_implementation="eager")
    return randomized(transformers.AutoModelForCausalLM.from_config(peer), 4).to(getattr(torch, dtype))


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
    return build_model(config, kernels("cpu"))


def micro_batch():
    generator = np.random.default_rng(5)
    ids, labels = generator.integers(0, VOCABULARY, (2, ROWS, TOKENS), dtype=np.int32)
    labels[generator.random(labels.shape) < 0.3] = -100
    return MicroBatch(ids, np.tile(np.arange(TOKENS, dtype=np.int32), (ROWS, 1)), labels)


def values(model):
    biases = {name: bias for name, bias in model.named_buffers() if name.endswith("e_score_correction_bias")}
    return {name: tensor.detach().numpy() for name, tensor in {**dict(model.named_parameters()), **biases}.items()}


def our_name(name, layer):
    """The name here of a weight of transformers' module for a further prediction, whose layer has this number."""
    for theirs, ours in (
        ("mtp_block.", ""),
        ("post_norm.", "shared_head.norm."),
        ("layers.0.", f"model.layers.{layer}."),
    ):
        name = name.replace(theirs, ours)
    return name
