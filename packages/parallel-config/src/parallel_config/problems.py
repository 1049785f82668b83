"""What is wrong with a file: problems, the edits that would help, and the error that carries them."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any, Literal

import yaml
from attrs import field, frozen

_LONGEST_SHOWN = 60
_SafeDumper: Any = getattr(yaml, "CSafeDumper", yaml.SafeDumper)

NUMBER_WITHOUT_POINT = re.compile(r"[-+]?[0-9][0-9_]*[eE][-+]?[0-9]+")
"""What is read as a number here, though YAML 1.1 reads it as text."""


class Dumper(_SafeDumper):  # type: ignore[misc]
    """Quotes a text that would be read back as a number."""


Dumper.add_implicit_resolver("tag:yaml.org,2002:float", NUMBER_WITHOUT_POINT, list("-+0123456789"))


def show(value: Any) -> str:
    """The value as one line of YAML, cut where it would fill the screen."""
    try:
        text: str = yaml.dump(
            value, Dumper=Dumper, default_flow_style=True, width=10_000, allow_unicode=True, sort_keys=False
        )
    except (yaml.YAMLError, RecursionError, UnicodeError):
        text = repr(value)
    text = text.removesuffix("\n").removesuffix("\n...").replace("\n", " ")
    return text if len(text) <= _LONGEST_SHOWN else text[: _LONGEST_SHOWN - 1] + "…"


@frozen
class Edit:
    """One change of a file: give a field a value, rename its key, move it to a section, or take it out.

    `value` is the new value, the new name of the key, or the section.
    """

    path: str
    value: Any = None
    action: Literal["set", "rename", "move", "remove"] = "set"

    def __str__(self) -> str:
        if self.action == "rename":
            return f"rename {self.path} to {self.value}"
        if self.action == "move":
            return f"move {self.path} to {self.value}"
        if self.action == "remove":
            return f"remove {self.path}"
        return f"{self.path}: {show(self.value)}"


Fix = tuple[Edit, ...]
"""Edits that remove a problem when they are all made together."""


@frozen
class Problem:
    """One fault, in four parts: what, its value, the rule with its numbers, and what would work.

    `path` is the field as the file writes it, with dots ("parallelism.tensor_parallel"), empty for the file
    as a whole. `line` and `column` count from 1; they are None where no file is involved. A problem that is not
    `mendable` is no slip: edits that remove it would train something else.
    """

    path: str
    value: Any
    rule: str
    suggestion: str
    file: str | None = None
    line: int | None = None
    column: int | None = None
    fixes: tuple[Fix, ...] = field(default=(), repr=False, eq=False)
    unsupported: bool = field(default=False, repr=False, eq=False)
    mendable: bool = field(default=True, repr=False, eq=False)

    @property
    def where(self) -> str:
        """`file:line:column`, as far as they are known."""
        return ":".join(str(part) for part in (self.file, self.line, self.column) if part is not None)

    def __str__(self) -> str:
        what = self.path if self.value is None else f"{self.path} {show(self.value)}"
        sentence = " ".join(part for part in (what.strip(), self.rule) if part)
        place = f"{self.where}: " if self.where else ""
        return f"{place}{sentence}. {self.suggestion}"


def in_order(problems: Iterable[Problem]) -> tuple[Problem, ...]:
    """Sorted by place in the file, each once; those without a place come last, in the order given."""
    end = float("inf")
    return tuple(
        sorted(
            {str(problem): problem for problem in problems}.values(),
            key=lambda problem: (
                end if problem.line is None else problem.line,
                end if problem.column is None else problem.column,
            ),
        )
    )


class ConfigError(ValueError):
    """A configuration that cannot work. `problems` holds every fault found, in the order of the file."""

    def __init__(self, problems: Iterable[Problem]) -> None:
        self.problems: tuple[Problem, ...] = in_order(problems)
        super().__init__(self.problems)

    def __str__(self) -> str:
        if len(self.problems) == 1:
            return str(self.problems[0])
        lines = "\n".join(f"  {problem}" for problem in self.problems)
        return f"{len(self.problems)} problems:\n{lines}"


class UnsupportedConfigError(ConfigError, NotImplementedError):
    """Some of the problems ask for what is known but not offered, such as another mask type."""


def config_error(problems: Iterable[Problem]) -> ConfigError:
    """The error for these problems: a `NotImplementedError` too where one asks for the unsupported."""
    found = tuple(problems)
    kind = UnsupportedConfigError if any(problem.unsupported for problem in found) else ConfigError
    return kind(found)


class ConfigWarning(UserWarning):
    """Something in the file has no effect, or is probably not what was meant."""
