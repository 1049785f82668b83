"""All rules, in the order in which they run: limits of single fields first, then what follows from them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from parallel_config.problems import Problem
from parallel_config.rules import (
    context,
    dataset,
    degrees,
    expert,
    layers,
    limits,
    mask,
    model,
    pipeline,
    required,
    running,
    tensor,
)
from parallel_config.rules.engine import Facts, run

_RULES = (
    limits.callbacks,
    *required.RULES,
    *degrees.RULES,
    *tensor.RULES,
    *context.RULES,
    *mask.RULES,
    *pipeline.RULES,
    *expert.RULES,
    *model.RULES,
    *dataset.RULES,
    *running.RULES,
    *layers.RULES,
)


def broken_rules(facts: Facts, failed: Iterable[str] = ()) -> Iterator[Problem]:
    """All problems of a configuration, without those that only follow from a field that already failed."""
    at_fault = set(failed)
    for problem in limits.out_of_limits(facts):
        at_fault.add(problem.path)
        yield problem
    yield from run(_RULES, facts, at_fault)


__all__ = ["Facts", "broken_rules"]
