"""The sections `model` and `lora_config`, and what a model type sets where the file is silent."""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import Any

from attrs import Factory, evolve, frozen

from parallel_config.schema.setting import setting

_DTYPES = ("float32", "bfloat16", "float16", "float64")


@frozen
class Model:
    """The model's sizes under their Hugging Face names.

    A field is None where the file writes null, or does not write it and the model type sets no default. Other
    keys are kept in `extra`. Qwen3-MoE calls its experts num_experts, DeepSeek-V3 n_routed_experts.
    """

    model_type: str | None = None
    architectures: str | None = None

    vocab_size: int | None = setting(None, minimum=1)
    seq_length: int | None = setting(None, minimum=1)
    hidden_size: int | None = setting(None, minimum=1)
    intermediate_size: int | None = setting(None, minimum=1)
    num_hidden_layers: int | None = setting(None, minimum=1, maximum=100_000)
    num_attention_heads: int | None = setting(None, minimum=1)
    num_key_value_heads: int | None = setting(None, minimum=1)
    head_dim: int | None = setting(None, minimum=1)
    max_position_embeddings: int | None = setting(None, minimum=1)
    hidden_act: str | None = setting(None, options=("silu", "gelu", "fusedswiglu"))
    rms_norm_eps: float | None = setting(None, minimum=0)
    initializer_range: float | None = setting(None, minimum=0)
    tie_word_embeddings: bool | None = None
    rope_theta: float | None = setting(None, above=0)
    rope_scaling: dict[str, Any] | None = None
    attention_bias: bool | None = None
    attention_dropout: float | None = setting(None, minimum=0, below=1)
    normalization: str | None = None
    add_bias_linear: bool | None = None
    gated_linear_unit: bool | None = None

    multi_latent_attention: bool | None = None
    q_lora_rank: int | None = setting(None, minimum=0)
    kv_lora_rank: int | None = setting(None, minimum=1)
    qk_nope_head_dim: int | None = setting(None, minimum=1)
    qk_rope_head_dim: int | None = setting(None, minimum=1)
    v_head_dim: int | None = setting(None, minimum=1)

    n_routed_experts: int | None = setting(None, minimum=1)
    num_experts: int | None = setting(None, minimum=1)
    num_experts_per_tok: int | None = setting(None, minimum=1)
    n_shared_experts: int | None = setting(None, minimum=0)
    moe_intermediate_size: int | None = setting(None, minimum=1)
    first_k_dense_replace: int | None = setting(None, minimum=0)
    moe_layer_freq: int | None = setting(None, minimum=1)
    decoder_sparse_step: int | None = setting(None, minimum=1)
    mlp_only_layers: tuple[int, ...] | None = None
    n_group: int | None = setting(None, minimum=1)
    topk_group: int | None = setting(None, minimum=1)
    routed_scaling_factor: float | None = None
    norm_topk_prob: bool | None = None
    moe_router_enable_expert_bias: bool | None = None
    moe_router_bias_update_rate: float | None = setting(None, minimum=0)
    moe_router_load_balancing_type: str | None = None
    moe_aux_loss_coeff: float | None = setting(None, minimum=0)
    num_nextn_predict_layers: int | None = setting(None, minimum=0, maximum=1)
    mtp_loss_scaling_factor: float | None = setting(None, minimum=0)

    use_flash_attention: bool | None = None
    apply_rope_fusion: bool | None = None
    use_attn_mask_compression: bool | None = None
    use_eod_attn_mask_compression: bool | None = None
    chunk_loss_num: int | None = setting(None, minimum=0)
    calculate_per_token_loss: bool | None = None
    params_dtype: str | None = setting(None, options=_DTYPES)
    compute_dtype: str | None = setting(None, options=_DTYPES)
    layernorm_compute_dtype: str | None = setting(None, options=_DTYPES)
    softmax_compute_dtype: str | None = setting(None, options=_DTYPES)
    rotary_dtype: str | None = setting(None, options=_DTYPES)
    pad_token_id: int | None = None
    ignore_token_id: int | None = None
    extra: dict[str, Any] = Factory(dict)

    @property
    def experts_field(self) -> str:
        """The field that says how many experts this model type has."""
        return "num_experts" if self.model_type == "qwen3_moe" else "n_routed_experts"

    @property
    def experts(self) -> int | None:
        """Routed experts of a layer; None for a model without."""
        value: int | None = getattr(self, self.experts_field)
        return value

    def with_defaults(self, written: Container[str] = ()) -> Model:
        """The same model with what its `model_type` sets, but for the fields that are `written`."""
        defaults = MODEL_DEFAULTS.get(self.model_type or "", {})
        silent = (name for name in defaults if getattr(self, name) is None and name not in written)
        return evolve(self, **{name: defaults[name] for name in silent})


