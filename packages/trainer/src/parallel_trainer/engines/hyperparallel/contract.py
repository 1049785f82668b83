"""Whether the installed HyperParallel has what the calls name: its version says little, names and parameters do."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator
from typing import Any

from parallel_trainer.engines.hyperparallel.calls import Attribute, Call, Name, Use, parts
from parallel_trainer.engines.hyperparallel.execute import imported


def broken(calls: Iterable[Call]) -> tuple[str, ...]:
    """What is missing or takes other arguments, once each; empty where all calls fit."""
    return tuple(dict.fromkeys(problem for call in calls for part in parts(call) for problem in _problems(part)))


def _problems(part: Any) -> Iterator[str]:
    try:
        if isinstance(part, Name):
            imported(part)
        elif isinstance(part, Attribute) and part.owner and part.name == "device_type":
            if not isinstance(inspect.getattr_static(imported(Name(part.owner)), part.name), property):
                yield f"{part.owner}.{part.name} is no property"
        elif isinstance(part, Call):
            yield from _unfit(part)
    except (ImportError, AttributeError) as error:
        yield str(error)


def _unfit(call: Call) -> Iterator[str]:
    """Whether the call's arguments fit the parameters of its target."""
    target, arguments = call.target, call.arguments
    if isinstance(target, Name):
        path, called = target.path, imported(target)
    elif isinstance(target, Attribute) and target.owner:
        path = f"{target.owner}.{target.name}"
        called = getattr(imported(Name(target.owner)), target.name)
        arguments = (None, *arguments)
    elif isinstance(target, Use) and target.owner:
        path, called = target.owner, imported(Name(target.owner))
    else:
        return
    if path.startswith("builtins."):
        return
    try:
        inspect.signature(called).bind(*arguments, **call.keywords)
    except TypeError as error:
        yield f"{path}{inspect.signature(called)}: {error}"
