"""Plans, problems and repairs as text for a terminal and as values for JSON."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from attrs import asdict

from parallel_config.document import Document
from parallel_config.plan import ParallelPlan
from parallel_config.problems import Problem, show
from parallel_config.repair import Repair
from parallel_config.stages import as_texts


def plan_table(plan: ParallelPlan) -> str:
    """One line for each value, names in one column."""
    values = plan_values(plan)
    if plan.stage_layers:
        values["stage_layers"] = ", ".join(as_texts(plan.stage_layers))
    width = max(map(len, values))
    return "\n".join(
        f"{name:<{width}}  {value if isinstance(value, str) else show(value)}" for name, value in values.items()
    )


def plan_values(plan: ParallelPlan) -> dict[str, Any]:
    """The plan's names and values as JSON holds them."""
    return {**asdict(plan), "stage_layers": [list(layers) for layers in plan.stage_layers]}


def problem_text(problem: Problem, document: Document) -> str:
    """The problem, below it the line of the file with a mark under the place."""
    lines = document.text.split("\n")
    if problem.line is None or problem.column is None or problem.line > len(lines):
        return str(problem)
    content = lines[problem.line - 1].rstrip("\r")
    margin = f"{problem.line:>6} | "
    mark = " " * (len(margin) + problem.column - 1) + "^"
    return f"{problem}\n{margin}{content.replace(chr(9), ' ')}\n{mark}"


def problem_values(problem: Problem) -> dict[str, Any]:
    """The parts of a problem as JSON holds them."""
    return {
        "path": problem.path,
        "value": json.loads(json.dumps(problem.value, default=str), parse_constant=str),
        "rule": problem.rule,
        "suggestion": problem.suggestion,
        "file": problem.file,
        "line": problem.line,
        "column": problem.column,
    }


def repairs_text(repairs: Iterable[Repair]) -> str:
    """The repairs as a list; empty without any."""
    lines = [f"  {number}. {repair}" for number, repair in enumerate(repairs, 1)]
    return "\n".join(["Edits that would make it valid:", *lines]) if lines else ""
