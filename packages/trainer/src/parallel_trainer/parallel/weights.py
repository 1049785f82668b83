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
    tp_block:  indices of `tp_dim` that stay together: the size of a head.
    tp_fused:  sizes of the weights that lie one after the other along `tp_dim` and are split one by one; () for one.
    ep_dim:    dimension that expert parallelism splits, the experts, or None. Such a weight has no tp_dim.
    trainable: False for a frozen weight: it is sharded and gathered, and has no gradient or optimizer state.
    narrow:    whether units may be given it in a narrower type than its shard has: not what experts are chosen by.

    Raises ValueError for a weight with both, and for pieces that do not make up the dimension in whole blocks.
    """

    name: str
    shape: tuple[int, ...]
    init: Normal | Constant = field(kw_only=True)
    tp_dim: int | None = field(default=None, kw_only=True)
    tp_block: int = field(default=1, kw_only=True)
    tp_fused: tuple[int, ...] = field(default=(), kw_only=True)
    ep_dim: int | None = field(default=None, kw_only=True)
    trainable: bool = field(default=True, kw_only=True)
    narrow: bool = field(default=True, kw_only=True)

    def __attrs_post_init__(self) -> None:
        if self.ep_dim is not None and self.tp_dim is not None:
            raise ValueError(
                f"{self.name}: ep_dim is {self.ep_dim} and tp_dim {self.tp_dim}: experts are split over the ranks of "
                "expert parallelism and not by tensor parallelism; declare one of them"
            )
        if self.tp_dim is None:
            return
        size = self.shape[self.tp_dim]
        pieces = self.tp_fused or (size,)
        if sum(pieces) != size or any(piece % self.tp_block for piece in pieces):
            raise ValueError(
                f"{self.name}: dimension {self.tp_dim} of {size} consists of {pieces} in blocks of {self.tp_block}: "
                f"the pieces must add up to {size} and be multiples of {self.tp_block}"
            )

    @property
    def split_axis(self) -> Literal["tp", "ep"]:
        """The mesh axis whose ranks hold different parts of it, or each the whole where `split_dim` is None."""
        return "tp" if self.ep_dim is None else "ep"

    @property
    def split_dim(self) -> int | None:
        """The dimension that is split over `split_axis`."""
        return self.tp_dim if self.ep_dim is None else self.ep_dim

    @property
    def shard_axis(self) -> Literal["fsdp", "efsdp"]:
        """The mesh axis over which the flat part is cut once more."""
        return "fsdp" if self.ep_dim is None else "efsdp"

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


def split_evenly(size: int, parts: int, part: int) -> tuple[int, int]:
    """The piece `start` to `stop - 1` of `size` that part `part` has; what does not divide goes to the first parts.

    >>> [split_evenly(10, 4, part) for part in range(4)]
    [(0, 3), (3, 6), (6, 8), (8, 10)]
    """
    piece, more = divmod(size, parts)
    start = part * piece + min(part, more)
    return start, start + piece + (part < more)


def initial_rows(weight: Weight, *, seed: int, rows: np.ndarray) -> np.ndarray:
    """These rows (indices of dimension 0) of a weight's initial values, float64 (len(rows), elements of a row).

    Each row has a random generator of its own, keyed by seed, name and row: a rank makes just the rows it holds, and
    what it makes does not depend on how the weight is split. A weight of no dimension has one row.
    """
    row_size = math.prod(weight.shape[1:])
    values = np.empty((len(rows), row_size))
    if isinstance(weight.init, Constant):
        values[...] = weight.init.value
        return values
    digest = hashlib.blake2b(f"{seed}/{weight.name}".encode(), digest_size=16).digest()
    key = np.frombuffer(digest, dtype=np.uint64)
    for place, row in enumerate(rows.tolist()):
        generator = np.random.Generator(np.random.Philox(key=key, counter=[0, 0, 0, row]))
        values[place] = generator.standard_normal(row_size)
    return values * weight.init.std


def initial_values(weight: Weight, *, seed: int) -> np.ndarray:
    """The whole weight as it starts, float64 of its shape."""
    rows = np.arange(weight.shape[0] if weight.shape else 1)
    return initial_rows(weight, seed=seed, rows=rows).reshape(weight.shape)
