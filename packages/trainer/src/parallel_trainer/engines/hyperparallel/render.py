"""A program as lines that read like Python, in the order of execution; equal calls of consecutive layers as a loop."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

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

_WIDTH = 112
"""Of a call; a loop around it and i for a number take up to 8 more."""


def lines(program: Program) -> Iterator[str]:
    """The program of a rank."""
    for note in program.notes:
        yield from textwrap.wrap(note, _WIDTH, initial_indent="# ", subsequent_indent="#   ")
    yield ""
    yield "import os"
    yield ""
    yield from (
        f'os.environ["{name}"] = "{value}"  # before the imports' for name, value in program.environment.items()
    )
    yield from _imports(program)
    for phase in program.setup:
        yield from ("", f"# {phase.title}", *_phase(phase, program))
    yield from ("", "# A training step")
    for phase in program.step:
        yield from ("", f"# {phase.title}")
        if phase.times > 1:
            yield f"for _ in range({phase.times}):"
            yield from (f"    {line}" for line in _phase(phase, program))
        else:
            yield from _phase(phase, program)


def _imports(program: Program) -> Iterator[str]:
    found: dict[str, set[str]] = {}
    for part in (part for call in program.calls for part in parts(call) if isinstance(part, Name)):
        module, _, name = part.path.rpartition(".")
        if module not in ("builtins", "mindspore"):
            found.setdefault(module, set()).add(name)
        elif module == "mindspore":
            found.setdefault(module, set())
    for module in sorted(found):
        names = ", ".join(sorted(found[module]))
        yield f"from {module} import {names}" if names else f"import {module}"


def _phase(phase: Phase, program: Program) -> Iterator[str]:
    """Its calls; those of a layer together, and layers in a row whose calls differ in its number alone as one loop."""
    blocks = [
        (layer, [line for call in calls for line in _call(call, program)])
        for layer, calls in groupby(phase.calls, key=_layer)
    ]
    place = 0
    while place < len(blocks):
        layer, found = blocks[place]
        general = _general(found, layer)
        after = place + 1
        while layer is not None and after < len(blocks) and blocks[after][0] is not None:
            step = blocks[after][0] - blocks[after - 1][0]  # type: ignore[operator]
            first = blocks[place + 1][0] - layer  # type: ignore[operator]
            if abs(step) != 1 or step != first or _general(blocks[after][1], blocks[after][0]) != general:
                break
            after += 1
        if after - place > 1:
            last = blocks[after - 1][0]
            assert layer is not None
            assert last is not None
            yield f"for i in {_range(layer, last)}:"
            yield from (f"    {line}" for line in general)
        else:
            yield from found
        place = after


def _range(first: int, last: int) -> str:
    return f"range({first}, {last + 1})" if first <= last else f"range({first}, {last - 1}, -1)"


def _layer(call: Call) -> int | None:
    """The number of the layer that a call is about, the first one that it names."""
    for part in parts(call):
        if isinstance(part, Module) and (found := re.match(r"model\.layers\.(\d+)", part.name)):
            return int(found[1])
    return None


def _general(found: Sequence[str], layer: int | None) -> list[str]:
    """Lines with i for the number of the layer, and its neighbours by their distance."""
    if layer is None:
        return list(found)

    def distance(match: re.Match[str]) -> str:
        difference = int(match[1]) - layer
        return f".layers[i{f' {difference:+d}'.replace('+', '+ ').replace('-', '- ') if difference else ''}]"

    return [re.sub(r"\.layers\[(\d+)\]", distance, line) for line in found]


def _call(call: Call, program: Program) -> Iterator[str]:
    """The call, before it why its arguments are what they are."""
    if call.why:
        yield f"# {call.why}"
    result = ""
    if isinstance(call.result, Module):
        result = f"{_shown(call.result, program)} = "
    elif call.result is not None:
        result = f"{call.result} = "
    yield from _laid_out(call, program, result, "", _WIDTH)


def _laid_out(value: Any, program: Program, before: str, after: str, width: int) -> Iterator[str]:
    """A value between two texts: on one line if it fits, a call with an argument a line, what else is long filled."""
    line = f"{before}{_shown(value, program)}{after}"
    if len(line) <= width:
        yield line
    elif isinstance(value, Call):
        yield f"{before}{_shown(value.target, program)}("
        named = [("", each) for each in value.arguments] + [(f"{name}=", each) for name, each in value.keywords.items()]
        for name, each in named:
            yield from (f"    {part}" for part in _laid_out(each, program, name, ",", width - 4))
        yield f"){after}"
    else:
        items = line.removeprefix(before).removesuffix(after)
        yield f"{before}{items[0]}"
        filled = textwrap.wrap(f"{items[1:-1]},", width - 4, break_long_words=False, break_on_hyphens=False)
        yield from (f"    {part}" for part in filled)
        yield f"{items[-1]}{after}"


def _arguments(call: Call, program: Program) -> list[str]:
    found = [_shown(value, program) for value in call.arguments]
    found += [f"{name}={_shown(value, program)}" for name, value in call.keywords.items()]
    return [*found, *([f"**{call.spread.name}"] if call.spread else [])]


def _shown(value: Any, program: Program) -> str:
    if isinstance(value, Call):
        return f"{_shown(value.target, program)}({', '.join(_arguments(value, program))})"
    if isinstance(value, Name):
        return value.path if value.path.rpartition(".")[0] == "mindspore" else value.path.rpartition(".")[2]
    if isinstance(value, Use):
        axes = ", ".join(f'"{axis}"' for axis in value.axes)
        return f"{value.name}[{axes}]" if axes else value.name
    if isinstance(value, Module):
        root = "model" if len(program.chunks) == 1 else f"chunk_{value.chunk}"
        return root + _path(value.name)
    if isinstance(value, Parameter):
        return _shown(value.module, program) + _path(value.name)
    if isinstance(value, Attribute):
        return f"{_shown(value.of, program)}.{value.name}"
    if isinstance(value, str):
        return f'"{value}"'
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{_shown(name, program)}: {_shown(each, program)}' for name, each in value.items())}}}"
    if isinstance(value, tuple):
        inner = ", ".join(_shown(each, program) for each in value)
        return f"({inner},)" if len(value) == 1 else f"({inner})"
    if isinstance(value, list):
        return f"[{', '.join(_shown(each, program) for each in value)}]"
    return repr(value)


def _path(name: str) -> str:
    return "".join(f"[{part}]" if part.isdigit() else f".{part}" for part in name.split(".")) if name else ""
