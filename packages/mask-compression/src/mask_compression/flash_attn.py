"""Arguments of variable-length attention kernels: flash-attn's `flash_attn_varlen_func` and those that take the same.

Since version 2.1 flash-attn aligns a causal mask at the lower right corner where a document has fewer queries than
keys. So a piece of every row, as context parallelism cuts it, needs nothing but the right lengths: the keys of each
document end with the last query that the piece has of it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from mask_compression.checks import Range
from mask_compression.mask import CompressedMask, cumulative
from mask_compression.pieces import document_pieces


@dataclass(frozen=True, eq=False)
class VarlenArguments:
    """What the kernel has to be told, and which tokens to give it.

    cu_seqlens_q: int32 (documents with queries + 1,), cumulative queries.
    cu_seqlens_k: int32 (documents with queries + 1,), cumulative keys.
    max_seqlen_q: queries of the document that has most.
    max_seqlen_k: keys of the document that has most.
    query_ranges: which tokens of the flattened batch (B·S) are the queries, joined in this order.
    key_ranges:   which are the keys and values, joined in this order.
    """

    cu_seqlens_q: npt.NDArray[np.int32]
    cu_seqlens_k: npt.NDArray[np.int32]
    max_seqlen_q: int
    max_seqlen_k: int
    query_ranges: tuple[Range, ...]
    key_ranges: tuple[Range, ...]

    def keywords(self, tensor: Callable[[npt.NDArray[np.int32]], Any] = lambda array: array) -> dict[str, Any]:
        """Keyword arguments of `flash_attn_varlen_func`; `tensor` makes the framework's tensor of an array."""
        return {
            "cu_seqlens_q": tensor(self.cu_seqlens_q),
            "cu_seqlens_k": tensor(self.cu_seqlens_k),
            "max_seqlen_q": self.max_seqlen_q,
            "max_seqlen_k": self.max_seqlen_k,
            "causal": True,
        }


def varlen_arguments(mask: CompressedMask, queries: Range | None = None) -> VarlenArguments:
    """Arguments for queries in these positions of every row (None: all), rows joined.

    A rank in zigzag order has two pieces and makes two calls. Raises ValueError for a piece that leaves the row, and
    where B·S does not fit 32 bits.
    """
    parts = document_pieces(mask, queries, "varlen_arguments")
    first, stop = parts.piece
    present = parts.queries > 0
    rows, query_lengths, key_lengths = parts.rows[present], parts.queries[present], parts.keys[present]
    row_starts = (np.arange(mask.rows) * mask.seq_length).tolist()
    # The first document of each row that has queries is the first whose keys are needed.
    first_keys = parts.starts[present][np.searchsorted(rows, np.arange(mask.rows))].tolist()
    return VarlenArguments(
        cu_seqlens_q=cumulative(query_lengths),
        cu_seqlens_k=cumulative(key_lengths),
        max_seqlen_q=int(query_lengths.max()),
        max_seqlen_k=int(key_lengths.max()),
        query_ranges=tuple((at + first, at + stop) for at in row_starts),
        key_ranges=tuple((at + key, at + stop) for at, key in zip(row_starts, first_keys, strict=True)),
    )
