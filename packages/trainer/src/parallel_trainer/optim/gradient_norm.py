"""The L2 norm of all gradients, each distinct element counted once, and clipping by it."""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np
from device_mesh import Communicator

# Elements that are squared in float64 at a time: they stay in a core's cache.
_BLOCK = 1 << 15


def global_norm(parts: Iterable[tuple[np.ndarray, int]], world: Communicator) -> float:
    """The L2 norm of a model's gradients; the same number on every rank.

    parts: gradient arrays of this rank, each with the number of ranks of the world that hold the same elements of it.
        Squares are summed in float64 and divided by that number, so that each distinct element counts once.
    world: every rank that holds a part of the gradients. Collective over it.
    """
    total = 0.0
    with np.errstate(over="ignore", invalid="ignore"):  # whoever asks for the norm looks at it
        for gradient, holders in parts:
            flat = gradient.reshape(-1)
            blocks = (flat[first : first + _BLOCK] for first in range(0, flat.size, _BLOCK))
            wide = (block.astype(np.float64, copy=False) for block in blocks)
            total += sum(float(block @ block) for block in wide) / holders
    return math.sqrt(float(world.all_reduce(np.array([total]))[0]))


def clip_coefficient(norm: float, max_norm: float) -> float:
    """What to multiply the gradients by so that their norm is at most `max_norm`; 1 where `max_norm` is 0 or less.

    The reference's rule: max_norm / (norm + 1e-6), where that is below 1.
    """
    if max_norm <= 0:
        return 1.0
    return min(1.0, max_norm / (norm + 1e-6))
