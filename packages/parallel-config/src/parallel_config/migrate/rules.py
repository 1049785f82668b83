"""Rules that need no computing, as data: a field that has another name here, and one that has no counterpart."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from fnmatch import fnmatchcase
from typing import Any

from attrs import frozen

from parallel_config.migrate.draft import Draft, Kind

Convert = Callable[[Any], Any]


def by(names: Mapping[str, Any]) -> Convert:
    """The conversion of those texts that have another name here."""
    return lambda value: names.get(value, value) if isinstance(value, str) else value


@frozen
class Rename:
    """A field of the old file that the new one has too; `convert` turns the value, and `how` says so."""

    old: str
    new: str
    convert: Convert | None = None
    how: str = ""


@frozen
class Without:
    """Fields of the old file (`old` may hold *) without a counterpart, why, and what that means.

    `fine` are values with which nothing is lost.
    """

    old: str
    why: str
    kind: Kind = Kind.NOTHING
    fine: tuple[Any, ...] = ()


def rename_all(draft: Draft, rules: Iterable[Rename]) -> None:
    """Carry each field that is written."""
    for rule in rules:
        value = draft.get(rule.old)
        if value is None:
            continue
        converted = value if rule.convert is None else rule.convert(value)
        changed = rule.how if rule.convert is not None and converted != value else ""
        draft.carry(rule.old, rule.new, converted, changed)


def look_up(rules: Iterable[Without], path: str, value: Any) -> tuple[str, Kind] | None:
    """Why a field has no counterpart, and what that means; the first rule that matches counts."""
    for rule in rules:
        if fnmatchcase(path, rule.old):
            return rule.why, Kind.NOTHING if value is None or _among(value, rule.fine) else rule.kind
    return None


def _among(value: Any, fine: tuple[Any, ...]) -> bool:
    """Equality that does not take 0 for false, or 1 for true."""
    return any(value == other and isinstance(value, bool) == isinstance(other, bool) for other in fine)
