"""The compressed mask: rows of packed documents, held as where each document ends."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from mask_compression.checks import Ints, Range, check_row, integer_array, whole_number

__all__ = ["CompressedMask", "Ints", "Range"]

_INT32_MAX = 2**31 - 1


@dataclass(frozen=True, eq=False)
class CompressedMask:
    """A block-diagonal causal mask: a token attends itself and the tokens before it in its own document.

    rows:       B, sequences that never see each other.
    seq_length: S, tokens of each of them.
    ends:       int64 (documents,), one past the last token of each document, counted through the flattened rows:
        strictly increasing, and every row's end (S, 2S, … B·S) is among them. So a row cannot lack its closing
        boundary, and no document crosses from one row into the next. A plain causal mask has one document a row.

    A value: immutable (`ends` is read-only), compared by content, hashable. `building` and `tokens` make it from what
    people have. Only `dense` needs memory in proportion to the square of the sequence.

    Raises TypeError and ValueError for sizes and ends that break these rules.
    """

    rows: int
    seq_length: int
    ends: Ints

    def __post_init__(self) -> None:
        rows = whole_number(self.rows, "rows", at_least=1)
        seq_length = whole_number(self.seq_length, "seq_length", at_least=1)
        ends = integer_array(self.ends, "ends").astype(np.int64)
        _check_ends(ends, rows, seq_length)
        ends.flags.writeable = False
        for name, value in (("rows", rows), ("seq_length", seq_length), ("ends", ends)):
            object.__setattr__(self, name, value)

    def __reduce__(self) -> tuple[type[CompressedMask], tuple[int, int, Ints]]:
        # Made anew where it is unpickled or copied, so that its ends are read-only there too.
        return CompressedMask, (self.rows, self.seq_length, self.ends)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, CompressedMask):
            return NotImplemented
        same_shape = (self.rows, self.seq_length) == (other.rows, other.seq_length)
        return same_shape and np.array_equal(self.ends, other.ends)

    def __hash__(self) -> int:
        return hash((self.rows, self.seq_length, self.ends.tobytes()))

    @property
    def total_tokens(self) -> int:
        """B·S, tokens of all rows."""
        return self.rows * self.seq_length

    @property
    def starts(self) -> Ints:
        """int64 (documents,), the first token of each document, counted through the flattened rows."""
        return np.concatenate(([0], self.ends[:-1]))

    @property
    def lengths(self) -> Ints:
        """int64 (documents,), tokens of each document; together B·S."""
        return np.diff(self.ends, prepend=0)

    @property
    def document_rows(self) -> Ints:
        """int64 (documents,), the row of each document."""
        return self.starts // self.seq_length

    @property
    def actual_seq_len(self) -> Ints:
        """int64 (documents,), `ends` under the name it has in MindFormers: cumulative, over the flattened batch."""
        return self.ends

    @property
    def cu_seqlens(self) -> npt.NDArray[np.int32]:
        """int32 (documents + 1,), a 0 and then `ends`: what variable-length attention kernels call cu_seqlens.

        Raises ValueError where B·S does not fit 32 bits.
        """
        return cumulative(self.lengths)

    @property
    def visible_pairs(self) -> int:
        """Pairs of a query and a key that it sees, of all rows: n·(n + 1) / 2 for each document of n tokens."""
        lengths = self.lengths
        return int((lengths * (lengths + 1) // 2).sum())

    def row_ends(self, row: int) -> Ints:
        """Ends of the documents of one row, counted from the row's first token; the last is `seq_length`.

        Raises ValueError for a row that is not there.
        """
        check_row(row, self.rows)
        first, last = np.searchsorted(self.ends, [row * self.seq_length, (row + 1) * self.seq_length], side="right")
        return self.ends[first:last] - row * self.seq_length

    def row_starts(self, row: int) -> Ints:
        """Starts of the documents of one row, counted from the row's first token; the first is 0."""
        return np.concatenate(([0], self.row_ends(row)[:-1]))

    def padded_ends(self, width: int = 128) -> npt.NDArray[np.int32]:
        """int32 (B, width), each row's ends counted from its first token, then seq_length again up to the width.

        The form in which MindFormers' datasets hand over `actual_seq_len` (`eod_pad_length`, 128 by default).
        Every row ends with seq_length. Raises ValueError for a row with more documents than the width has room for.
        """
        width = whole_number(width, "width", at_least=1)
        rows = self.document_rows
        counts = np.bincount(rows, minlength=self.rows)
        row = int(counts.argmax())
        if counts[row] > width:
            raise ValueError(
                f"padded_ends: row {row} has {counts[row]} documents, but width (eod_pad_length) {width} has room for "
                f"{width}, the closing end {self.seq_length} included. Use a width of at least {counts[row]}."
            )
        padded = np.full((self.rows, width), self.seq_length, np.int32)
        place_in_row = np.arange(len(rows)) - np.repeat(np.cumsum(counts) - counts, counts)
        padded[rows, place_in_row] = self.ends - rows * self.seq_length
        return padded

    def segment_ids(self) -> npt.NDArray[np.int32]:
        """int32 (B, S), the number of each token's document, counted from 0 in every row."""
        rows = self.document_rows
        number = np.arange(len(rows)) - np.searchsorted(rows, rows)
        return np.repeat(number.astype(np.int32), self.lengths).reshape(self.rows, self.seq_length)

    def position_ids(self, *, reset: bool = True) -> npt.NDArray[np.int32]:
        """int32 (B, S), each token's position, from 0: in its document, or with reset=False in its row."""
        if not reset:
            return np.tile(np.arange(self.seq_length, dtype=np.int32), (self.rows, 1))
        return (np.arange(self.total_tokens) - self._start_of_each_token()).astype(np.int32).reshape(self.rows, -1)

    def document_starts(self) -> npt.NDArray[np.int32]:
        """int32 (B, S), where in the row each token's document starts: query q sees keys document_starts[b, q] to q."""
        row_start = np.repeat(np.arange(self.rows) * self.seq_length, self.seq_length)
        return (self._start_of_each_token() - row_start).astype(np.int32).reshape(self.rows, -1)

    def dense(self, *, blocked: bool = False) -> npt.NDArray[np.bool_]:
        """bool (B, S, S), queries by keys: True where the query sees the key; with blocked=True where it must not.

        blocked=True is the meaning of MindSpore's and torch_npu's attention masks; the default is that of
        `scaled_dot_product_attention`. Needs B·S² bytes: for tests and small sizes.
        """
        key = np.arange(self.seq_length, dtype=np.int32)
        query = key[:, None]
        start = self.document_starts()[:, :, None]
        if blocked:
            return (key > query) | (key < start)
        return (key <= query) & (key >= start)

    def flattened(self) -> CompressedMask:
        """The same documents as one row of B·S tokens: the packed (TND) form of the batch."""
        return CompressedMask(1, self.total_tokens, self.ends)

    def _start_of_each_token(self) -> Ints:
        return np.repeat(self.starts, self.lengths)


