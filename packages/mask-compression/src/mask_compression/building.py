"""Masks from what people have: lengths, cumulative ends, cu_seqlens, segment ids."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from mask_compression.checks import Ints, integer_array, whole_number
from mask_compression.mask import CompressedMask

Rows = npt.ArrayLike | Sequence[npt.ArrayLike]
"""One row of integers, or several rows, which need not have the same number of them."""


def causal(seq_length: int, rows: int = 1) -> CompressedMask:
    """The plain causal mask: each row is one document. Raises ValueError for sizes below 1."""
    seq_length = whole_number(seq_length, "seq_length", at_least=1)
    rows = whole_number(rows, "rows", at_least=1)
    return CompressedMask(rows, seq_length, np.arange(1, rows + 1) * seq_length)


def from_lengths(lengths: Rows, seq_length: int | None = None, *, allow_empty: bool = False) -> CompressedMask:
    """The mask of documents of these lengths.

    lengths:     integers (documents,) for one row, or one such list for each row.
    seq_length:  what each row must add up to; None: what the first row adds up to.
    allow_empty: drop documents of length 0, which do not change the mask, instead of refusing them.

    Raises TypeError for lengths that are no integers; ValueError for none, for lengths below 1 and for rows that do not
    add up to seq_length.
    """
    rows, one_row = _as_rows(lengths, "from_lengths: lengths")
    for number, row in enumerate(rows):
        name = "lengths" if one_row else f"lengths[{number}]"
        if (row < 0).any():
            at = int(np.argmax(row < 0))
            raise ValueError(f"from_lengths: {name}[{at}] = {row[at]} must not be negative")
        if (row == 0).any() and not allow_empty:
            at = int(np.argmax(row == 0))
            raise ValueError(
                f"from_lengths: {name}[{at}] = 0 is a document without tokens: lengths must be at least 1. "
                "Leave it out; the mask is the same."
            )
    size = int(rows[0].sum()) if seq_length is None else whole_number(seq_length, "seq_length", at_least=1)
    for number, row in enumerate(rows):
        total = int(row.sum())
        if total != size:
            name = "lengths" if one_row else f"lengths[{number}]"
            source = "seq_length" if seq_length is not None else "the sum of lengths[0]"
            raise ValueError(
                f"from_lengths: {name} add up to {total}, not to {source} = {size}{_pad_hint(size - total)}"
            )
    return _joined([np.cumsum(row[row > 0]) for row in rows], size)


def from_ends(ends: Rows, seq_length: int | None = None, *, allow_empty: bool = False) -> CompressedMask:
    """The mask of documents that end at these places (one past the last token): `actual_seq_len`, padded or not.

    ends:        integers, never decreasing. One list counts through the flattened rows of seq_length tokens (None: one
        row). Several lists, or an array (B, width), count from the first token of each row. A row's own end
        may be repeated: that is the padding of fixed-width forms.
    seq_length:  tokens of a row; None: the last end (of each list).
    allow_empty: drop other repeated ends, which are documents without tokens, instead of refusing them.

    Raises TypeError for ends that are no integers; ValueError for none, for ends that decrease, are repeated, lie
    beyond the row or do not reach its end.
    """
    rows, one_row = _as_rows(ends, "from_ends: ends")
    if one_row:
        return _from_flat_ends(rows[0], seq_length, "ends", allow_empty=allow_empty)
    size = int(rows[0][-1]) if seq_length is None else whole_number(seq_length, "seq_length", at_least=1)
    for number, row in enumerate(rows):
        if row[-1] != size:
            source = "seq_length" if seq_length is not None else "the last end of ends[0]"
            raise ValueError(
                f"from_ends: ends[{number}] ends at {row[-1]}, but {source} is {size}: the last end of every row must "
                f"be seq_length{_pad_hint(size - int(row[-1]))}"
            )
    return _joined([_distinct(row, size, f"ends[{n}]", allow_empty=allow_empty) for n, row in enumerate(rows)], size)


def from_cu_seqlens(
    cu_seqlens: npt.ArrayLike, seq_length: int | None = None, *, allow_empty: bool = False
) -> CompressedMask:
    """The mask of a variable-length kernel's `cu_seqlens` (documents + 1,): 0 and then the cumulative ends.

    seq_length: tokens of a row, where the list counts through several flattened rows; None: all is one row.

    Raises as `from_ends` does, and ValueError for a list that does not start with 0.
    """
    rows, one_row = _as_rows(cu_seqlens, "from_cu_seqlens: cu_seqlens")
    if not one_row:
        raise ValueError("from_cu_seqlens: cu_seqlens must be one list; it counts through the flattened rows")
    values = rows[0]
    if values[0] != 0 or len(values) < 2:
        raise ValueError(
            f"from_cu_seqlens: cu_seqlens must be a 0 followed by ends, not {_shown(values)}. "
            "For ends without the 0 use from_ends."
        )
    return _from_flat_ends(values[1:], seq_length, "cu_seqlens[1:]", allow_empty=allow_empty)


def from_segment_ids(segment_ids: npt.ArrayLike) -> CompressedMask:
    """The mask of tokens marked with the document that they belong to.

    segment_ids: integers (S,) or (B, S): neighbours with the same id are a document. Any ids will do, but
        within a row an id must not come back after another one: such a document would not lie in one piece.

    Raises TypeError for ids that are no integers; ValueError for none, for more than two dimensions, and for an
    id that comes back.
    """
    ids = integer_array(segment_ids, "from_segment_ids: segment_ids")
    if ids.size == 0 or ids.ndim not in (1, 2):
        raise ValueError(f"from_segment_ids: segment_ids must have shape (S,) or (B, S) and tokens, not {ids.shape}")
    ids = np.atleast_2d(ids)
    rows, seq_length = ids.shape
    changes = np.ones(ids.shape, np.bool_)
    np.not_equal(ids[:, 1:], ids[:, :-1], out=changes[:, 1:])
    starts = np.flatnonzero(changes)
    _refuse_returning_ids(ids.reshape(-1)[starts], starts, seq_length)
    return CompressedMask(rows, seq_length, np.append(starts[1:], rows * seq_length))


def _refuse_returning_ids(ids: npt.NDArray[Any], starts: Ints, seq_length: int) -> None:
    rows = starts // seq_length
    order = np.lexsort((starts, ids, rows))
    again = (ids[order][1:] == ids[order][:-1]) & (rows[order][1:] == rows[order][:-1])
    if again.any():
        at = order[1:][again].min()
        raise ValueError(
            f"from_segment_ids: id {ids[at]} comes back at position {starts[at] % seq_length} of row {rows[at]} after "
            "other ids: a document must lie in one piece. If the later piece is another document, give it its own id."
        )


def _from_flat_ends(values: Ints, seq_length: int | None, name: str, *, allow_empty: bool) -> CompressedMask:
    total = int(values[-1])
    if seq_length is None:
        return _joined([_distinct(values, max(total, 1), name, allow_empty=allow_empty)], total)
    size = whole_number(seq_length, "seq_length", at_least=1)
    if total < size or total % size:
        raise ValueError(
            f"the last of {name} is {total}, but rows of seq_length {size} end at multiples of {size}"
            + (_pad_hint(size - total) if total < size else "")
        )
    return CompressedMask(total // size, size, _distinct(values, size, name, allow_empty=allow_empty))


def _distinct(values: Ints, size: int, name: str, *, allow_empty: bool) -> Ints:
    """Increasing ends without repetitions; only ends of rows (multiples of `size`) may be repeated unasked."""
    steps = np.diff(values, prepend=0)
    if (steps < 0).any():
        at = int(np.argmax(steps < 0))
        before = values[at - 1] if at else 0
        raise ValueError(f"{name}[{at}] = {values[at]} after {before}: ends must never decrease")
    empty = (steps == 0) & ((values % size != 0) | (values == 0))
    if empty.any() and not allow_empty:
        at = int(np.argmax(empty))
        other = "use from_cu_seqlens if this is a cu_seqlens list" if at == 0 else "leave it out"
        raise ValueError(
            f"{name}[{at}] = {values[at]} repeats the end before it, so its document has no tokens: {other}; "
            "the mask is the same"
        )
    return values[steps > 0]


def _as_rows(values: Rows, name: str) -> tuple[list[Ints], bool]:
    """One or several rows of at least one integer each, and whether the caller gave one row without nesting."""
    nested = isinstance(values, (list, tuple)) and any(np.ndim(row) > 0 for row in values)
    rows = [integer_array(row, name) for row in values] if nested else [integer_array(values, name)]  # type: ignore[union-attr]
    one_row = not nested and rows[0].ndim == 1
    if not nested and rows[0].ndim == 2:
        rows = list(rows[0])
    if not rows or any(row.size == 0 for row in rows):
        raise ValueError(f"{name} must not be empty: a row has at least one document")
    if any(row.ndim != 1 for row in rows):
        raise ValueError(f"{name} must be one list of integers, or one list for each row")
    return [row.astype(np.int64) for row in rows], one_row


def _joined(row_ends: list[Ints], seq_length: int) -> CompressedMask:
    ends = [row + number * seq_length for number, row in enumerate(row_ends)]
    return CompressedMask(len(row_ends), seq_length, np.concatenate(ends))


def _pad_hint(missing: int) -> str:
    return f". If what is missing is padding, add a document of length {missing}." if missing > 0 else ""


def _shown(values: Ints) -> str:
    shown = ", ".join(str(value) for value in values[:6])
    return f"[{shown}, …]" if len(values) > 6 else f"[{shown}]"
