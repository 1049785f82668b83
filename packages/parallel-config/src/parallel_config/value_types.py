"""The types of the schema: what each takes from YAML, and what to write instead of what it does not take."""

from __future__ import annotations

import functools
import math
import re
import types
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Union, get_args, get_origin

import cattrs
import yaml
from attrs import fields_dict, has
from cattrs.errors import BaseValidationError
from cattrs.gen import make_dict_structure_fn, override

from parallel_config.home import expand_home
from parallel_config.problems import show
from parallel_config.schema.setting import LayerText, NewtonSchulz, PathText

_Hook = Callable[[Any, Any], Any]

_KEY_VALUE = re.compile(r"(\w+):([\w.+-]+)")


class Rejected(ValueError):
    """A value of the wrong type: the rule it breaks, what would work, and values to put in its place."""

    def __init__(self, rule: str, suggestion: str = "", instead: tuple[Any, ...] = ()) -> None:
        super().__init__(rule)
        self.rule = rule
        self.suggestion = suggestion
        self.instead = instead


class NotText(Rejected):
    """A number where text is wanted: it was probably meant as it is written."""


class NotPath(Rejected):
    """A text that stands for no path."""


class NotSection(Rejected):
    """Something else where a section of this class is wanted."""

    def __init__(self, cls: Any, rule: str, suggestion: str, instead: tuple[Any, ...] = ()) -> None:
        super().__init__(rule, suggestion, instead)
        self.cls = cls


def _integer(value: Any, _: Any) -> int:
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    rule = "must be an integer"
    if isinstance(value, bool):
        raise Rejected(rule, "Write a number; true and false are not numbers here.", (1,))
    if value == "None":
        raise Rejected(rule, "Write null for no value: None is text in YAML.", (None,))
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**63:
        raise Rejected(rule, f"Write {int(value)}.", (int(value),))
    if isinstance(value, float) and abs(value) < 2**63:
        raise Rejected(rule, f"Write {int(value)} or {int(value) + 1}.", (int(value), int(value) + 1))
    if isinstance(value, str) and value.strip().lstrip("+-").isdecimal() and len(value) < 19:
        raise Rejected(rule, f"Write {int(value)} without quotes.", (int(value),))
    raise Rejected(rule, "Write a whole number.")


def _number(value: Any, _: Any) -> float:
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        if value != value or value in (float("inf"), float("-inf")):
            raise Rejected("must be a finite number", "Write a number such as 1.0e-5.")
        return float(value)
    rule = "must be a number"
    if value == "None":
        raise Rejected(rule, "Write null for no value: None is text in YAML.", (None,))
    try:
        number = float(value) if isinstance(value, str) else None
    except ValueError:
        number = None
    if number is not None and abs(number) < float("inf"):
        raise Rejected(rule, f"Write {show(number)} without quotes.", (number,))
    raise Rejected(rule, "Write a number such as 1.0e-5.")


def _switch(value: Any, _: Any) -> bool:
    if isinstance(value, bool):
        return value
    rule = "must be true or false"
    meant = {
        "true": True,
        "yes": True,
        "on": True,
        "1": True,
        "false": False,
        "no": False,
        "off": False,
        "0": False,
    }
    if isinstance(value, (str, int)) and str(value).lower() in meant:
        instead = meant[str(value).lower()]
        raise Rejected(rule, f"Write {show(instead)} without quotes.", (instead,))
    raise Rejected(rule, "Write true or false without quotes.", (True, False))


def _string(value: Any, _: Any) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, bool):
        hint = "YAML reads yes, no, on, off, true and false as switches: quote the word if it is text."
        raise Rejected("must be text", hint, (str(value).lower(),))
    if isinstance(value, (int, float)):
        raise NotText("must be text", f"Quote it: '{show(value)}'.", (show(value),))
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], str):
        raise Rejected("must be text", f"Write {show(value[0])} without brackets.", (value[0],))
    raise Rejected("must be text", "Write a word or a quoted text.")


def _path(value: Any, _: Any) -> PathText:
    text = _string(value, _)
    try:
        return PathText(expand_home(text))
    except ValueError as error:
        raise NotPath(str(error), "Write ~ for your home folder, or the whole path.") from None


def _layers(value: Any, _: Any) -> LayerText:
    if isinstance(value, int) and not isinstance(value, bool):
        return LayerText(str(value))
    if isinstance(value, str):
        return LayerText(value)
    if isinstance(value, list) and len(value) == 2 and all(isinstance(end, int) for end in value):
        text = f"{value[0]}-{value[1]}"
        raise Rejected("must be a layer or a range of layers as text", f'Write "{text}".', (text,))
    raise Rejected("must be a layer or a range of layers as text", 'Write "3" or "0-3".')


def _newton_schulz(value: Any, _: Any) -> NewtonSchulz:
    if _is_triple(value):
        return NewtonSchulz(tuple(map(float, value)))
    if isinstance(value, (list, tuple)) and value and all(map(_is_segment, value)):
        return NewtonSchulz(tuple((tuple(map(float, triple)), steps) for triple, steps in value))
    rule = "must be three numbers, or segments of three numbers and their steps ≥ 1"
    raise Rejected(rule, "Write [3.4445, -4.775, 2.0315], or [[[3.4445, -4.775, 2.0315], 8], [[2.0, -1.5, 0.5], 2]].")


