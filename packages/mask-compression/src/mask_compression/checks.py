"""Checks of what users pass in: whole numbers, arrays of them, ranges of positions."""

from __future__ import annotations

import operator
from typing import Any

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Range = tuple[int, int]
"""Positions `start` to `stop - 1` of a row."""


def whole_number(value: Any, name: str, *, at_least: int) -> int:
    """The value as an int. Raises TypeError for what is no whole number (bool included), ValueError if too small."""
    if isinstance(value, (bool, np.bool_)):
        raise TypeError(f"{name} must be a whole number, not {value}")
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"{name} must be a whole number, not {value!r}") from None
    if number < at_least:
        raise ValueError(f"{name} = {number} must be at least {at_least}")
    return number


def integer_array(values: Any, name: str) -> npt.NDArray[Any]:
    """The values as an array of integers, uncopied where possible.

    Raises TypeError for bools, floats and anything else that is no integer; ValueError for lists of unequal lengths.
    """
    try:
        array = np.asarray(values)
    except ValueError:
        raise ValueError(f"{name} must have rows of one length") from None
    if array.size == 0:
        return array.astype(np.int64)
    if array.dtype.kind not in "iu":
        raise TypeError(f"{name} must hold integers, but its dtype is {array.dtype}")
    return array


def piece_of_row(piece: Range, seq_length: int, name: str) -> Range:
    """A half-open range of positions, checked. Raises ValueError if it is empty or leaves the row."""
    try:
        start, stop = map(operator.index, piece)
    except (TypeError, ValueError):
        raise TypeError(f"{name} must be a pair of whole numbers (start, stop), not {piece!r}") from None
    if not 0 <= start < stop <= seq_length:
        raise ValueError(
            f"{name} = ({start}, {stop}) must be a piece of a row: 0 <= start < stop <= seq_length = {seq_length}"
        )
    return start, stop


def check_row(row: int, rows: int) -> None:
    """Rows count from 0, not from the end.

    Raises ValueError for a row that a mask of so many rows does not have, TypeError for what is no whole number.
    """
    if not isinstance(row, (int, np.integer)):
        raise TypeError(f"row must be a whole number, not {row!r}")
    if not 0 <= row < rows:
        has = "one row, 0" if rows == 1 else f"rows 0 to {rows - 1}"
        raise ValueError(f"row {row} is outside the mask, which has {has}")
