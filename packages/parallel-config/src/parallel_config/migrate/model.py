"""The model: `model.model_config`, and the Hugging Face configuration that completes it.

Sources, in the mindformers 2.1.0 wheel: models/build_config.py (`merge_model_config`: what the file writes wins over
config.json), parallel_core/transformer_config_utils.py (`COMMON_CONFIG_MAPPING`: which names mean the same),
models/*/configuration_*.py and parallel_core/transformer_config.py (defaults).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from attrs import frozen

from parallel_config.migrate.draft import Draft, Kind, Left
from parallel_config.migrate.rules import Convert, by
from parallel_config.migrate.without import reason
from parallel_config.rules.required import ARCHITECTURES
from parallel_config.schema.model import MODEL_DEFAULTS, Model
from parallel_config.value_types import known_keys

SECTION = "model.model_config"
_OPEN = frozenset(
    {
        *("position_embedding_type", "scaling_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim"),
        *("rope_interleave", "partial_rotary_factor", "use_sliding_window", "hidden_dropout", "qk_layernorm"),
        *("scoring_func", "topk_method", "moe_shared_expert_intermediate_size", "moe_z_loss_coeff"),
        *("moe_expert_capacity_factor", "moe_router_force_expert_balance"),
    }
)
"""Fields that models read although the schema's open section does not name them."""

_KNOWN = known_keys(Model) | _OPEN
_TOP = "num_experts_per_tok"
_EXPERTS = ("num_experts", "n_routed_experts", "expert_num", "num_moe_experts")
_ALIASES: Mapping[str, tuple[str, ...]] = {
    "num_hidden_layers": ("num_layers", "n_layer"),
    "num_attention_heads": ("num_heads", "n_head"),
    "num_key_value_heads": ("n_kv_heads", "num_query_groups"),
    "intermediate_size": ("ffn_hidden_size",),
    "head_dim": ("kv_channels",),
    "rms_norm_eps": ("layernorm_epsilon", "layer_norm_epsilon"),
    "attention_bias": ("qkv_has_bias", "add_qkv_bias"),
    "initializer_range": ("init_method_std",),
    "rope_theta": ("theta", "rotary_base"),
    "scaling_factor": ("factor", "rotary_scaling_factor"),
    "max_position_embeddings": ("original_max_position_embeddings",),
    "position_embedding_type": ("extend_method",),
    "params_dtype": ("param_init_type",),
    "qk_layernorm": ("use_qk_norm",),
    "num_nextn_predict_layers": ("mtp_depth", "mtp_num_layers"),
    "mtp_loss_scaling_factor": ("mtp_loss_factor",),
    "moe_intermediate_size": ("moe_ffn_hidden_size",),
    "num_experts_per_tok": ("num_experts_chosen", "moe_router_topk"),
    "n_shared_experts": ("shared_expert_num",),
    "n_group": ("moe_router_num_groups",),
    "topk_group": ("moe_router_group_topk",),
    "routed_scaling_factor": ("moe_router_topk_scaling_factor",),
    "scoring_func": ("use_gating_sigmoid", "moe_router_score_function"),
    "moe_router_enable_expert_bias": ("balance_via_topk_bias",),
    "moe_router_bias_update_rate": ("topk_bias_update_rate",),
    "moe_z_loss_coeff": ("z_loss_factor",),
    "moe_expert_capacity_factor": ("capacity_factor",),
    "apply_rope_fusion": ("use_fused_rope",),
    "qk_nope_head_dim": ("qk_head_dim",),
    "qk_rope_head_dim": ("qk_pos_emb_head_dim",),
}
"""By the name here, what MindFormers calls the field as well."""

_DTYPES = {"bf16": "bfloat16", "fp32": "float32", "fp16": "float16", "fp64": "float64"}
_ACTIVATIONS = {"swiglu": "silu", "fusedswiglu": "silu"}
_BALANCES = {"gbs_aux_loss": "global_aux_loss"}


def _only_item(value: Any) -> Any:
    return value[0] if isinstance(value, list) and len(value) == 1 else value


def _scoring(value: Any) -> Any:
    return {True: "sigmoid", False: "softmax"}[value] if isinstance(value, bool) else value


def _at_least_one(value: Any) -> Any:
    return 1 if value == 0 and not isinstance(value, bool) else value


