"""The sections `model` and `lora_config`, and what a model type sets where the file is silent."""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import Any

from attrs import Factory, evolve, frozen

from parallel_config.schema.setting import NOWHERE, setting

_QWEN, _QWEN_MOE, _DEEPSEEK = ("qwen3", "qwen3_moe"), ("qwen3_moe",), ("deepseek_v3",)
_EXPERTS = ("qwen3_moe", "deepseek_v3")
_DTYPES = ("float32", "bfloat16", "float16", "float64")
_AUXILIARY_LOSSES = ("none", "seq_aux_loss", "sub_seq_aux_loss", "aux_loss", "global_aux_loss", "gbs_aux_loss")


@frozen
class Model:
    """The model's sizes under their Hugging Face names.

    A field is None where the file writes null, or does not write it and the model type sets no default. Other
    keys are kept in `extra`. Qwen3-MoE calls its experts num_experts, DeepSeek-V3 n_routed_experts.
    """

    model_type: str | None = setting(None, about="Which model: qwen3, qwen3_moe or deepseek_v3.")
    architectures: str | None = setting(None, about="The model's class, as Hugging Face names it.")

    vocab_size: int | None = setting(None, minimum=1, about="Rows of the embedding.")
    seq_length: int | None = setting(None, minimum=1, about="Tokens of a sample.")
    hidden_size: int | None = setting(None, minimum=1, about="Width of the hidden states.")
    intermediate_size: int | None = setting(None, minimum=1, about="Inner width of a dense feed-forward part.")
    num_hidden_layers: int | None = setting(None, minimum=1, maximum=100_000, about="Layers.")
    num_attention_heads: int | None = setting(None, minimum=1, about="Heads of queries.")
    num_key_value_heads: int | None = setting(None, minimum=1, about="Heads of keys and values.", models=_QWEN)
    head_dim: int | None = setting(None, minimum=1, about="Width of a head.", models=_QWEN)
    max_position_embeddings: int | None = setting(None, minimum=1, about="Longest sequence; for YaRN the original one.")
    hidden_act: str | None = setting(
        None,
        options=("silu", "gelu", "fusedswiglu"),
        about="Activation of feed-forward parts; silu alone is implemented.",
    )
    rms_norm_eps: float | None = setting(None, minimum=0, about="Added to the mean square in norms.")
    initializer_range: float | None = setting(None, minimum=0, about="Standard deviation of initial weights.")
    tie_word_embeddings: bool | None = setting(None, about="Use the embedding as the output table, too.")
    rope_theta: float | None = setting(None, above=0, about="Base of the rotary frequencies.")
    rope_scaling: dict[str, Any] | None = setting(None, about="How rotary frequencies are stretched: YaRN or nothing.")
    attention_bias: bool | None = setting(None, about="Biases in the projections of attention.")
    attention_dropout: float | None = setting(
        None, minimum=0, below=1, about="Dropout in attention; 0 alone is implemented."
    )
    normalization: str | None = setting(None, about="Kind of norm; RMSNorm alone is implemented.")
    add_bias_linear: bool | None = setting(None, about="Biases in linear layers; false alone is implemented.")
    gated_linear_unit: bool | None = setting(None, about="Gated feed-forward parts; true alone is implemented.")

    multi_latent_attention: bool | None = setting(
        None, about="Latent attention, which DeepSeek-V3 has and Qwen3 has not."
    )
    q_lora_rank: int | None = setting(
        None, minimum=0, about="Rank of the queries' projection; null or 0: none.", models=_DEEPSEEK
    )
    kv_lora_rank: int | None = setting(
        None, minimum=1, about="Rank of the latent that keys and values come from.", models=_DEEPSEEK
    )
    qk_nope_head_dim: int | None = setting(
        None, minimum=1, about="Width of a head's part without rotary embedding.", models=_DEEPSEEK
    )
    qk_rope_head_dim: int | None = setting(
        None, minimum=1, about="Width of a head's part with rotary embedding.", models=_DEEPSEEK
    )
    v_head_dim: int | None = setting(None, minimum=1, about="Width of a value head.", models=_DEEPSEEK)

    n_routed_experts: int | None = setting(
        None, minimum=1, about="Experts of a layer, as DeepSeek-V3 calls them.", models=("qwen3", "deepseek_v3")
    )
    num_experts: int | None = setting(
        None, minimum=1, about="Experts of a layer, as Qwen3-MoE calls them.", models=_QWEN
    )
    num_experts_per_tok: int | None = setting(
        None, minimum=1, about="Experts that each token goes to.", models=_EXPERTS
    )
    n_shared_experts: int | None = setting(None, minimum=0, about="Experts that all tokens go to.")
    moe_intermediate_size: int | None = setting(None, minimum=1, about="Inner width of an expert.", models=_EXPERTS)
    first_k_dense_replace: int | None = setting(
        None, minimum=0, about="Layers at the beginning without experts.", models=_EXPERTS
    )
    moe_layer_freq: int | None = setting(None, minimum=1, about="Every so manieth layer has experts.", models=_EXPERTS)
    decoder_sparse_step: int | None = setting(
        None, minimum=1, about="Every so manieth layer has experts.", models=_QWEN_MOE
    )
    mlp_only_layers: tuple[int, ...] | None = setting(None, about="Layers without experts.", models=_QWEN_MOE)
    n_group: int | None = setting(
        None, minimum=1, about="Groups of experts, of which a token sees some.", models=_EXPERTS
    )
    topk_group: int | None = setting(None, minimum=1, about="Groups that a token sees.", models=_EXPERTS)
    routed_scaling_factor: float | None = setting(
        None, about="What the weights of experts are multiplied by.", models=_EXPERTS
    )
    norm_topk_prob: bool | None = setting(
        None, about="Let the weights of a token's experts add up to 1.", models=_EXPERTS
    )
    moe_router_enable_expert_bias: bool | None = setting(
        None, about="Choose experts with a bias that evens their loads.", models=_EXPERTS
    )
    moe_router_bias_update_rate: float | None = setting(
        None, minimum=0, maximum=1, about="How far that bias moves in a step.", models=_DEEPSEEK
    )
    moe_router_load_balancing_type: str | None = setting(
        None, options=_AUXILIARY_LOSSES, about="Which auxiliary loss evens the loads of experts.", models=_EXPERTS
    )
    moe_aux_loss_coeff: float | None = setting(
        None, minimum=0, about="What that loss is multiplied by; 0: no such loss.", models=_EXPERTS
    )
    num_nextn_predict_layers: int | None = setting(
        None, minimum=0, maximum=1, about="Layers that predict one token further: 0 or 1."
    )
    mtp_loss_scaling_factor: float | None = setting(
        None, minimum=0, about="What the loss of the further prediction is multiplied by.", models=_DEEPSEEK
    )

    use_flash_attention: bool | None = setting(None, about="Attention without the square of scores; always so here.")
    apply_rope_fusion: bool | None = setting(None, about="Fuse the rotary embedding.", acts=NOWHERE)
    use_attn_mask_compression: bool | None = setting(
        None, about="Causal mask in compressed form; masks are always held so here."
    )
    use_eod_attn_mask_compression: bool | None = setting(
        None, about="Mask of packed documents in compressed form; follows the dataset's create_compressed_eod_mask."
    )
    chunk_loss_num: int | None = setting(None, minimum=0, about="Compute the loss in so many pieces.", acts=NOWHERE)
    calculate_per_token_loss: bool | None = setting(
        None, about="Average over the valid tokens of the global batch, as this project always does."
    )
    params_dtype: str | None = setting(None, options=_DTYPES, about="Type of the weights that the optimizer updates.")
    compute_dtype: str | None = setting(
        None, options=_DTYPES, about="Type that the model computes in; on CPU ranks float32 or float64."
    )
    layernorm_compute_dtype: str | None = setting(
        None, options=_DTYPES, about="Type that norms compute in.", acts=NOWHERE
    )
    softmax_compute_dtype: str | None = setting(
        None, options=_DTYPES, about="Type that the softmax computes in.", acts=NOWHERE
    )
    rotary_dtype: str | None = setting(
        None, options=_DTYPES, about="Type that rotary embedding computes in.", acts=NOWHERE
    )
    pad_token_id: int | None = setting(None, about="The token that fills rows, which the exported config.json names.")
    ignore_token_id: int | None = setting(
        None, about="The label that does not count; here loss_mask alone decides.", acts=NOWHERE
    )
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


