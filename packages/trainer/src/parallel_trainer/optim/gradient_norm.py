"""The L2 norm of all gradients, each distinct element counted once, and clipping by it."""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np
from device_mesh import Communicator


def global_norm(parts: Iterable[tuple[np.ndarray, Communicator]]) -> float:
    """The L2 norm of a model's gradients; the same number on every rank.

    parts: gradient arrays of this rank, each with the group whose ranks hold *different* elements of it: the shard
        group of a sharded gradient; a group of one rank where every rank holds the same. Ranks outside that
        group (replicas) hold copies and are not counted. Squares are summed in float64.

    Collective over each of the groups.
    """
    squares: dict[tuple[int, ...], tuple[float, Communicator]] = {}
    for gradient, group in parts:
        flat = gradient.reshape(-1).astype(np.float64, copy=False)
        total, _ = squares.get(group.ranks, (0.0, group))
        squares[group.ranks] = (total + float(flat @ flat), group)
    return math.sqrt(sum(float(group.all_reduce(np.array([total]))[0]) for total, group in squares.values()))


def clip_coefficient(norm: float, max_norm: float) -> float:
    """What to multiply the gradients by so that their norm is at most `max_norm`; 1 where `max_norm` is 0 or less.

    The reference's rule: max_norm / (norm + 1e-6), where that is below 1.
    """
    if max_norm <= 0:
        return 1.0
    return min(1.0, max_norm / (norm + 1e-6))
