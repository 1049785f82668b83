"""Making the calls of a program: names are imported, modules looked up by name in the model."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from parallel_trainer.engines.choice import INSTALL
from parallel_trainer.engines.hyperparallel.calls import (
    Attribute,
    Call,
    Module,
    Name,
    Parameter,
    Phase,
    Program,
    Use,
    parts,
)
from parallel_trainer.errors import UserError


def imported(name: Name) -> Any:
    """What a name stands for. Raises ImportError, saying the part that does not exist."""
    module, _, attribute = name.path.rpartition(".")
    found = importlib.import_module(module)
    if not hasattr(found, attribute):
        raise ImportError(f"{module} has no {attribute}")
    return getattr(found, attribute)


class Execution:
    """A program being executed on one rank.

    chunks:    the rank's parts of the model, in the order of `program.chunks`.
    variables: what the step uses and no call makes: `batches`, an iterator of inputs by name, and `optimizer`.

    Raises UserError where HyperParallel is not installed or was imported for another framework, and where the model
    lacks a module that calls name.
    """

    def __init__(self, program: Program, chunks: Sequence[Any], variables: Mapping[str, Any] | None = None) -> None:
        self._program = program
        self._values = dict(variables or {})
        _set_environment(program.environment)
        try:
            importlib.import_module("hyper_parallel")
        except ImportError as error:
            raise UserError(f"{error}: {INSTALL}") from error
        # Wrappers put themselves between a module and those inside it: everything is found before any is made.
        self._modules = _found(program, chunks)

    def set_up(self) -> None:
        """Make the calls that come once."""
        self._run(self._program.setup)

    def step(self) -> None:
        """Make those of a training step."""
        self._run(self._program.step)

    def _run(self, phases: Iterable[Phase]) -> None:
        for phase in phases:
            for _ in range(phase.times):
                for call in phase.calls:
                    self._value(call)

    def _call(self, call: Call) -> Any:
        spread = self._value(call.spread) if call.spread else {}
        result = self._value(call.target)(*self._value(call.arguments), **self._value(call.keywords), **spread)
        if isinstance(call.result, Module):
            parent, last = self._modules[call.result.chunk, ""], call.result.name
            _replace(parent, last, result)
            self._modules[call.result.chunk, call.result.name] = result
        elif call.result is not None:
            self._values[call.result] = result
        return result

    def _value(self, value: Any) -> Any:
        if isinstance(value, Call):
            return self._call(value)
        if isinstance(value, Name):
            return imported(value)
        if isinstance(value, Use):
            found = self._values[value.name]
            return found[value.axes[0] if len(value.axes) == 1 else value.axes] if value.axes else found
        if isinstance(value, Module):
            return self._modules[value.chunk, value.name]
        if isinstance(value, Parameter):
            return walk(self._modules[value.module.chunk, value.module.name], value.name)
        if isinstance(value, Attribute):
            return getattr(self._value(value.of), value.name)
        if isinstance(value, dict):
            return {name: self._value(each) for name, each in value.items()}
        return type(value)(map(self._value, value)) if isinstance(value, (list, tuple)) else value


def _set_environment(environment: Mapping[str, str]) -> None:
    for name, value in environment.items():
        if "hyper_parallel" in sys.modules and os.environ.get(name) != value:
            raise UserError(
                f"{name} is {os.environ.get(name)!r}, and hyper_parallel has been imported with it: it has to be "
                f"{value!r} before the first import; set it in the environment of the ranks."
            )
        os.environ[name] = value


def _found(program: Program, chunks: Sequence[Any]) -> dict[tuple[int, str], Any]:
    names = [part for call in program.calls for part in parts(call) if isinstance(part, Module)]
    found: dict[tuple[int, str], Any] = {(number, ""): chunk for number, chunk in enumerate(chunks)}
    missing = []
    for module in dict.fromkeys(names):
        try:
            found[module.chunk, module.name] = walk(chunks[module.chunk], module.name)
        except (AttributeError, IndexError, KeyError, TypeError):
            missing.append(f"{module.name} (chunk {module.chunk})")
    if missing:
        raise UserError("The model has no modules of names that HyperParallel's calls are about:", missing)
    return found


def walk(root: Any, name: str) -> Any:
    """What is inside a module under a dotted name; numbers are names of a list's items."""
    found = root
    for part in name.split(".") if name else ():
        found = getattr(found, part) if hasattr(found, part) else found[int(part) if part.isdigit() else part]
    return found


def _replace(root: Any, name: str, module: Any) -> None:
    parent, _, last = name.rpartition(".")
    holder = walk(root, parent)
    if last.isdigit() and not hasattr(holder, last):
        holder[int(last)] = module
    else:
        setattr(holder, last, module)
