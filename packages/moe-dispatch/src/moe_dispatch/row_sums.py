"""Weighted sums of rows, gathered block by block so that the gathered rows stay in the processor's cache."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from attrs import frozen
from device_mesh.half import wide, wide_type

from moe_dispatch.layout import Array, Ints
from moe_dispatch.plan import starts_of

_BLOCK_BYTES = 1 << 19


@frozen(eq=False)
class RowSums:
    """Sums of consecutive slots: sum s is of the next `lengths[s]` slots. Made by `RowSums.of`."""

    size: int
    # Sums of equally many slots: which they are (n,), and their slots (n, length).
    _parts: tuple[tuple[Ints, Ints], ...]

    @classmethod
    def of(cls, lengths: Ints) -> RowSums:
        starts = starts_of(lengths)
        different = np.unique(lengths)
        groups = [(length, np.flatnonzero(lengths == length)) for length in different.tolist()]
        parts = ((which, starts[which, None] + np.arange(length)) for length, which in groups)
        return cls(lengths.size, tuple(parts))

    def add(self, rows: Array, places: Ints, weights: Array | None = None) -> Array:
        """(sums, H): the sums of weight times row over the slots.

        rows (S, H); places (S,): the row of each slot; weights (S,) by slot, all 1 if left out, of the dtype in which
        rows are added up.
        """
        if weights is None:
            weights = np.ones(places.size, wide_type(rows.dtype))
        out = np.empty((self.size, rows.shape[1]), rows.dtype)
        for which, slots in self._parts:
            length = slots.shape[1]
            for block in blocks(len(which), length * rows.shape[1] * rows.itemsize):
                taken = wide(np.take(rows, places[slots[block]], axis=0))
                out[which[block]] = np.einsum("sk,skh->sh", weights[slots[block]], taken)
        return out


def scale_rows(rows: Array, weights: Array, others: Array) -> Array:
    """Multiply each row by its weight, in place, and return what its product with the other array's row was, (R,).

    rows and others (R, H); weights and the products (R,) have the dtype in which rows are added up.
    """
    products = np.empty(len(rows), wide_type(rows.dtype))
    for block in blocks(len(rows), rows.shape[1] * rows.itemsize):
        taken = wide(rows[block])
        np.einsum("rh,rh->r", taken, wide(others[block]), out=products[block])
        np.multiply(taken, weights[block, None], out=taken)
        if taken.dtype != rows.dtype:
            rows[block] = taken
    return products


def blocks(number: int, bytes_each: int) -> Iterator[slice]:
    """Slices of 0 to number-1 whose items fit in the cache together."""
    step = max(1, _BLOCK_BYTES // max(1, bytes_each))
    return (slice(start, start + step) for start in range(0, number, step))
