"""What all models read from the `model` section of a file, and how they refuse what they cannot do."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar, Self

from attrs import NOTHING, fields, frozen

from parallel_trainer.errors import UserError
from parallel_trainer.models.rope import FLAT_FIELDS, Yarn, read_yarn
from parallel_trainer.models.router import Routing, Tokens


class UnsupportedModelError(UserError, ValueError):
    """A `model` section that is well formed and that no model here can be built from."""


@frozen(kw_only=True)
class ModelConfig:
    """Sizes that every model has, under their Hugging Face names.

    max_position_embeddings bounds nothing here: rotary angles are computed for whatever positions come.

    NAME: the model's name in messages.
    ONLY: fields that change what a model computes, and the only values with which this one computes.
    """

    NAME: ClassVar[str]
    ONLY: ClassVar[dict[str, tuple[Any, ...]]] = {
        "hidden_act": ("silu",),
        "normalization": ("RMSNorm",),
        "attention_dropout": (0,),
        "hidden_dropout": (0,),
        "add_bias_linear": (False,),
        "gated_linear_unit": (True,),
        "use_sliding_window": (False,),
        "add_qkv_bias": (False,),
        "partial_rotary_factor": (1,),
    }

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    rms_norm_eps: float = 1e-6
    initializer_range: float = 0.02
    tie_word_embeddings: bool = False
    rope_theta: float = 1e4
    yarn: Yarn | None = None
    attention_bias: bool = False

    @property
    def routing(self) -> Routing | None:
        """The router of a layer with experts; None for a model without."""
        return None

    def has_experts(self, layer: int) -> bool:
        """Whether the feed-forward part of a layer, counted from 0, is experts."""
        return False

    @property
    def balanced_over(self) -> Tokens | None:
        """The tokens that the auxiliary loss balances together; None without such a loss."""
        return self.routing.balanced_over if self.routing and self.routing.balance else None

    @property
    def expert_layers(self) -> tuple[str, ...]:
        """Names of the layers with experts, "model.layers.3"."""
        return tuple(f"model.layers.{number}" for number in range(self.num_hidden_layers) if self.has_experts(number))

    @classmethod
    def from_model_section(cls, section: Any) -> Self:
        """The `model` section of a file as this model; what the file leaves out has its default.

        Raises UnsupportedModelError with everything in the section that the model cannot do here.
        """
        names = {attribute.name: attribute.default is NOTHING for attribute in fields(cls)}
        values = {name: value for name in names if (value := _value(section, name)) is not None}
        flat = {name: value for name in FLAT_FIELDS if (value := _value(section, name)) is not None}
        yarn, problems = read_yarn(_value(section, "rope_scaling"), flat, _value(section, "max_position_embeddings"))
        problems += [
            f"model.{name} is missing: a {cls.NAME} model has no default size for it."
            for name, needed in names.items()
            if needed and name not in values
        ]
        problems += cls._without_implementation(section)
        if not problems:
            config = cls(**{**values, "yarn": yarn})
            problems += config.contradictions(section)
        if problems:
            raise UnsupportedModelError(f"The model section cannot be built as {cls.NAME}:", problems)
        return config

    @classmethod
    def acted_on(cls) -> frozenset[str]:
        """Fields of the section that have an effect, or whose only values accepted are those the model has anyway."""
        own = {attribute.name for attribute in fields(cls)} - {"yarn"}
        return frozenset(own | cls.ONLY.keys() | {"rope_scaling", "max_position_embeddings", *FLAT_FIELDS})

    @classmethod
    def _without_implementation(cls, section: Any) -> Iterator[str]:
        for name, possible in cls.ONLY.items():
            value = _value(section, name)
            if value is not None and value not in possible:
                use = f"use {possible[0]!r} or leave the field out" if possible else "leave the field out"
                yield f"model.{name} is {value!r}: {cls.NAME} cannot do that here; {use}."

    def contradictions(self, section: Any) -> Iterator[str]:
        """Values that cannot stand beside each other."""
        yield from ()

    def no_experts(self, reason: str) -> Iterator[str]:
        """The problem of a model with experts of which no layer has any, because of what `reason` says."""
        if not any(map(self.has_experts, range(self.num_hidden_layers))):
            yield f"{reason}: none of the num_hidden_layers {self.num_hidden_layers} layers would have experts."


def other_name(section: Any, written: str, meant: str, model: str) -> Iterator[str]:
    """The problem of a number of experts under another model's name."""
    value = _value(section, written)
    if value:
        yield f"model.{written} is {value}: {model} calls its experts {meant}; write {meant}: {value} instead."


def _value(section: Any, name: str) -> Any:
    return getattr(section, name, getattr(section, "extra", {}).get(name))


def odd_rotary(name: str, size: int) -> Iterator[str]:
    """The problem of a head size that rotary embedding cannot turn in pairs."""
    if size % 2:
        yield (
            f"model.{name} is {size}: rotary embedding turns dimensions in pairs, so it has to be even; use {size + 1}."
        )
