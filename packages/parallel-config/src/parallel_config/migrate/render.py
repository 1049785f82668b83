"""The new file with its comments, and the report for a terminal."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import PurePath
from typing import Any

import yaml
from attrs import fields

from parallel_config.migrate.degrees import Degrees
from parallel_config.migrate.draft import Carried, Kind, Left
from parallel_config.paths import last
from parallel_config.problems import Dumper, show
from parallel_config.schema import TrainConfig

_WIDTH = 100
_SECTIONS = [attribute.name for attribute in fields(TrainConfig)]


def new_text(name: str, found: Degrees, carried: Sequence[Carried], left: Sequence[Left]) -> str:
    """The new file: what it is for, its fields with their origins, and what of the old file has no counterpart."""
    head = (
        f"# Made from {_one_line(PurePath(name).name)} by parallel-config migrate.",
        f"# It is for {_ranks(found)}.",
        f"# Check it: parallel-config check FILE --world-size {found.world_size} --explain",
    )
    body = list(_section(_tree(carried), 0))
    foot = [f"# {line}".rstrip() for line in left_lines(left)]
    return "\n".join([*head, *body, "", "# Without a counterpart in this format", *foot, ""])


def left_lines(left: Sequence[Left]) -> Iterator[str]:
    """What has no counterpart, by what that means, what changes training first."""
    for kind in Kind:
        of_kind = [item for item in left if item.kind is kind]
        if of_kind:
            yield f"{kind.value}:"
            yield from (f"  {_left(item)}" for item in of_kind)


def _left(item: Left) -> str:
    place = f" (line {item.line})" if item.line else ""
    value = "" if item.value is None else f" {_one_line(show(item.value))}"
    return f"{_one_line(item.path)}{value}{place}: {item.why}"


def _ranks(found: Degrees) -> str:
    if not found.split:
        return f"--world-size {found.world_size}"
    parts = (
        ("data_parallel", found.dp),
        ("model_parallel", found.mp),
        ("context_parallel", found.cp),
        ("pipeline_stage", found.pp),
    )
    return f"--world-size {found.world_size} = {' · '.join(f'{name} {degree}' for name, degree in parts)}"


def _tree(carried: Iterable[Carried]) -> dict[str, Any]:
    """Fields by section, sections in the order of the schema; of a field that is written twice, the last."""
    tree: dict[str, Any] = {}
    for item in sorted(carried, key=lambda item: _SECTIONS.index(item.path.partition(".")[0])):
        *sections, name = item.path.split(".")
        inner = tree
        for section in sections:
            inner = inner.setdefault(section, {})
        inner[name] = item
    return tree


def _section(tree: Mapping[str, Any], depth: int) -> Iterator[str]:
    margin = "  " * depth
    for name, item in tree.items():
        if isinstance(item, Carried):
            yield from _field(name, item, margin)
            continue
        if depth == 0:
            yield ""
        yield f"{margin}{name}:"
        yield from _section(item, depth + 1)


def _field(name: str, item: Carried, margin: str) -> Iterator[str]:
    line = f"{margin}{name}: {_yaml(item.value)}"
    comment = _one_line(_origin(name, item))
    if not comment:
        yield line
    elif len(line) + len(comment) + 4 <= _WIDTH:
        yield f"{line}  # {comment}"
    else:
        yield f"{margin}# {comment}"
        yield line


def _origin(name: str, item: Carried) -> str:
    """Where a value came from: the old fields where they have other names, and how where it was computed."""
    renamed = [source for source in item.sources if last(source) != name and last(source) not in item.how]
    return ": ".join(part for part in (", ".join(renamed), item.how) if part)


def _yaml(value: Any) -> str:
    text: str = yaml.dump(
        value, Dumper=Dumper, default_flow_style=True, width=1_000_000, allow_unicode=True, sort_keys=False
    )
    return text.removesuffix("\n").removesuffix("\n...")


def _one_line(text: str) -> str:
    return " ".join(text.split())
