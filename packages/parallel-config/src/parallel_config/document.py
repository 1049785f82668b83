"""A configuration file as it was read: its values, the place of each, and faults of the YAML itself."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from attrs import Factory, frozen

from parallel_config.paths import all_paths, parent
from parallel_config.problems import Fix, Problem


@frozen
class Spot:
    """Where a key and its value stand; lines and columns count from 1."""

    key_line: int
    key_column: int
    line: int
    column: int


@frozen
class Document:
    """The values of a file, where each stands (by dotted path), and what is wrong with the YAML itself.

    `texts` has the numbers as the file writes them. `broken` says that the text could not be read at all, so
    that nothing is known about its fields.
    """

    filename: str | None
    text: str = ""
    values: Mapping[str, Any] = Factory(dict)
    spots: Mapping[str, Spot] = Factory(dict)
    texts: Mapping[str, str] = Factory(dict)
    written: frozenset[str] = frozenset()
    problems: tuple[Problem, ...] = ()
    broken: bool = False

    @classmethod
    def from_values(cls, values: Mapping[str, Any]) -> Document:
        """Values that come from no file."""
        return cls(filename=None, values=values, written=frozenset(all_paths(values)))

    def has(self, path: str) -> bool:
        """Whether this section or field is written."""
        return path in self.written

    def problem(
        self,
        path: str,
        value: Any,
        rule: str,
        suggestion: str,
        *,
        fixes: tuple[Fix, ...] = (),
        at_key: bool = False,
        unsupported: bool = False,
    ) -> Problem:
        """A problem placed at the value of `path`, or at the nearest section above it that the file has."""
        near = path
        while near and near not in self.spots:
            near, at_key = parent(near), True
        spot = self.spots.get(near)
        line = column = None
        if spot is not None:
            line, column = (spot.key_line, spot.key_column) if at_key else (spot.line, spot.column)
        return Problem(path, value, rule, suggestion, self.filename, line, column, fixes, unsupported)
