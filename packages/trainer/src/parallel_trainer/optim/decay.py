"""Which weights decay: the rules of `optimizer.weight_decay_include` and `weight_decay_exclude`."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase

from parallel_trainer.parallel.weights import Weight


def decays(weight: Weight, *, include: Sequence[str] | None = None, exclude: Sequence[str] | None = None) -> bool:
    """Whether weight decay applies to this weight.

    A rule matches a name that it equals, is a part of, or matches as a glob. `include` beats `exclude`, and both
    beat the default: everything decays except one-dimensional weights (norms) and biases.
    """
    if _matches(weight.name, include):
        return True
    if _matches(weight.name, exclude):
        return False
    return len(weight.shape) > 1 and not weight.name.endswith("bias")


def _matches(name: str, rules: Sequence[str] | None) -> bool:
    return any(rule in name or fnmatchcase(name, rule) for rule in rules or ())
