"""What a trainer did in a run, and how far two of them are apart."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np


@dataclass
class Run:
    """What a trainer did: the weights it began and ended with, and for each step its numbers in order, by name."""

    initial: dict[str, np.ndarray]
    steps: list[dict[str, np.ndarray]] = field(default_factory=list)
    final: dict[str, np.ndarray] = field(default_factory=dict)


@dataclass(frozen=True)
class Difference:
    """How far two runs are apart in a quantity, relative to its largest element; `step` counts from 0."""

    quantity: str
    relative: float
    step: int | None = None


def differences(ours: Run, theirs: Run) -> Iterator[Difference]:
    """Of everything that two runs did, in the order in which they did it. Weights are those after the last step."""
    assert len(ours.steps) == len(theirs.steps)
    for step, (left, right) in enumerate(zip(ours.steps, theirs.steps, strict=True)):
        assert left.keys() == right.keys()
        for name, value in right.items():
            yield Difference(name, relative(left[name], value), step)
    assert ours.final.keys() == theirs.final.keys()
    for name, value in theirs.final.items():
        yield Difference(name, relative(ours.final[name], value))


def relative(ours: np.ndarray, theirs: np.ndarray) -> float:
    """The largest difference of two arrays, over the largest element of the second; inf for what is not finite."""
    apart = float(np.abs(ours - theirs).max())
    if not apart:
        return 0.0
    scale = float(np.abs(theirs).max())
    return apart / scale if np.isfinite(apart) and scale else np.inf


def initial_surprises(weights: Mapping[str, np.ndarray], std: float) -> dict[str, float]:
    """How surprising each weight is as a start with transformers' rule, and all matrices together: standard errors.

    Matrices are normal with deviation `std`. Norms start with 1 and biases with 0: all else is infinitely surprising.
    """
    matrices = {name: values for name, values in weights.items() if values.ndim > 1}
    matrices["all matrices"] = np.concatenate([values.reshape(-1) for values in matrices.values()])
    constants = {
        name: 0.0 if (values == (0 if name.endswith("bias") else 1)).all() else np.inf
        for name, values in weights.items()
        if values.ndim == 1
    }
    return constants | {name: _surprise(values / std) for name, values in matrices.items()}


def _surprise(values: np.ndarray) -> float:
    """Of the mean and the deviation of numbers that should be standard normal."""
    mean, deviation = values.mean() * np.sqrt(values.size), (values.std() - 1) * np.sqrt(2 * values.size)
    return float(max(abs(mean), abs(deviation)))
