"""Checking the numbers that describe a pipeline."""

from __future__ import annotations

_MEANING = {
    "stages": "pipeline stages, one on each rank",
    "chunks": "model chunks on each rank",
    "microbatches": "micro-batches in a step",
}


def check_sizes(**sizes: int) -> None:
    """Raise ValueError for a number below 1 and TypeError for one that is not an int."""
    for name, value in sizes.items():
        if isinstance(value, bool) or not isinstance(value, int):
            raise TypeError(f"{name} = {value!r} must be an int, the number of {_MEANING[name]}")
        if value < 1:
            raise ValueError(f"{name} = {value} must be at least 1: it is the number of {_MEANING[name]}")
