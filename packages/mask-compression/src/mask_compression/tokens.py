"""What follows from tokens: the documents that an end-of-document (EOD) token closes, and the loss mask."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from mask_compression.checks import integer_array, whole_number
from mask_compression.mask import CompressedMask

_CHUNK = 65_536


def from_tokens(tokens: npt.ArrayLike, eod: int) -> CompressedMask:
    """The mask of packed documents, from the tokens themselves.

    tokens: integers (S,) or (B, S). Each row stands for itself: a document that goes on in the next sample starts anew
        there, and positions with it.
    eod:    the token that ends a document and belongs to it. Consecutive EODs are documents of one token. What
        follows the last EOD of a row, padding included, is a document too.

    Needs a few bytes per document and a fixed amount beyond the tokens. Raises TypeError for tokens or an eod that are
    no integers; ValueError for no tokens, more than two dimensions, or a negative eod.
    """
    rows = _rows_of_tokens(tokens, "from_tokens")
    eod = whole_number(eod, "eod", at_least=0)
    count, seq_length = rows.shape
    flat = rows.reshape(-1)
    # In chunks, so that the comparison never takes a byte for every token.
    chunks = range(0, flat.size, _CHUNK)
    after_eod = np.concatenate([np.flatnonzero(flat[at : at + _CHUNK] == eod) + (at + 1) for at in chunks])
    row_ends = np.arange(1, count + 1) * seq_length
    return CompressedMask(count, seq_length, np.union1d(after_eod, row_ends))


def eod_loss_mask(tokens: npt.ArrayLike, eod: int) -> npt.NDArray[np.int32]:
    """int32, shaped as the tokens: 0 where the *input* is EOD, else 1 (MindFormers' `eod_mask_loss`).

    Predicting the EOD still counts; predicting the next document's first token from it does not. A new array at each
    call, so writing more zeros into it (padding) stays with that sample. Raises as `from_tokens` does.
    """
    rows = _rows_of_tokens(tokens, "eod_loss_mask")
    keep = rows != whole_number(eod, "eod", at_least=0)
    return np.asarray(keep, np.int32).reshape(np.shape(tokens))


def _rows_of_tokens(tokens: npt.ArrayLike, who: str) -> npt.NDArray[Any]:
    array = integer_array(tokens, f"{who}: tokens")
    if array.size == 0:
        raise ValueError(f"{who}: there are no tokens (shape {array.shape})")
    if array.ndim not in (1, 2):
        raise ValueError(f"{who}: tokens must have shape (S,) or (B, S), not {array.shape}")
    return array if array.ndim == 2 else array[None]
