"""Arguments of Ascend's fused attention (`flash_attention_score`, `npu_fusion_attention`), also for a piece of a row.

The kernel's masks, as its documentation gives them: sparse_mode 3 is causal, aligned at the lower right corner, and for
packed tokens (layout TND) that holds for each document by itself; sparse_mode 4 is a band around the diagonal that ends
in the lower right corner: query i of Sq sees the keys j of Sk with -pre_tokens <= j - i - (Sk - Sq) <= next_tokens.

With context parallelism a rank has a piece of the queries of every row and all keys. One call of the kernel takes one
piece, so a rank with two pieces (zigzag order) makes two calls: `kernel_calls` says which.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from mask_compression.checks import Ints, Range, piece_of_row, whole_number
from mask_compression.mask import CompressedMask
from mask_compression.pieces import document_pieces

_UNLIMITED = 2**31 - 1


@dataclass(frozen=True)
class FlashAttentionArguments:
    """What the kernel has to be told about the mask, besides `compressed_attn_mask()`.

    sparse_mode:      3, causal aligned at the lower right, or 4, band.
    pre_tokens:       how far before the diagonal a query sees; 2147483647 is no limit.
    next_tokens:      how far behind it. sparse_mode 3 reads neither, but MindSpore documents 0 for layout TND.
    actual_seq_qlen:  cumulative queries of each document (layout TND), or None.
    actual_seq_kvlen: cumulative keys of each document (layout TND), or None.
    """

    sparse_mode: Literal[3, 4]
    pre_tokens: int = _UNLIMITED
    next_tokens: int = _UNLIMITED
    actual_seq_qlen: tuple[int, ...] | None = None
    actual_seq_kvlen: tuple[int, ...] | None = None

    def mindspore(self) -> dict[str, Any]:
        """Keyword arguments of `mindspore.ops.flash_attention_score`."""
        return dict(vars(self))

    def torch_npu(self) -> dict[str, Any]:
        """Keyword arguments of `torch_npu.npu_fusion_attention`, which spells two of them differently."""
        keywords = dict(vars(self))
        return {name.replace("_tokens", "_tockens"): value for name, value in keywords.items()}

    def merged(self) -> FlashAttentionArguments:
        """The same for the kernel in as few entries as it takes, all of which have keys.

        MindSpore documents at most 1024 entries and none without keys. Neighbours that have no queries become one entry
        with the keys of both, which nobody sees either way.
        """
        if self.actual_seq_qlen is None or self.actual_seq_kvlen is None:
            return self
        query_ends, key_ends = np.array(self.actual_seq_qlen), np.array(self.actual_seq_kvlen)
        some = np.diff(key_ends, prepend=0) > 0
        query_ends, key_ends = query_ends[some], key_ends[some]
        asks = np.diff(query_ends, prepend=0) > 0
        # Ends are cumulative: what goes with an entry's end comes to the next entry.
        kept = asks | np.append(asks[1:], True)
        return replace(
            self,
            actual_seq_qlen=tuple(query_ends[kept].tolist()),
            actual_seq_kvlen=tuple(key_ends[kept].tolist()),
        )


@dataclass(frozen=True)
class KernelCall:
    """One call of the kernel: a piece of the queries of every row, and all keys of every row in ascending order.

    queries:   positions of every row.
    layout:    BSND for rows of one document, TND for packed ones: the tokens of all rows one after the other.
    arguments: what the kernel is told about the mask.
    """

    queries: Range
    layout: Literal["BSND", "TND"]
    arguments: FlashAttentionArguments


def kernel_calls(mask: CompressedMask, queries: Sequence[Range] | None = None) -> tuple[KernelCall, ...]:
    """The calls that compute the queries at these positions of every row, in ascending order; None: all.

    Ranges that touch are one piece, and each piece is one call: whole rows and contiguous parts are one, zigzag order
    two. Raises ValueError for ranges that are empty, overlap or leave the row.
    """
    pieces = _pieces([(0, mask.seq_length)] if queries is None else queries, mask.seq_length)
    if len(mask.ends) == mask.rows:
        return tuple(KernelCall(piece, "BSND", batch_arguments(mask, piece)) for piece in pieces)
    return tuple(KernelCall(piece, "TND", packed_arguments(mask, piece).merged()) for piece in pieces)


def packed_arguments(
    mask: CompressedMask, queries: Range | None = None, *, width: int | None = None
) -> FlashAttentionArguments:
    """Arguments for packed tokens: layout TND, queries (B·piece, heads, D), keys and values (B·S, kv_heads, D).

    queries: the positions of every row whose queries are given, in row order; None: all. Where a batch is flattened
        before it is cut for context parallelism, as MindFormers does, take `mask.flattened()` and a piece of that.
    width:   repeat the totals up to so many entries, for lists of one size. Without it there is an entry for each
        document, and one without queries after each row whose last document the piece cuts, for the keys behind the
        cut: otherwise the lower right corner would be in the wrong place, and queries would see the future.

    Raises ValueError for a piece that leaves the row, and for a width without room for these entries.
    """
    parts = document_pieces(mask, queries, "packed_arguments")
    unseen = mask.seq_length - parts.piece[1]
    last = np.flatnonzero(np.diff(parts.rows, append=mask.rows))
    cut = (parts.queries[last] > 0) & (unseen > 0)
    keys = parts.keys.copy()
    keys[last] += np.where(cut, 0, unseen)  # a last document without queries may as well hold the keys behind the piece
    query_ends = np.cumsum(np.insert(parts.queries, last[cut] + 1, 0))
    key_ends = np.cumsum(np.insert(keys, last[cut] + 1, unseen))
    if width is not None:
        query_ends, key_ends = _widened(query_ends, key_ends, whole_number(width, "width", at_least=1), unseen)
    return FlashAttentionArguments(
        sparse_mode=3,
        next_tokens=0,
        actual_seq_qlen=tuple(query_ends.tolist()),
        actual_seq_kvlen=tuple(key_ends.tolist()),
    )


def batch_arguments(mask: CompressedMask, queries: Range | None = None) -> FlashAttentionArguments:
    """Arguments for rows that are one document each: layouts BSH, BNSD, SBH, BSND, with keys of the whole row.

    queries: the positions of every row whose queries are given; None: all.

    Raises ValueError for rows of several documents, which these layouts cannot express, and for a piece that leaves
    the row.
    """
    if len(mask.ends) > mask.rows:
        raise ValueError(
            f"batch_arguments: {len(mask.ends)} documents in {mask.rows} rows: without actual_seq_qlen the kernel "
            "takes a row for one document. Use packed_arguments and layout TND."
        )
    if queries is None:
        return FlashAttentionArguments(3)
    _, stop = piece_of_row(queries, mask.seq_length, "batch_arguments: queries")
    behind = mask.seq_length - stop
    return FlashAttentionArguments(4, pre_tokens=mask.seq_length + behind, next_tokens=-behind)


def compressed_attn_mask() -> npt.NDArray[np.bool_]:
    """bool (2048, 2048), True above the diagonal: the `attn_mask` that sparse modes 2 to 4 want at any length."""
    return np.triu(np.ones((2048, 2048), np.bool_), k=1)


def _pieces(ranges: Sequence[Range], seq_length: int) -> list[Range]:
    """The ranges in ascending order, with those that touch joined."""
    joined: list[Range] = []
    for start, stop in sorted(piece_of_row(piece, seq_length, "kernel_calls: queries") for piece in ranges):
        if joined and start < joined[-1][1]:
            raise ValueError(
                f"kernel_calls: queries ({start}, {stop}) overlap those before, which end at {joined[-1][1]}: each "
                "position may be there once. Use ranges that do not overlap."
            )
        if joined and start == joined[-1][1]:
            joined[-1] = (joined[-1][0], stop)
        else:
            joined.append((start, stop))
    return joined


def _widened(query_ends: Ints, key_ends: Ints, width: int, unseen: int) -> tuple[Ints, Ints]:
    missing = width - len(query_ends)
    if missing < 0:
        raise ValueError(
            f"packed_arguments: {len(query_ends)} entries are needed, but width {width} has room for {width}. "
            f"Use a width of at least {len(query_ends)}."
        )
    if missing == 0:
        return query_ends, key_ends
    # As in MindFormers' padded lists, only the very last entry holds the keys behind the piece.
    total = key_ends[-1]
    padded = np.concatenate((np.minimum(key_ends, total - unseen), np.full(missing, total - unseen)))
    padded[-1] = total
    return np.pad(query_ends, (0, missing), mode="edge"), padded
