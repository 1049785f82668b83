"""Causal and packed-document attention masks in compressed form.

Importing this package imports NumPy only. Tiles and exact attention are in `tiles` and `attention`; what needs another
library is in modules of its own: `flex_attention` (PyTorch), `mindspore`, `picture` (Matplotlib for files).
"""

from __future__ import annotations

from mask_compression.building import causal, from_cu_seqlens, from_ends, from_lengths, from_segment_ids
from mask_compression.checks import Range
from mask_compression.mask import CompressedMask
from mask_compression.sharding import (
    Order,
    SequenceShard,
    imbalance,
    key_ranges,
    remote_key_ranges,
    segment_lengths,
    visible_pairs,
    work_per_rank,
)
from mask_compression.tokens import eod_loss_mask, from_tokens

__all__ = [
    "CompressedMask",
    "Order",
    "Range",
    "SequenceShard",
    "causal",
    "eod_loss_mask",
    "from_cu_seqlens",
    "from_ends",
    "from_lengths",
    "from_segment_ids",
    "from_tokens",
    "imbalance",
    "key_ranges",
    "remote_key_ranges",
    "segment_lengths",
    "visible_pairs",
    "work_per_rank",
]
