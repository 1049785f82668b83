"""Attention from the compressed mask, by the library that owns both."""

from __future__ import annotations

from collections.abc import Sequence

import mask_compression.mindspore
from mask_compression import CompressedMask, Range
from mindspore import Tensor


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    mask: CompressedMask,
    *,
    query_ranges: Sequence[Range] | None = None,
    key_ranges: Sequence[Range] | None = None,
) -> Tensor:
    """See `Kernels.attention`."""
    return mask_compression.mindspore.attention(
        q, k, v, mask, scale=scale, query_ranges=query_ranges, key_ranges=key_ranges
    )