_CONVERT: Mapping[str, tuple[Convert, str]] = {
    "architectures": (_only_item, ""),
    "hidden_act": (by(_ACTIVATIONS), "SiLU of a gated unit, by its name here"),
    "scoring_func": (_scoring, ""),
    "n_group": (_at_least_one, "0 means no groups, which is one group"),
    "topk_group": (_at_least_one, "0 means no groups, which is one group"),
    "moe_router_load_balancing_type": (
        by(_BALANCES),
        "the loss over all tokens of a step, by its name in dynamic-graph files",
    ),
    "params_dtype": (by(_DTYPES), ""),
    "compute_dtype": (by(_DTYPES), ""),
    "layernorm_compute_dtype": (by(_DTYPES), ""),
    "softmax_compute_dtype": (by(_DTYPES), ""),
    "rotary_dtype": (by(_DTYPES), ""),
}


@frozen
class HuggingFace:
    """A config.json: its values, and how messages name the file."""

    values: Mapping[str, Any]
    name: str


def model(draft: Draft, model_type: str, completing: HuggingFace | None) -> None:
    """Carry the model's sizes: those that the file writes, then those of config.json, then defaults that differ."""
    _tied(draft)
    for path in draft.keys(SECTION):
        key = path.removeprefix(f"{SECTION}.")
        name = name_here(key, model_type)
        if name is None or not draft.has(path):
            continue
        if draft.new_value(f"model.{name}") is not None:
            draft.refuse(
                path, f"is another name of {name}, which is written too", "Keep one: MindFormers refuses both."
            )
        value, how = _converted(key, name, draft.get(path))
        draft.carry(path, f"model.{name}", value, how)
    if completing is not None:
        _complete(draft, model_type, completing)
    _defaults(draft, model_type)


def _tied(draft: Draft) -> None:
    """Embedding and head are tied by tie_word_embeddings, or by the opposite of the other field."""
    tied, apart = f"{SECTION}.tie_word_embeddings", f"{SECTION}.untie_embeddings_and_output_weights"
    if not draft.has(apart):
        return
    other = draft.switch(apart, True)
    if not draft.has(tied):
        how = "the opposite of untie_embeddings_and_output_weights"
        draft.carry(apart, "model.tie_word_embeddings", not other, how)
    elif draft.switch(tied, not other) == other:
        draft.refuse(apart, f"contradicts tie_word_embeddings {draft.get(tied)}", "Mend the old file first.")
    else:
        draft.leave(apart, "tie_word_embeddings says it")


def name_here(key: str, model_type: str) -> str | None:
    """The field of `model` that a key of MindFormers or Hugging Face stands for; None: none."""
    if key in _EXPERTS:
        return Model(model_type=model_type).experts_field if MODEL_DEFAULTS[model_type].get(_TOP) else None
    if key in _KNOWN:
        return key
    return next((name for name, aliases in _ALIASES.items() if key in aliases), None)


def _converted(key: str, name: str, value: Any) -> tuple[Any, str]:
    """The value here, and how it came about where it is another one."""
    convert, how = _CONVERT.get(name, (None, ""))
    converted = value if convert is None else convert(value)
    return converted, how if converted != value else ""


def _complete(draft: Draft, model_type: str, completing: HuggingFace) -> None:
    """What config.json says and the file does not."""
    for key, value in completing.values.items():
        name = name_here(key, model_type)
        if value is None or (name is not None and draft.new_value(f"model.{name}") is not None):
            continue
        if name is None:
            why, kind = reason(f"{SECTION}.{key}", value)
            draft.left.append(Left(f"{completing.name}: {key}", value, why, kind))
        else:
            draft.carry((), f"model.{name}", _converted(key, name, value)[0], f"from {completing.name}")


def _defaults(draft: Draft, model_type: str) -> None:
    """What the old file leaves to defaults that are others here."""
    if draft.new_value("model.model_type") is None:
        draft.carry((), "model.model_type", model_type, "the model that the file names")
    if draft.new_value("model.architectures") is None:
        draft.carry((), "model.architectures", ARCHITECTURES[model_type], "the class of this model_type")
    if draft.new_value("model.seq_length") is None:
        path = "train_dataset.data_loader.config.seq_length"
        if draft.has(path):
            draft.carry(path, "model.seq_length", draft.get(path), "the data's: model_config is silent")
    hidden, heads = draft.new_value("model.hidden_size"), draft.new_value("model.num_attention_heads")
    if model_type == "qwen3_moe" and draft.new_value("model.head_dim") is None and _are_sizes(hidden, heads):
        how = f"MindFormers' default: hidden_size {hidden} // num_attention_heads {heads}"
        draft.carry((), "model.head_dim", hidden // heads, how)
    if model_type != "deepseek_v3" and draft.new_value("model.hidden_dropout") is None:
        why = "is not written, and its default in graph mode is 0.1: here nothing is dropped"
        draft.warn(f"{SECTION}.hidden_dropout", why, Kind.TRAINED)


def _are_sizes(*values: Any) -> bool:
    return all(isinstance(value, int) and value > 0 for value in values)
