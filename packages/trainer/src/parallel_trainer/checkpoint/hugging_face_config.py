"""A model's sizes as Hugging Face's config.json and as the `model` section of a file, both ways.

Released checkpoints were written by transformers 4, and what it can read transformers 5 can too: so that is what is
written. What is read may have the names of either.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from types import MappingProxyType, SimpleNamespace
from typing import Any

from attrs import Factory, asdict, frozen

from parallel_trainer.errors import UserError
from parallel_trainer.models.config import CONFIGS
from parallel_trainer.models.deepseek_v3_config import DeepseekV3Config
from parallel_trainer.models.section import ModelConfig, UnsupportedModelError


@frozen
class Form:
    """How Hugging Face writes a model type.

    architecture: the class that has logits.
    names:        fields with another name than here, by theirs.
    defaults:     what transformers takes for a field that its file leaves out, where this is not the default here.
    constant:     fields of theirs that say how a model computes, and how this one does.
    """

    architecture: str
    names: Mapping[str, str] = Factory(dict)
    defaults: Mapping[str, Any] = Factory(dict)
    constant: Mapping[str, Any] = Factory(dict)


FORMS: Mapping[str, Form] = MappingProxyType(
    {
        "qwen3": Form("Qwen3ForCausalLM", constant={"use_sliding_window": False}),
        "qwen3_moe": Form(
            "Qwen3MoeForCausalLM", names={"num_local_experts": "num_experts"}, constant={"use_sliding_window": False}
        ),
        "deepseek_v3": Form(
            "DeepseekV3ForCausalLM",
            names={"num_local_experts": "n_routed_experts", "num_mtp_layers": "num_nextn_predict_layers"},
            defaults={"q_lora_rank": 1536},
            constant={"scoring_func": "sigmoid", "topk_method": "noaux_tc"},
        ),
    }
)
"""By model_type."""

_ONLY_HERE = frozenset(
    {
        "yarn",
        "moe_router_enable_expert_bias",
        "moe_router_bias_update_rate",
        "moe_router_load_balancing_type",
        "moe_aux_loss_coeff",
        "mtp_loss_scaling_factor",
        "moe_shared_expert_intermediate_size",
    }
)
"""Fields of configurations here that config.json has not: how a model is trained."""

_WITHOUT_EFFECT = frozenset(
    {
        "architectures", "auto_map", "model_type", "transformers_version", "torch_dtype", "dtype", "use_cache",
        "bos_token_id", "eos_token_id", "pad_token_id", "tokenizer_class", "output_router_logits",
        "router_aux_loss_coef", "aux_loss_alpha", "seq_aux", "ep_size", "pretraining_tp", "max_position_embeddings",
        "max_window_layers", "sliding_window", "layer_types", "rope_theta", "rope_scaling", "rope_parameters",
        "num_key_value_heads", "head_dim", "qk_head_dim",
    }
)  # fmt: skip
"""Fields of config.json that change no logits, or are read under another name."""

_TOKENS = ("pad_token_id", "bos_token_id", "eos_token_id")


@frozen
class HuggingFaceConfig:
    """What a config.json says.

    model:  the sizes.
    others: what else the `model` section of a file has, max_position_embeddings and token ids.
    notes:  sentences that the user should see once.
    """

    model: ModelConfig
    others: Mapping[str, Any] = Factory(dict)
    notes: tuple[str, ...] = ()

    @property
    def section(self) -> dict[str, Any]:
        """The `model` section of a file, every field with its value."""
        kind, config = model_type(self.model), self.model
        training = {name: getattr(config, name, None) for name in sorted(_ONLY_HERE - {"yarn"})}
        return {
            "model_type": kind,
            "architectures": FORMS[kind].architecture,
            **_sizes(config),
            **{name: value for name, value in training.items() if value is not None},
            **({"rope_scaling": _rope_scaling(config)} if config.yarn else {}),
            "hidden_act": "silu",
            **self.others,
        }

    @property
    def yaml(self) -> str:
        """The section as text of a YAML file."""
        return "model:\n" + "".join(f"  {name}: {_yaml(value)}\n" for name, value in self.section.items())


def model_type(config: ModelConfig) -> str:
    """The name under which files ask for a model."""
    return next(name for name, kind in CONFIGS.items() if kind is type(config))


def read_config(values: Mapping[str, Any]) -> HuggingFaceConfig:
    """The model of a config.json. UserError with everything in it that cannot be built here."""
    kind: Any = values.get("model_type")
    if kind not in FORMS:
        raise UserError(f"model_type is {kind!r}: the models here are {', '.join(map(repr, FORMS))}")
    form = FORMS[kind]
    problems = [*_another_architecture(values, form), *_sliding(values), *_quantized(values)]
    found = {**form.defaults, **{form.names.get(name, name): value for name, value in values.items()}}
    found |= _rope(found)
    # Acts on training alone, and in transformers only if output_router_logits is set.
    found.pop("router_aux_loss_coef", None)
    try:
        config = CONFIGS[kind].from_model_section(SimpleNamespace(**found))
    except UnsupportedModelError as error:
        problems += [problem.removeprefix("model.") for problem in error.problems]
    if problems:
        raise UserError("this model cannot be built here:", problems)
    unknown = found.keys() - _WITHOUT_EFFECT - CONFIGS[kind].acted_on()
    notes = [f"config.json has fields that are not known here: {', '.join(sorted(unknown))}."] if unknown else []
    others = {name: found[name] for name in ("max_position_embeddings", "pad_token_id") if found.get(name) is not None}
    return HuggingFaceConfig(config, others, tuple(notes))


def _another_architecture(values: Mapping[str, Any], form: Form) -> list[str]:
    names = values.get("architectures") or [form.architecture]
    return [] if names == [form.architecture] else [f"architectures is {names}: only {form.architecture} can be read."]


def _sliding(values: Mapping[str, Any]) -> list[str]:
    kinds = sorted(set(values.get("layer_types") or ()) - {"full_attention"})
    return [f"layer_types has {', '.join(kinds)}: every layer has full_attention here."] if kinds else []


def _quantized(values: Mapping[str, Any]) -> list[str]:
    problem = (
        "quantization_config is set: weights have to be plain numbers. Convert them to bfloat16 first, as DeepSeek's "
        "fp8_cast_bf16.py does, and remove the field."
    )
    return [problem] if values.get("quantization_config") else []


def _rope(found: Mapping[str, Any]) -> dict[str, Any]:
    """The fields about rotary embedding, from `rope_parameters` (transformers 5) or `rope_scaling` (before)."""
    scaling = dict(found.get("rope_parameters") or found.get("rope_scaling") or {})
    if "rope_type" in scaling:
        scaling.pop("type", None)
    fields = {name: scaling.pop(name) for name in ("rope_theta", "partial_rotary_factor") if name in scaling}
    fields["rope_scaling"] = {name: value for name, value in scaling.items() if value is not None} or None
    return fields


def _sizes(config: ModelConfig) -> dict[str, Any]:
    """The fields of a configuration that config.json has too, under the same names."""
    found = asdict(config, recurse=False, filter=lambda attribute, _: attribute.name not in _ONLY_HERE)
    return {name: list(value) if isinstance(value, tuple) else value for name, value in found.items()}


def _rope_scaling(config: ModelConfig) -> dict[str, Any] | None:
    if config.yarn is None:
        return None
    return {"rope_type": "yarn", **{name: value for name, value in asdict(config.yarn).items() if value is not None}}


def write_config(
    config: ModelConfig, *, dtype: str, others: Mapping[str, Any] = MappingProxyType({})
) -> dict[str, Any]:
    """The config.json of a model.

    dtype:  "float32", "bfloat16", ..., of the weights.
    others: a `model` section's other fields, of which max_position_embeddings is written, and token ids that are in the
        vocabulary: transformers makes no table for others.
    Raises UserError for a model that transformers cannot compute.
    """
    if isinstance(config, DeepseekV3Config):
        _check_deepseek(config)
    kind, found = model_type(config), _sizes(config)
    found.setdefault("num_key_value_heads", config.num_attention_heads)
    found["max_position_embeddings"] = others.get("max_position_embeddings") or _length(config)
    return {
        "architectures": [FORMS[kind].architecture],
        "model_type": kind,
        **found,
        **{name: _token(others.get(name), config.vocab_size) for name in _TOKENS},
        "rope_scaling": _rope_scaling(config),
        "hidden_act": "silu",
        "attention_dropout": 0.0,
        "use_cache": True,
        "torch_dtype": dtype,
        **FORMS[kind].constant,
    }


def _token(value: Any, vocab_size: int) -> int | None:
    return value if isinstance(value, int) and 0 <= value < vocab_size else None


def _length(config: ModelConfig) -> int:
    """What max_position_embeddings would be in a file that does not say it."""
    return 4096 if config.yarn is None else int(config.yarn.factor * config.yarn.original_max_position_embeddings)


def _check_deepseek(config: DeepseekV3Config) -> None:
    problems = []
    if config.moe_layer_freq != 1:
        problems.append(f"moe_layer_freq is {config.moe_layer_freq}: there every layer after the first has experts.")
    if not config.n_shared_experts:
        problems.append("n_shared_experts is 0: there every layer with experts has a shared one.")
    if problems:
        raise UserError("transformers' DeepSeek-V3 cannot compute this model:", problems)


def _yaml(value: Any) -> str:
    """A value as YAML on one line. YAML 1.1 reads a number with an exponent and without a point as text."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{name}: {_yaml(part)}" for name, part in value.items()) + "}"
    text = json.dumps(value)
    return text.replace("e", ".0e") if isinstance(value, float) and "e" in text and "." not in text else text
