"""How a field of the schema is declared: its default, the values it takes, what it means and what acts on it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NewType

from attrs import Attribute, field, frozen

from parallel_config.likeness import likeness, most_alike

_PROBABLY_MEANT = 0.6

LayerText = NewType("LayerText", str)
"""Layers as "n" or "a-b", several separated by commas; a bare integer in the file becomes "n"."""

NewtonSchulz = NewType("NewtonSchulz", tuple[Any, ...])
"""Coefficients of Muon's Newton-Schulz iteration: (a, b, c) for all steps, or segments ((a, b, c), steps), …"""


ENGINES = ("native", "hyperparallel")
"""What trains a plan: this project itself, or HyperParallel, to whose calls it maps the plan."""

NATIVE, HYPERPARALLEL, NOWHERE = frozenset({"native"}), frozenset({"hyperparallel"}), frozenset[str]()
"""Engines that act on a field: they do what it asks for, or refuse it in words."""

MODEL_TYPES = ("qwen3", "qwen3_moe", "deepseek_v3")
"""The models that exist here."""


PathText = NewType("PathText", str)
"""A path, whose leading `~` or `~user` becomes the home folder."""


@frozen
class Limit:
    """Values that a field takes beyond its type. `above` is a minimum that is itself excluded."""

    minimum: float | None = None
    above: float | None = None
    maximum: float | None = None
    below: float | None = None
    options: tuple[str, ...] = ()
    unsupported: bool = False

    def rule(self) -> str:
        """The limit as the end of a sentence that starts with the field."""
        if self.options:
            return "must be " + _alternatives(self.options)
        bounds = [
            f"{sign} {bound:g}"
            for sign, bound in (
                ("≥", self.minimum),
                (">", self.above),
                ("≤", self.maximum),
                ("<", self.below),
            )
            if bound is not None
        ]
        return "must be " + " and ".join(bounds)

    def allows(self, value: Any) -> bool:
        """Whether a value of the right type is within the limit."""
        if self.options:
            return value in self.options
        return (
            (self.minimum is None or value >= self.minimum)
            and (self.above is None or value > self.above)
            and (self.maximum is None or value <= self.maximum)
            and (self.below is None or value < self.below)
        )

    def nearest(self, value: Any) -> tuple[Any, ...]:
        """Allowed values, the nearest first; empty where none is at hand."""
        if self.options and isinstance(value, str):
            return tuple(sorted(self.options, key=lambda option: -likeness(value, option)))
        if self.options:
            return self.options
        bounds = [bound for bound in (self.minimum, self.maximum) if bound is not None]
        kind = float if isinstance(value, float) else int
        return tuple(kind(bound) for bound in sorted(bounds, key=lambda bound: abs(bound - value)))

    def suggestion(self, value: Any) -> str:
        """What to write instead of a value that is not allowed."""
        meant = most_alike(str(value), self.options, at_least=_PROBABLY_MEANT)
        if meant is not None:
            return f"Did you mean {meant}?"
        choices = " or ".join(str(choice) for choice in self.nearest(value))
        return f"Write {choices or self.rule().replace('must be', 'a number')}."


def _alternatives(options: tuple[str, ...]) -> str:
    return options[0] if len(options) == 1 else ", ".join(options[:-1]) + " or " + options[-1]


def _fold(value: Any) -> Any:
    return value.lower() if isinstance(value, str) else value


def setting(
    default: Any,
    *,
    minimum: float | None = None,
    above: float | None = None,
    maximum: float | None = None,
    below: float | None = None,
    options: tuple[str, ...] = (),
    fold_case: bool = False,
    unsupported: bool = False,
    reserved: bool = False,
    converter: Callable[[Any], Any] | None = None,
    about: str,
    acts: frozenset[str] = frozenset(ENGINES),
    models: tuple[str, ...] = MODEL_TYPES,
) -> Any:
    """A field with its limits, its meaning and its effect.

    `fold_case` takes options in any case. `unsupported` marks a limit whose other values are known but not
    offered. `reserved` marks a field that the specification accepts and nothing ever reads. `about` is one plain
    sentence on what the field means. `acts` are the engines that act on it, `models` the types of models that do.
    """
    limit = Limit(minimum, above, maximum, below, options, unsupported)
    effect = Effect(about, NOWHERE if reserved else acts, models, reserved)
    return field(
        default=default,
        converter=_fold if fold_case else converter,
        metadata={"limit": limit if limit != _UNLIMITED else None, "effect": effect},
    )


_UNLIMITED = Limit()


@frozen
class Effect:
    """What a field means, and what acts on it."""

    about: str
    engines: frozenset[str]
    models: tuple[str, ...]
    reserved: bool


def limit_of(attribute: Attribute[Any]) -> Limit | None:
    """The limit a field was declared with."""
    limit: Limit | None = attribute.metadata.get("limit")
    return limit


def effect_of(attribute: Attribute[Any]) -> Effect | None:
    """What the field was declared to do; None for a section, and for `extra`."""
    effect: Effect | None = attribute.metadata.get("effect")
    return effect


def is_reserved(attribute: Attribute[Any]) -> bool:
    """Whether the specification reserves the field."""
    effect = effect_of(attribute)
    return effect is not None and effect.reserved
