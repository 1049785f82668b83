"""The nearest edits that make a faulty file valid, each of them applied and checked before it is offered."""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Mapping
from typing import Any

from attrs import evolve, frozen

from parallel_config.document import Document
from parallel_config.likeness import likeness
from parallel_config.loading import examine
from parallel_config.paths import as_keys, get, renamed, with_value, without
from parallel_config.problems import Edit, Fix, Problem
from parallel_config.source import read
from parallel_config.text_edits import LineEdit, LineGroup, apply_lines, line_edits

_SHOWN = 5
_EXAMINATIONS = 60
"""Candidates tried in all before giving up."""
_EXAMINATIONS_AFTER_SUCCESS = 6
"""Candidates tried once one is known to work."""
_STEP = 1e-3
_LOST = 3.5
_GIVEN_UP = 4.0
_DEGREES = frozenset(f"parallelism.{kind}_parallel" for kind in ("tensor", "context", "pipeline", "expert"))
_TEXT_ROUNDS = 4
"""Faults of YAML itself that are mended one after another."""


@frozen
class Repair:
    """Edits that make the file valid when all of them are made: of lines first, then of fields."""

    edits: tuple[LineEdit | Edit, ...]

    def __str__(self) -> str:
        return "; ".join(map(str, self.edits))


def repairs(document: Document, world_size: int | None) -> tuple[Repair, ...]:
    """Up to five ways to make `document` valid, the ones that change least first; none if it already is.

    None either for a file of another format, or of a model that does not exist here.
    """
    problems = examine(document, world_size).problems
    if not all(problem.mendable for problem in problems):
        return ()
    return tuple(_repairs(document, problems, world_size, _TEXT_ROUNDS))


def _repairs(document: Document, problems: tuple[Problem, ...], world_size: int | None, rounds: int) -> list[Repair]:
    if not problems:
        return []
    in_text = [problem for problem in document.problems if not problem.fixes]
    if not in_text:
        return [Repair(edits) for edits in _search(document, problems, world_size)]
    if rounds == 0:
        return []
    for alternatives in line_edits(document, in_text[0]):
        found = [repair for lines in alternatives for repair in _mended(document, lines, world_size, rounds)]
        if found:
            return sorted(found, key=lambda repair: len(repair.edits))[:_SHOWN]
    return []


def _mended(document: Document, lines: LineGroup, world_size: int | None, rounds: int) -> list[Repair]:
    """The repairs that begin with these lines. A line is not rewritten for a field that is then taken out."""
    changed = read(apply_lines(document.text, lines), document.filename or "")
    if not _progress(document, changed):
        return []
    problems = examine(changed, world_size).problems
    if not problems:
        return [Repair(lines)]
    rewritten = {edit.line for edit in lines if edit.content is not None}
    there = {path for path, spot in changed.spots.items() if spot.key_line in rewritten}
    return [
        Repair((*lines, *repair.edits))
        for repair in _repairs(changed, problems, world_size, rounds - 1)
        if not any(isinstance(edit, Edit) and edit.action == "remove" and edit.path in there for edit in repair.edits)
    ]


def _progress(before: Document, after: Document) -> bool:
    if before.broken != after.broken:
        return before.broken
    if after.broken:
        return (after.problems[0].line or 0) > (before.problems[0].line or 0)
    return len(after.problems) < len(before.problems)


def _search(document: Document, problems: tuple[Problem, ...], world_size: int | None) -> list[tuple[Edit, ...]]:
    """Best-first over sets of edits, by what they cost and how many problems they leave."""
    order = itertools.count()
    values = document.values
    queue: list[tuple[float, int, Fix, tuple[Problem, ...]]] = [(0.0, next(order), (), problems)]
    found: list[tuple[float, Fix]] = []
    seen: set[frozenset[str]] = set()
    examined, limit = 0, _EXAMINATIONS
    while queue and examined < limit and len(found) < _SHOWN:
        _, _, edits, problems = heapq.heappop(queue)
        for fix in next((problem.fixes for problem in problems if problem.fixes), ()):
            replaced = {edit.path for edit in fix}
            candidate = (*(edit for edit in edits if edit.path not in replaced), *fix)
            key = frozenset(map(repr, candidate))
            if key in seen or examined >= limit:
                continue
            seen.add(key)
            examined += 1
            edited = _edited(document, candidate)
            if not edited.values:
                continue  # an empty file is refused, too
            left = examine(edited, world_size).problems
            cost = sum(_cost(edit, values) for edit in candidate)
            if left:
                heapq.heappush(queue, (cost + len(left), next(order), candidate, left))
            else:
                found.append((cost, candidate))
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
    return evolve(Document.from_values(values), filename=document.filename, texts=document.texts)


def apply_edit(values: Mapping[str, Any], edit: Edit) -> Mapping[str, Any]:
    """A copy of a file's values with one edit made."""
    keys = as_keys(edit.path, values)
    if edit.action == "set":
        changed = with_value(values, keys, edit.value)
    elif edit.action == "remove":
        changed = without(values, keys)
    elif edit.action == "move":
        changed = with_value(without(values, keys), (edit.value, keys[-1]), get(values, keys))
    else:
        changed = renamed(values, keys, edit.value)
    return dict(changed)


def _cost(edit: Edit, values: Mapping[str, Any]) -> float:
    """Each edit costs 1 and very little more the further it goes; to lose a field or a dimension costs several."""
    if edit.action in {"rename", "move"}:
        return 1.0
    if edit.action == "remove":
        return _LOST
    try:
        old = get(values, as_keys(edit.path, values))
    except (KeyError, IndexError, TypeError):
        return 1.0 + _STEP
    if edit.path in _DEGREES and edit.value == 1 and isinstance(old, int) and old > 1:
        return _GIVEN_UP
    return 1.0 + _distance(old, edit.value) * _STEP


def _distance(old: Any, new: Any) -> float:
    """Between numbers the logarithm of their ratio, between words how little they have in common, otherwise 1."""
    if isinstance(old, str) and isinstance(new, str):
        return 1.0 - likeness(old, new)
    if type(old) in (int, float) and type(new) in (int, float) and old > 0 and new > 0:
        return abs(math.log(new / old))
    return 1.0
