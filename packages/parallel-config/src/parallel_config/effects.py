"""Which fields have an effect, with which engine: all that the schema declares, and what a file sets in vain."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Mapping
from inspect import get_annotations
from typing import Any, get_args

from attrs import Attribute, Factory, fields, frozen, has, resolve_types

from parallel_config.notices import inert_fields
from parallel_config.paths import join
from parallel_config.problems import show
from parallel_config.schema import TrainConfig, written_fields
from parallel_config.schema.model import MODEL_EXTRAS
from parallel_config.schema.setting import ENGINES, MODEL_TYPES, NOWHERE, Effect, effect_of, limit_of

_IN_ORDER = ("eval_dataset.dataloader.shuffle",)
"""An evaluation takes its samples in order, whatever its section says."""

_TYPES = {
    "int": "integer",
    "float": "number",
    "bool": "true or false",
    "str": "text",
    "None": "null",
    "LayerText": "layers",
    "PathText": "path",
    "NewtonSchulz": "list of numbers, or of segments",
}


@frozen
class Field:
    """A field of the file.

    path:    dotted; `callbacks[]` stands for each item of a list.
    type:    in words.
    default: as YAML writes it; of a model's size "of the model" where model types have defaults of their own.
    allowed: values that it takes beyond its type; empty without a limit.
    effect:  what it means, and what acts on it.
    section: what the section around it is, in a sentence.
    """

    path: str
    type: str
    default: str
    allowed: str
    effect: Effect
    section: str

    @property
    def acts(self) -> str:
        """What acts on the field, in words."""
        effect = self.effect
        if effect.reserved:
            return "reserved"
        if not effect.engines:
            return "nothing"
        engines = "both engines" if set(effect.engines) == set(ENGINES) else ", ".join(sorted(effect.engines))
        return engines if effect.models == MODEL_TYPES else f"{engines}; {', '.join(effect.models)}"


@functools.cache
def all_fields() -> Mapping[str, Field]:
    """Every field that the schema declares, by path, in the order of the schema."""
    return {found.path: found for found in _fields(TrainConfig, "")}


def _fields(cls: type[Any], path: str) -> Iterator[Field]:
    for attribute in fields(resolve_types(cls)):
        inner, effect = join(path, attribute.name), effect_of(attribute)
        if effect is not None:
            if inner in _IN_ORDER:
                effect = Effect(effect.about, NOWHERE, effect.models, reserved=False)
            limit = limit_of(attribute)
            allowed = limit.rule().removeprefix("must be ") if limit is not None else ""
            section = (cls.__doc__ or "").partition("\n\n")[0]
            words, default = _words(_annotation(cls, attribute)), _default(attribute, path)
            yield Field(inner, words, default, allowed, effect, section)
            continue
        inside = attribute.type
        items = [item for item in get_args(inside) if isinstance(item, type) and has(item)]
        if items:
            yield from _fields(items[0], f"{inner}[]")
        elif isinstance(inside, type) and has(inside) and attribute.name != "source":
            yield from _fields(inside, inner)


def _annotation(cls: type[Any], attribute: Attribute[Any]) -> str:
    found = next(names for base in cls.__mro__ if attribute.name in (names := get_annotations(base)))
    return str(found[attribute.name])


def _words(annotation: str) -> str:
    """`tuple[int, ...] | None` as "list of integer, or null"."""
    if annotation.startswith(("dict", "LayersByModule")):
        return "section" if " | None" not in annotation else "section, or null"
    listed = re.sub(r"tuple\[([^\[\]]+), \.\.\.\]", lambda m: "list of " + m[1].replace(" | ", "/"), annotation)
    listed = listed.replace("LayerSpecs", "list of layers").replace("LayersByModule", "section")
    parts = [re.sub(r"\w+", lambda m: _TYPES.get(m[0], m[0]), part) for part in listed.split(" | ")]
    return " or ".join(part.replace("/", " or ") for part in parts)


def _default(attribute: Attribute[Any], path: str) -> str:
    default = attribute.default
    if isinstance(default, Factory):  # type: ignore[arg-type]
        default = default.factory()  # type: ignore[union-attr]
    if path == "model" and default is None:
        return "of the model"
    return show(list(default) if isinstance(default, tuple) else default)


def fields_without_effect(config: TrainConfig, engine: str | None = None) -> tuple[str, ...]:
    """The fields that the file sets and `engine` does not act on; a section without any effect by its name.

    Without those of `inert_fields`, which have no effect because of what else the file says. The engine is the file's
    where none is given.
    """
    engine = engine or config.extensions.engine
    written = {re.sub(r"(\[\d+\])+$", "", path) for path in written_fields(config)}  # a list of values is one field
    leaves = {path for path in written if not any(other.startswith((f"{path}.", f"{path}[")) for other in written)}
    acted = {path for path, field in all_fields().items() if engine in field.effect.engines}
    model = config.model.model_type
    acted -= {path for path in acted if path.startswith("model.") and model not in all_fields()[path].effect.models}
    acted |= {f"model.{name}" for name in MODEL_EXTRAS.get(model or "", ())}
    effective = {_section(path) for path in acted} | {"extensions"}
    ignored = {
        path
        for path in leaves - set(inert_fields(config)) - effective  # a section that is written as {} says nothing
        if re.sub(r"\[\d+\]", "[]", path) not in acted and not _inside(path, acted)
    }
    return tuple(sorted({path if _section(path) in effective else _section(path) for path in ignored}))


def _inside(path: str, acted: set[str]) -> bool:
    """Whether the path lies in a field that takes a section of its own, such as model.rope_scaling.type."""
    return any(path.startswith((f"{outer}.", f"{outer}[")) for outer in acted)


def _section(path: str) -> str:
    return re.split(r"[.\[]", path, maxsplit=1)[0]
