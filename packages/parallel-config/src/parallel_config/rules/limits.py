"""Every field within the limits of its own declaration: ranges and lists of options."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterator
from typing import Any

from attrs import fields, has, resolve_types

from parallel_config.paths import join
from parallel_config.problems import Edit, Problem
from parallel_config.rules.engine import Facts, rule
from parallel_config.schema import TrainConfig
from parallel_config.schema.setting import Limit, limit_of


@functools.cache
def _limited(cls: type[Any] = TrainConfig, path: str = "") -> tuple[tuple[str, Limit], ...]:
    found: list[tuple[str, Limit]] = []
    for attribute in fields(resolve_types(cls)):
        inner = join(path, attribute.name)
        limit = limit_of(attribute)
        if limit is not None:
            found.append((inner, limit))
        if isinstance(attribute.type, type) and has(attribute.type) and attribute.name != "source":
            found.extend(_limited(attribute.type, inner))
    return tuple(found)


@functools.cache
def _table() -> tuple[tuple[str, Callable[[TrainConfig], Any], Limit], ...]:
    return tuple((path, operator.attrgetter(path), limit) for path, limit in _limited())


def out_of_limits(facts: Facts) -> Iterator[Problem]:
    """Every field whose value is outside the limits it was declared with."""
    for path, get, limit in _table():
        value = get(facts.config)
        if value is None or limit.allows(value):
            continue
        nearest = limit.nearest(value)
        yield facts.problem(
            path,
            limit.rule(),
            limit.suggestion(value),
            fixes=[(Edit(path, choice),) for choice in nearest] + [(Edit(path, action="remove"),)],
            unsupported=limit.unsupported,
        )


@rule("callbacks", decides=("callbacks",))
def callbacks(facts: Facts) -> Iterator[Problem]:
    """Each callback has a registered type; its step interval is at least 1."""
    for index, callback in enumerate(facts.config.callbacks):
        for attribute in fields(type(callback)):
            limit, value = limit_of(attribute), getattr(callback, attribute.name)
            path = f"callbacks[{index}].{attribute.name}"
            missing = attribute.name == "type" and value is None
            if limit is None or (not missing and limit.allows(value)):
                continue
            nearest = limit.nearest(value)
            yield facts.problem(
                path,
                "is required in every entry" if missing else limit.rule(),
                limit.suggestion(value),
                value=value,
                fixes=[(Edit(path, choice),) for choice in nearest],
            )
