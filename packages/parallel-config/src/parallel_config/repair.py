"""The nearest edits that make a faulty file valid, each of them applied and checked before it is offered."""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Mapping
from typing import Any

from attrs import evolve, frozen

from parallel_config.document import Document
from parallel_config.loading import examine
from parallel_config.paths import as_keys, get, renamed, with_value, without
from parallel_config.problems import Edit, Fix, Problem
from parallel_config.source import read
from parallel_config.text_edits import LineEdit, apply_lines, line_edits

_SHOWN = 5
_EXAMINATIONS = 60
"""Candidates tried in all before giving up."""
_EXAMINATIONS_AFTER_SUCCESS = 10
"""Candidates tried once one is known to work."""
_TEXT_ROUNDS = 4
"""Faults of YAML itself that are mended one after another."""


@frozen
class Repair:
    """Edits that make the file valid when all of them are made: of lines first, then of fields."""

    edits: tuple[LineEdit | Edit, ...]

    def __str__(self) -> str:
        return "; ".join(map(str, self.edits))


def repairs(document: Document, world_size: int | None) -> tuple[Repair, ...]:
    """Up to five ways to make `document` valid, the ones that change least first; none if it already is."""
    if not examine(document, world_size).problems:
        return ()
    return tuple(_repairs(document, world_size, _TEXT_ROUNDS))


def _repairs(document: Document, world_size: int | None, rounds: int) -> list[Repair]:
    in_text = [problem for problem in document.problems if not problem.fixes]
    if not in_text:
        return [Repair(edits) for edits in _search(document, world_size)]
    if rounds == 0:
        return []
    for lines in line_edits(document, in_text[0]):
        changed = read(apply_lines(document.text, lines), document.filename or "")
        if not _progress(document, changed):
            continue
        if not examine(changed, world_size).problems:
            return [Repair(lines)]
        further = _repairs(changed, world_size, rounds - 1)
        if further:
            return [Repair((*lines, *repair.edits)) for repair in further]
    return []


def _progress(before: Document, after: Document) -> bool:
    if before.broken != after.broken:
        return before.broken
    if after.broken:
        return (after.problems[0].line or 0) > (before.problems[0].line or 0)
    return len(after.problems) < len(before.problems)


def _search(document: Document, world_size: int | None) -> list[tuple[Edit, ...]]:
    """Best-first over sets of edits: fewest edits made plus problems left, then the smallest change."""
    order = itertools.count()
    values = document.values
    problems = examine(document, world_size).problems
    queue: list[tuple[int, float, int, Fix, tuple[Problem, ...]]] = [(0, 0.0, next(order), (), problems)]
    found: list[tuple[float, Fix]] = []
    seen: set[frozenset[str]] = set()
    examined, limit = 0, _EXAMINATIONS
    while queue and examined < limit and len(found) < _SHOWN:
        _, _, _, edits, problems = heapq.heappop(queue)
        for fix in next((problem.fixes for problem in problems if problem.fixes), ()):
            replaced = {edit.path for edit in fix}
            candidate = (*(edit for edit in edits if edit.path not in replaced), *fix)
            key = frozenset(map(repr, candidate))
            if key in seen or examined >= limit:
                continue
            seen.add(key)
            examined += 1
            left = examine(_edited(document, candidate), world_size).problems
            size = sum(_size(edit, values) for edit in candidate)
            if left:
                heapq.heappush(queue, (len(candidate) + len(left), size, next(order), candidate, left))
            else:
                found.append((len(candidate) + size / 1000, candidate))
                limit = min(limit, examined + _EXAMINATIONS_AFTER_SUCCESS)
    return _smallest(found)


def _smallest(found: list[tuple[float, Fix]]) -> list[Fix]:
    kept: list[Fix] = []
    for _, edits in sorted(found, key=lambda item: item[0]):
        if not any(set(map(repr, smaller)) <= set(map(repr, edits)) for smaller in kept):
            kept.append(edits)
    return kept[:_SHOWN]


def _edited(document: Document, edits: Fix) -> Document:
    values: Mapping[str, Any] = document.values
    for edit in edits:
        values = apply_edit(values, edit)
    return evolve(Document.from_values(values), filename=document.filename)


def apply_edit(values: Mapping[str, Any], edit: Edit) -> Mapping[str, Any]:
    """A copy of a file's values with one edit made."""
    keys = as_keys(edit.path, values)
    if edit.action == "set":
        changed = with_value(values, keys, edit.value)
    elif edit.action == "remove":
        changed = without(values, keys)
    else:
        changed = renamed(values, keys, edit.value)
    return dict(changed)


def _size(edit: Edit, values: Mapping[str, Any]) -> float:
    """How far an edit goes: the ratio of numbers as a logarithm; a removal is further than a new value."""
    if edit.action == "rename":
        return 0.0
    if edit.action == "remove":
        return 3.0
    try:
        old = get(values, as_keys(edit.path, values))
    except (KeyError, IndexError, TypeError):
        return 1.0
    if type(old) in (int, float) and type(edit.value) in (int, float) and old > 0 and edit.value > 0:
        return abs(math.log(edit.value / old))
    return 1.0