def cumulative(lengths: Ints) -> npt.NDArray[np.int32]:
    """int32 (n + 1,), a 0 and then the running sums of n lengths. Raises ValueError where they do not fit 32 bits."""
    ends = np.concatenate(([0], np.cumsum(lengths)))
    if ends[-1] > _INT32_MAX:
        raise ValueError(
            f"cu_seqlens is int32, but the documents have {ends[-1]} tokens, more than {_INT32_MAX}. "
            "Use `ends`, which is int64, or fewer rows at a time."
        )
    return ends.astype(np.int32)


def _check_ends(ends: Ints, rows: int, seq_length: int) -> None:
    if ends.ndim != 1:
        raise ValueError(f"ends must have 1 dimension, but it has {ends.ndim}")
    if ends.size == 0:
        raise ValueError(f"ends is empty, but {rows} rows of seq_length {seq_length} have at least {rows} documents")
    steps = np.diff(ends, prepend=0)
    if (steps <= 0).any():
        at = int(np.argmax(steps <= 0))
        before = f"after {ends[at - 1]}" if at else "as the first end"
        raise ValueError(f"ends[{at}] = {ends[at]} {before}: ends must be above 0 and strictly increasing")
    total = rows * seq_length
    if ends[-1] > total:
        raise ValueError(f"the last end {ends[-1]} lies beyond {rows} rows of seq_length {seq_length} = {total} tokens")
    row_end = np.arange(1, rows + 1) * seq_length
    closed = ends[np.minimum(np.searchsorted(ends, row_end), len(ends) - 1)] == row_end
    if not closed.all():
        missing = int(row_end[np.argmin(closed)])
        raise ValueError(
            f"ends lacks {missing}, the end of row {missing // seq_length - 1}: with {rows} rows of seq_length "
            f"{seq_length} every row's end must be among the ends, so that no document crosses into another row"
        )