_COMMON: Mapping[str, Any] = {
    "seq_length": 4096,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "initializer_range": 0.02,
    "tie_word_embeddings": False,
    "rope_theta": 1e4,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "normalization": "RMSNorm",
    "add_bias_linear": False,
    "gated_linear_unit": True,
    "use_flash_attention": True,
    "use_attn_mask_compression": False,
    "use_eod_attn_mask_compression": False,
    "chunk_loss_num": 0,
    "calculate_per_token_loss": False,
    "params_dtype": "float32",
    "compute_dtype": "bfloat16",
    "layernorm_compute_dtype": "float32",
    "softmax_compute_dtype": "float32",
    "rotary_dtype": "float32",
    "ignore_token_id": -100,
}

MODEL_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "qwen3": {
        **_COMMON,
        "vocab_size": 151936,
        "hidden_size": 4096,
        "intermediate_size": 22016,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "head_dim": 128,
        "max_position_embeddings": 32768,
        "pad_token_id": 151643,
    },
    "qwen3_moe": {
        **_COMMON,
        "vocab_size": 151936,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 24,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "max_position_embeddings": 32768,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "decoder_sparse_step": 1,
        "norm_topk_prob": False,
        "moe_aux_loss_coeff": 0.0,
        "pad_token_id": 151643,
    },
    "deepseek_v3": {
        **_COMMON,
        "vocab_size": 129280,
        "hidden_size": 7168,
        "intermediate_size": 18432,
        "num_hidden_layers": 61,
        "num_attention_heads": 128,
        "num_key_value_heads": 128,
        "max_position_embeddings": 4096,
        "multi_latent_attention": True,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "n_routed_experts": 256,
        "num_experts_per_tok": 8,
        "n_shared_experts": 1,
        "moe_intermediate_size": 2048,
        "first_k_dense_replace": 3,
        "moe_layer_freq": 1,
        "n_group": 8,
        "topk_group": 4,
        "routed_scaling_factor": 2.5,
        "norm_topk_prob": True,
        "moe_router_enable_expert_bias": True,
        "moe_router_bias_update_rate": 1e-3,
        "moe_router_load_balancing_type": "sub_seq_aux_loss",
        "moe_aux_loss_coeff": 0.0,
        "num_nextn_predict_layers": 1,
        "pad_token_id": 0,
    },
}
"""Per model type, the defaults of its fields: the reference's model configurations, and for qwen3_moe, which it does
not have in dynamic-graph mode, Hugging Face's sizes with the head size of the published checkpoints."""


@frozen
class LoraConfig:
    """Low-rank adapters; `target_modules` is a regular expression over module names."""

    target_modules: str = ""
    exclude_layers: tuple[str, ...] | None = None
    lora_rank: int = setting(8, minimum=1)
    lora_alpha: float = setting(16, above=0)
    lora_dropout: float = setting(0.0, minimum=0, below=1)
    lora_a_std: float = setting(0.01, minimum=0)
    lora_b_std: float = setting(0.0, minimum=0)