def _is_triple(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and len(value) == 3 and all(map(_is_finite, value))


def _is_segment(value: Any) -> bool:
    if not (isinstance(value, (list, tuple)) and len(value) == 2 and _is_triple(value[0])):
        return False
    return isinstance(value[1], int) and not isinstance(value[1], bool) and value[1] >= 1


def _is_finite(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _origin(kind: Any) -> Any:
    return get_origin(kind)


def _is_choice(kind: Any) -> bool:
    if get_origin(kind) not in (Union, types.UnionType):
        return False
    return len([member for member in get_args(kind) if member is not type(None)]) > 1


def _choice_hook(kind: Any) -> _Hook:
    members = get_args(kind)
    rule = "must be " + " or ".join(_name(member) for member in members)

    def choose(value: Any, _: Any) -> Any:
        if value is None and type(None) in members:
            return None
        for member in members:
            wants_list = get_origin(member) is tuple
            if member is type(None) or wants_list != isinstance(value, (list, tuple)):
                continue
            try:
                return converter().structure(value, member)
            except NotPath:
                raise
            except Rejected:
                continue
        raise Rejected(rule, "Write one of these.")

    return choose


def _name(kind: Any) -> str:
    if get_origin(kind) is tuple:
        return f"a list of {_plural(get_args(kind)[0])}"
    names = {
        bool: "true or false",
        str: "text",
        LayerText: "text",
        PathText: "text",
        int: "an integer",
        float: "a number",
    }
    return "null" if kind is type(None) else names.get(kind, "a mapping")


def _plural(kind: Any) -> str:
    return {int: "integers", float: "numbers", LayerText: 'layers such as "0-3"', str: "texts", PathText: "texts"}.get(
        kind, "items"
    )


def _sequence_hook(kind: Any) -> _Hook:
    item = get_args(kind)[0]
    items = list[item]  # type: ignore[valid-type]

    def sequence(value: Any, _: Any) -> tuple[Any, ...]:
        if isinstance(value, (list, tuple)):
            return tuple(converter().structure(list(value), items))
        if has(item) and isinstance(value, dict):
            raise Rejected("must be a list of sections", "Start the section with '- '.", ([value],))
        if isinstance(value, (str, int, float)) and not isinstance(value, bool):
            raise Rejected(f"must be a list of {_plural(item)}", f"Write [{show(value)}].", ([value],))
        raise Rejected(f"must be a list of {_plural(item)}", "Write a list: [a, b].")

    return sequence


def _mapping_hook(kind: Any) -> _Hook:
    item = get_args(kind)[1]

    def mapping(value: Any, _: Any) -> dict[str, Any]:
        if not isinstance(value, Mapping):
            raise Rejected("must be a mapping", "Write key: value lines below it.")
        if item is Any:
            return dict(value)
        return {key: _entry(key, entry, item) for key, entry in value.items()}

    return mapping


def _entry(key: str, value: Any, kind: Any) -> Any:
    try:
        return converter().structure(value, kind)
    except (Rejected, BaseValidationError):
        raise Rejected(f"must give {key} {_name(kind)}", f'Write {key}: ["0-3"].') from None


@functools.cache
def converter() -> cattrs.Converter:
    """From plain values to the schema's classes; raises `Rejected`, in groups, with places."""
    strict = cattrs.Converter(detailed_validation=True)
    hooks: Iterable[tuple[Any, _Hook]] = (
        (int, _integer),
        (float, _number),
        (bool, _switch),
        (str, _string),
        (LayerText, _layers),
        (NewtonSchulz, _newton_schulz),
        (PathText, _path),
    )
    for kind, hook in hooks:
        strict.register_structure_hook(kind, hook)
    strict.register_structure_hook_factory(_is_choice, _choice_hook)
    strict.register_structure_hook_factory(lambda kind: _origin(kind) is tuple, _sequence_hook)
    strict.register_structure_hook_factory(lambda kind: _origin(kind) is dict, _mapping_hook)
    strict.register_structure_hook_factory(has, lambda cls: _section_hook(cls, strict))
    return strict


def _section_hook(cls: Any, strict: cattrs.Converter) -> _Hook:
    keys = known_keys(cls)
    takes_extra = "extra" in fields_dict(cls)
    omitted: dict[str, Any] = {"source": override(omit=True)} if "source" in fields_dict(cls) else {}
    build = make_dict_structure_fn(cls, strict, _cattrs_forbid_extra_keys=True, **omitted)

    def hook(value: Any, _: Any) -> Any:
        if value is None:
            raise NotSection(
                cls, "is empty, and a section has fields", "Write its fields below it, or {} for none.", ({},)
            )
        if not isinstance(value, Mapping):
            fields = _without_space(value)
            if fields:
                hint = f"Write a space after the colon: {show(fields)}."
                raise NotSection(cls, "must be a section", hint, (fields,))
            raise NotSection(cls, "must be a section", "Write its fields as key: value lines below it.")
        if takes_extra:
            extra = {key: item for key, item in value.items() if key not in keys}
            value = {**{key: item for key, item in value.items() if key in keys}, "extra": extra}
        return build(value, cls)

    return hook


def _without_space(value: Any) -> dict[str, Any]:
    """The fields that a text such as "tensor_parallel:2" was meant to be; empty for any other text."""
    pairs = [_KEY_VALUE.fullmatch(part) for part in value.split()] if isinstance(value, str) else []
    return {pair[1]: _plain(pair[2]) for pair in pairs if pair} if all(pairs) else {}


def _plain(text: str) -> Any:
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError:
        return text


@functools.cache
def known_keys(cls: Any) -> frozenset[str]:
    """The keys a section knows by name."""
    return frozenset(fields_dict(cls)) - {"extra", "source"}
