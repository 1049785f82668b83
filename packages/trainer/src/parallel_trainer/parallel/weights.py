"""What a model declares about each of its weights, and everything that follows from it.

One `Weight` per weight, written where the model uses it. From it follow the initial values, how it is
sharded, which ranks hold copies, what the gradient norm counts and the names in a checkpoint.
"""

from __future__ import annotations

import hashlib
import math
from typing import Literal

import numpy as np
from attrs import field, frozen


@frozen
class Normal:
    """Initial values drawn from a normal distribution with mean 0."""

    std: float


@frozen
class Constant:
    """Initial values that are all the same."""

    value: float


@frozen
class Weight:
    """One weight of a model, as it would be on a single device.

    name:      full dotted name, the one used by Hugging Face checkpoints.
    shape:     global shape.
    init:      how it starts; independent of the plan, see `initial_values`.
    tp_dim:    dimension that tensor parallelism splits, or None where every tp rank holds all of it.
    ep_dim:    dimension that expert parallelism splits, or None.
    axis:      mesh axis its flat shard lives on: `fsdp`, or `efsdp` for expert weights.
    trainable: False for a frozen weight: it is sharded and gathered, and has no gradient or optimizer state.
    """

    name: str
    shape: tuple[int, ...]
    init: Normal | Constant = field(kw_only=True)
    tp_dim: int | None = field(default=None, kw_only=True)
    ep_dim: int | None = field(default=None, kw_only=True)
    axis: Literal["fsdp", "efsdp"] = field(default="fsdp", kw_only=True)
    trainable: bool = field(default=True, kw_only=True)

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


def shard_sizes(size: int, parts: int) -> tuple[int, ...]:
    """Elements of a flat weight that each of `parts` ranks holds: equal pieces, the last ones shorter or empty.

    >>> shard_sizes(15, 4)
    (4, 4, 4, 3)
    >>> shard_sizes(5, 4)
    (2, 2, 1, 0)
    """
    piece = -(-size // parts)
    return tuple(max(0, min(piece, size - part * piece)) for part in range(parts))


def initial_values(weight: Weight, *, seed: int, start: int = 0, stop: int | None = None) -> np.ndarray:
    """Elements `start` to `stop` of the flattened weight, float64.

    Each row (index of dimension 0) has a random generator of its own, keyed by seed, name and row: a rank
    makes just the rows it holds, and what it makes does not depend on how the weight is split.
    """
    stop = weight.size if stop is None else stop
    if isinstance(weight.init, Constant):
        return np.full(stop - start, weight.init.value)
    if stop <= start:
        return np.empty(0)
    row_size = weight.size // weight.shape[0] if weight.shape else 1
    digest = hashlib.blake2b(f"{seed}/{weight.name}".encode(), digest_size=16).digest()
    key = np.frombuffer(digest, dtype=np.uint64)
    first, last = start // row_size, -(-stop // row_size)
    rows = np.empty((last - first, row_size))
    for row in range(first, last):
        generator = np.random.Generator(np.random.Philox(key=key, counter=[0, 0, 0, row]))
        rows[row - first] = generator.standard_normal(row_size)
    return rows.reshape(-1)[start - first * row_size : stop - first * row_size] * weight.init.std
