"""Calls as data: what is called with which arguments, in the order of execution."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from attrs import field, frozen


@frozen
class Name:
    """Something that is imported, "hyper_parallel.core.fully_shard.api.fully_shard"."""

    path: str


@frozen
class Use:
    """What an earlier call returned under this name, or the caller provides; with axes, that part of a mesh.

    owner: where it is called, the class in whose stead it is, a dotted name.
    """

    name: str
    axes: tuple[str, ...] = ()
    owner: str = field(default="", kw_only=True)


@frozen
class Module:
    """A module of the model by its dotted name, in one of the rank's chunks; without a name the whole chunk."""

    name: str = ""
    chunk: int = 0

    def inner(self, name: str) -> Module:
        """The module of that name inside."""
        return Module(f"{self.name}.{name}" if self.name else name, self.chunk)


@frozen
class Parameter:
    """A parameter of a module by its dotted name inside."""

    module: Module
    name: str


@frozen
class Attribute:
    """An attribute of a value whose class is `owner`, a dotted name, or "" where it is not HyperParallel's."""

    of: Any
    name: str
    owner: str


@frozen
class Call:
    """One call. It may stand in another's arguments, and is made when that one is.

    target:    a `Name`, `Attribute`, `Module` or `Use`.
    arguments: plain values, what this module declares, and lists, tuples and dicts of them.
    spread:    what is passed on as further keywords.
    result:    the name under which what it returns is used later, or the module that it takes the place of.
    why:       the rule that decides an argument, where one does.
    """

    target: Name | Attribute | Module | Use
    arguments: tuple[Any, ...] = ()
    keywords: Mapping[str, Any] = field(factory=dict, hash=False)
    spread: Use | None = field(default=None, kw_only=True)
    result: str | Module | None = field(default=None, kw_only=True)
    why: str = field(default="", kw_only=True)


@frozen
class Phase:
    """Calls that belong together; `times` says how often in a row they are made."""

    title: str
    calls: tuple[Call, ...]
    times: int = 1


@frozen
class Program:
    """All calls of a rank.

    environment: variables that have to be set before HyperParallel is imported for the first time.
    chunks:      virtual stages whose parts of the model the rank holds.
    setup:       made once.
    step:        made for each training step.
    notes:       what holds for all calls, and what the library leaves to the model.
    """

    environment: Mapping[str, str]
    chunks: tuple[int, ...]
    setup: tuple[Phase, ...]
    step: tuple[Phase, ...]
    notes: tuple[str, ...]

    @property
    def calls(self) -> tuple[Call, ...]:
        """Those of all phases, each once."""
        return tuple(call for phase in (*self.setup, *self.step) for call in phase.calls)


def parts(value: Any) -> Iterator[Any]:
    """A value and everything inside it, arguments of calls included."""
    yield value
    inner: tuple[Any, ...] = ()
    if isinstance(value, Call):
        inner = (value.target, *value.arguments, *value.keywords.values(), value.spread, value.result)
    elif isinstance(value, Attribute):
        inner = (value.of,)
    elif isinstance(value, Parameter):
        inner = (value.module,)
    elif isinstance(value, Mapping):
        inner = tuple(value.values())
    elif isinstance(value, (list, tuple)):
        inner = tuple(value)
    for each in inner:
        yield from parts(each)
