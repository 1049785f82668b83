"""The new file while it is made: what was carried over, from which old fields, and what was left behind, and why.

Each rule of the conversion says one of three things about a field of the old file: it is carried to a field of the
new one, it is left behind for a reason, or nothing can be made of it. `Draft` keeps these, so that at the end every
value of the old file is in one of the lists.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from enum import Enum
from typing import Any

from attrs import Factory, define, frozen

from parallel_config.document import Document
from parallel_config.formats import written_value
from parallel_config.paths import join
from parallel_config.problems import Problem


class Kind(Enum):
    """What it means for the user that a value was left behind."""

    TRAINED = "Changes what is trained"
    COST = "Changes memory, speed or what is shown, not what is trained"
    NOTHING = "Not needed here"


@frozen
class Carried:
    """A field of the new file: its value, the old fields it was made of (none: a default that differs), and how."""

    path: str
    value: Any
    sources: tuple[str, ...]
    how: str = ""


@frozen
class Left:
    """A field, or a whole section, of the old file that is not in the new one."""

    path: str
    value: Any
    why: str
    kind: Kind
    line: int | None = None


@define
class Draft:
    """The conversion of one file. Paths are dotted, those of the old file in `old`, those of the new in `carried`."""

    old: Document
    carried: list[Carried] = Factory(list)
    left: list[Left] = Factory(list)
    problems: list[Problem] = Factory(list)

    def has(self, path: str) -> bool:
        """Whether the old file writes a value there that is not null."""
        return self.get(path) is not None

    def get(self, path: str, default: Any = None) -> Any:
        """The old file's value; the default where nothing or null is written."""
        value = written_value(self.old, path)
        return default if value is None else value

    def keys(self, section: str) -> tuple[str, ...]:
        """The paths of the fields of a section; none where it is no section."""
        value = self.get(section)
        return tuple(join(section, key) for key in value) if isinstance(value, Mapping) else ()

    def carry(self, sources: str | tuple[str, ...], path: str, value: Any, how: str = "") -> None:
        """Write a field of the new file, made of those of the old fields that are written.

        If none is, it is written for what `how` says; without that it has its default, and is left out. A field that
        was written before is replaced.
        """
        given = (sources,) if isinstance(sources, str) else sources
        written = tuple(source for source in given if self.has(source))
        if written or how:
            self.carried = [carried for carried in self.carried if carried.path != path]
            self.carried.append(Carried(path, value, written, how))

    def new_value(self, path: str) -> Any:
        """What the new file has there so far; None where it has nothing."""
        return next((carried.value for carried in self.carried if carried.path == path), None)

    def leave(self, path: str, why: str, kind: Kind = Kind.NOTHING) -> None:
        """Leave a field or section of the old file behind, if it is written."""
        if self.old.has(path) and not self.is_covered(path):
            spot = self.old.spots.get(path)
            value = written_value(self.old, path)
            self.left.append(Left(path, value, why, kind, spot.key_line if spot else None))

    def warn(self, what: str, why: str, kind: Kind) -> None:
        """Say what the old file leaves out and means all the same."""
        self.left.append(Left(what, None, why, kind))

    def refuse(self, path: str, rule: str, suggestion: str) -> None:
        """Nothing can be made of a field: its rule, and what would help."""
        self.problems.append(self.old.problem(path, self.get(path), rule, suggestion))

    def integer(self, path: str, default: int, minimum: int = 1) -> int:
        """A whole number of the old file; one that is none, or too small, is refused."""
        value = self.get(path, default)
        if isinstance(value, int) and not isinstance(value, bool) and value >= minimum:
            return value
        self.refuse(path, f"must be a whole number ≥ {minimum}", "Mend the old file first.")
        return default

    def switch(self, path: str, default: bool) -> bool:
        """A switch of the old file; what is none is refused."""
        value = self.get(path, default)
        if isinstance(value, bool):
            return value
        self.refuse(path, "must be true or false", "Mend the old file first.")
        return default

    def is_covered(self, path: str) -> bool:
        """Whether a value of the old file is in one of the lists, by itself or with the section around it."""
        mentioned = [source for carried in self.carried for source in carried.sources]
        mentioned += [left.path for left in self.left]
        return any(is_within(path, section) for section in mentioned)

    def uncovered(self) -> Iterator[str]:
        """The values of the old file that no rule has spoken of yet."""
        return (leaf for leaf in leaves(self.old.values) if not self.is_covered(leaf))


def is_within(path: str, section: str) -> bool:
    """Whether a path is a section's own, or inside it.

    >>> is_within("model.arch.type", "model.arch"), is_within("model.archive", "model.arch")
    (True, False)
    """
    return path == section or (path.startswith(section) and path[len(section)] in ".[")


def leaves(value: Any, path: str = "") -> Iterator[str]:
    """The paths of single values: a list is one value, unless sections are in it."""
    if isinstance(value, Mapping) and value:
        for key, item in value.items():
            yield from leaves(item, join(path, key))
    elif isinstance(value, list) and any(isinstance(item, Mapping) for item in value):
        for index, item in enumerate(value):
            yield from leaves(item, f"{path}[{index}]")
    else:
        yield path
