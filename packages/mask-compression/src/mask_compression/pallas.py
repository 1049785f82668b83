"""Segment ids for JAX: what the Pallas TPU kernels `flash_attention` and splash attention take, as NumPy arrays."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from mask_compression.checks import Range
from mask_compression.mask import CompressedMask
from mask_compression.pieces import query_piece


class SegmentIds(NamedTuple):
    """The fields of JAX's own `SegmentIds`: a query sees keys of the same id only.

    q:  int32 (B, queries).
    kv: int32 (B, S).
    """

    q: npt.NDArray[np.int32]
    kv: npt.NDArray[np.int32]


def segment_ids(mask: CompressedMask, queries: Range | None = None) -> SegmentIds:
    """Ids of the queries in these positions of every row (None: all) and of all keys, counted from 0 in every row.

    `jax.experimental.pallas.ops.tpu.flash_attention.flash_attention` takes `SegmentIds(*segment_ids(mask))` with
    causal=True, for whole rows. Splash attention takes the ids of one row (`jax.vmap` over rows), and beside them a
    `CausalMask((queries, S), offset=start of the piece)`, so it can take a piece. Raises ValueError for a piece that
    leaves the row.
    """
    ids = mask.segment_ids()
    first, stop = query_piece(mask, queries, "segment_ids")
    return SegmentIds(ids[:, first:stop], ids)