_EVERY_MODEL = (
    *("add_qkv_bias", "hidden_dropout", "partial_rotary_factor", "qk_layernorm", "use_sliding_window"),
    *("position_embedding_type", "scaling_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim"),
)
_EVERY_ROUTER = ("moe_expert_capacity_factor", "moe_router_force_expert_balance", "moe_z_loss_coeff", "scoring_func")

MODEL_EXTRAS: Mapping[str, tuple[str, ...]] = {
    "qwen3": (*_EVERY_MODEL, "use_qk_norm"),
    "qwen3_moe": (
        *_EVERY_MODEL,
        *_EVERY_ROUTER,
        *("use_qk_norm", "router_aux_loss_coef", "shared_expert_intermediate_size"),
    ),
    "deepseek_v3": (
        *_EVERY_MODEL,
        *_EVERY_ROUTER,
        *("topk_method", "rope_interleave", "moe_shared_expert_intermediate_size"),
    ),
}
"""Per model type, the keys beyond the fields above that it acts on, be it by refusing other values than its own."""


@frozen
class LoraConfig:
    """Low-rank adapters, which nothing trains yet: a run refuses the section."""

    target_modules: str = setting("", about="Modules that get adapters, as a regular expression.")
    exclude_layers: tuple[str, ...] | None = setting(None, about="Layers without adapters.")
    lora_rank: int = setting(8, minimum=1, about="Rank of an adapter.")
    lora_alpha: float = setting(16, above=0, about="An adapter is multiplied by lora_alpha / lora_rank.")
    lora_dropout: float = setting(0.0, minimum=0, below=1, about="Dropout before an adapter.")
    lora_a_std: float = setting(0.01, minimum=0, about="Standard deviation of an adapter's first matrix.")
    lora_b_std: float = setting(0.0, minimum=0, about="Standard deviation of an adapter's second matrix.")
