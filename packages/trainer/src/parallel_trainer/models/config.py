"""Which models exist and what a file may ask of them, checked without importing MindSpore."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from attrs import NOTHING, fields, frozen

from parallel_trainer.errors import UserError


class UnsupportedModelError(UserError, ValueError):
    """A `model` section that is well formed and that no model here can be built from."""


@frozen(kw_only=True)
class Qwen3Config:
    """Sizes of a Qwen3 model under their Hugging Face names.

    head_dim is independent of hidden_size / num_attention_heads. max_position_embeddings bounds nothing here:
    rotary angles are computed for whatever positions come.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float = 1e-6
    initializer_range: float = 0.02
    tie_word_embeddings: bool = False
    rope_theta: float = 1e4
    attention_bias: bool = False

    @classmethod
    def from_model_section(cls, section: Any) -> Qwen3Config:
        """The `model` section of a file as a Qwen3 model; what the file leaves out has its default.

        Raises UnsupportedModelError with everything in the section that a Qwen3 model here cannot do.
        """
        values = {
            attribute.name: value
            for attribute in fields(cls)
            if (value := getattr(section, attribute.name, None)) is not None
        }
        problems = [
            f"model.{attribute.name} is missing: a Qwen3 model has no default size for it."
            for attribute in fields(cls)
            if attribute.default is NOTHING and attribute.name not in values
        ]
        problems += _without_implementation(section)
        if not problems:
            config = cls(**values)
            problems = _impossible_sizes(config)
        if problems:
            raise UnsupportedModelError("The model section cannot be built as Qwen3:", problems)
        return config


# Fields that change what a model computes, and the only values that this Qwen3 computes.
_ONLY = {
    "hidden_act": ("silu",),
    "normalization": ("RMSNorm",),
    "rope_scaling": (),
    "attention_dropout": (0,),
    "add_bias_linear": (False,),
    "gated_linear_unit": (True,),
    "multi_latent_attention": (False,),
    "n_routed_experts": (0,),
    "n_shared_experts": (0,),
    "num_nextn_predict_layers": (0,),
    "use_sliding_window": (False,),
    "add_qkv_bias": (False,),
    "use_qk_norm": (True,),
    "qk_layernorm": (True,),
    "partial_rotary_factor": (1, None),
}


def _without_implementation(section: Any) -> list[str]:
    extra = getattr(section, "extra", {})
    problems = []
    for name, possible in _ONLY.items():
        value = getattr(section, name, extra.get(name))
        if value is not None and value not in possible:
            use = f"use {possible[0]!r} or leave the field out" if possible else "leave the field out"
            problems.append(f"model.{name} is {value!r}: Qwen3 cannot do that here; {use}.")
    return problems


def _impossible_sizes(config: Qwen3Config) -> list[str]:
    problems = []
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    if heads % kv_heads:
        divisors = ", ".join(str(number) for number in range(1, heads + 1) if heads % number == 0)
        problems.append(
            f"model.num_key_value_heads is {kv_heads}: it has to divide num_attention_heads {heads}; "
            f"use one of {divisors}."
        )
    if config.head_dim % 2:
        problems.append(
            f"model.head_dim is {config.head_dim}: rotary embedding turns dimensions in pairs, so it has to "
            f"be even; use {config.head_dim + 1}."
        )
    return problems


_CONFIGS: dict[str, Callable[[Any], Qwen3Config]] = {"qwen3": Qwen3Config.from_model_section}


def model_config(section: Any) -> Qwen3Config:
    """The configuration that `section.model_type` asks for.

    section: the `model` section of a file, or any object with its fields as attributes.
    Raises UnsupportedModelError for a model type that does not exist or that cannot do what the section says.
    """
    if section.model_type not in _CONFIGS:
        raise UnsupportedModelError(
            f"model.model_type is {section.model_type!r}: there is no such model here; "
            f"it has to be one of {', '.join(map(repr, _CONFIGS))}."
        )
    return _CONFIGS[section.model_type](section)
