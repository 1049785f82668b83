"""Dotted paths of fields ("callbacks[0].type") and the nested values they point into, edited by copying."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

Keys = tuple[str | int, ...]
"""A path in parts: keys of mappings and indices of lists."""

_INDEX = re.compile(r"\[(\d+)\]\.?")
_KEY = re.compile(r".[^.\[]*", re.DOTALL)


def join(path: str, key: str) -> str:
    """The path of `key` inside `path`."""
    return f"{path}.{key}" if path else key


def parent(path: str) -> str:
    """The path of the mapping or list that holds `path`; empty at the top."""
    return path[: max(path.rfind("."), path.rfind("["), 0)]


def last(path: str) -> str:
    """The field's own name: what follows the last dot."""
    return path.rpartition(".")[2]


def as_text(keys: Keys) -> str:
    """The dotted form of a path in parts."""
    text = ""
    for key in keys:
        text = f"{text}[{key}]" if isinstance(key, int) else join(text, key)
    return text


def as_keys(path: str, values: Any) -> Keys:
    """The parts of a dotted path into `values`, which settles what a dot or bracket inside a key belongs to."""
    keys: list[str | int] = []
    while path:
        index = _INDEX.match(path)
        if index and not isinstance(values, Mapping):
            key: str | int = int(index[1])
            path = path[index.end() :]
        else:
            key = _first_key(path, values)
            path = path[len(key) :].removeprefix(".")
        keys.append(key)
        values = _inside(values, key)
    return tuple(keys)


def _first_key(path: str, values: Any) -> str:
    known = [key for key in values if _begins(path, key)] if isinstance(values, Mapping) else []
    return max(known, key=len) if known else _KEY.match(path)[0]  # type: ignore[index]


def _begins(path: str, key: str) -> bool:
    return bool(key) and path.startswith(key) and path[len(key) : len(key) + 1] in {"", ".", "["}


def _inside(values: Any, key: str | int) -> Any:
    try:
        return values[key]
    except (KeyError, IndexError, TypeError):
        return None


def all_paths(value: Any, path: str = "") -> list[str]:
    """The paths of everything inside `value`."""
    found: list[str] = []
    _collect(value, path, found)
    return found


def _collect(value: Any, path: str, found: list[str]) -> None:
    if path:
        found.append(path)
    if isinstance(value, dict):
        for key, item in value.items():
            _collect(item, f"{path}.{key}" if path else key, found)
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            _collect(item, f"{path}[{index}]", found)


def get(values: Any, keys: Keys) -> Any:
    """The value at a path that exists."""
    for key in keys:
        values = values[key]
    return values


def without(values: Any, keys: Keys) -> Any:
    """A copy without the value at the path; the same values where there is none."""
    if not keys:
        return values
    key, *rest = keys
    if isinstance(values, list) and isinstance(key, int) and key < len(values):
        kept = [without(values[key], tuple(rest))] if rest else []
        return [*values[:key], *kept, *values[key + 1 :]]
    if not isinstance(values, Mapping) or key not in values:
        return values
    if rest:
        return {**values, key: without(values[key], tuple(rest))}
    return {name: item for name, item in values.items() if name != key}


def with_value(values: Any, keys: Keys, new: Any) -> Any:
    """A copy with the value at the path set; sections that are missing on the way are made."""
    if not keys:
        return new
    key, *rest = keys
    if isinstance(values, list) and isinstance(key, int) and key < len(values):
        return [*values[:key], with_value(values[key], tuple(rest), new), *values[key + 1 :]]
    section = values if isinstance(values, Mapping) else {}
    return {**section, key: with_value(section.get(key), tuple(rest), new)}


def renamed(values: Any, keys: Keys, name: str) -> Any:
    """A copy in which the last key of the path is called `name`, at its old place."""
    section = get(values, keys[:-1])
    return with_value(values, keys[:-1], {name if key == keys[-1] else key: item for key, item in section.items()})
