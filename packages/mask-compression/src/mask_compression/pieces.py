"""A piece of every row as queries: how many queries and keys each document then has, which kernels are told."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from mask_compression.checks import Ints, Range, piece_of_row
from mask_compression.mask import CompressedMask


@dataclass(frozen=True, eq=False)
class DocumentPieces:
    """What each document has in a piece of its row.

    piece:      the positions of every row that are queries.
    rows:       int64 (documents,), the row of each document.
    starts:     int64 (documents,), where in the row it starts.
    ends:       int64 (documents,), where in the row it ends.
    queries:    int64 (documents,), its tokens in the piece.
    keys:       int64 (documents,), its tokens before the end of the piece: in a causal mask aligned at the lower right
        the last of its queries sees the last of these keys, as it should.
    """

    piece: Range
    rows: Ints
    starts: Ints
    ends: Ints
    queries: Ints
    keys: Ints


def query_piece(mask: CompressedMask, queries: Range | None, who: str) -> Range:
    """The positions of every row that are queries, checked; None is the whole row."""
    return (0, mask.seq_length) if queries is None else piece_of_row(queries, mask.seq_length, f"{who}: queries")


def document_pieces(mask: CompressedMask, queries: Range | None, who: str) -> DocumentPieces:
    """What each document has in positions `queries` of its row (None: the whole row)."""
    first, stop = query_piece(mask, queries, who)
    rows = mask.document_rows
    starts, ends = mask.starts - rows * mask.seq_length, mask.ends - rows * mask.seq_length
    in_piece = np.clip(ends, first, stop) - np.clip(starts, first, stop)
    return DocumentPieces(
        (first, stop), rows, starts, ends, in_piece, np.minimum(ends, stop) - np.minimum(starts, stop)
    )
