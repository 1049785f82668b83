"""PyTorch FlexAttention: the BlockMask of a compressed mask, built from its tile table (extra `torch`)."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

try:
    import torch  # type: ignore[import-not-found, unused-ignore]
    from torch import Tensor  # type: ignore[import-not-found, unused-ignore]
    from torch.nn.attention.flex_attention import BlockMask  # type: ignore[import-not-found, unused-ignore]
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "mask_compression.flex_attention needs PyTorch, which is not installed: pip install 'mask-compression[torch]'",
        name=error.name,
    ) from error

from mask_compression.checks import Range
from mask_compression.mask import CompressedMask
from mask_compression.pieces import query_piece
from mask_compression.tiles import FULL, PARTIAL, tile_table

MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def mask_mod(mask: CompressedMask, queries: Range | None = None, *, device: torch.device | str = "cpu") -> MaskMod:
    """FlexAttention's mask function (batch, head, query, key) -> bool; queries count from the start of their piece.

    Looks one number up for each query: where its document starts. A mask of one row serves batches of any size.
    """
    first, _ = query_piece(mask, queries, "mask_mod")
    starts = torch.from_numpy(mask.document_starts()).to(device)
    if mask.rows == 1:
        starts_of_row = starts[0]

        def one_row(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
            position = q_idx + first
            return (kv_idx <= position) & (kv_idx >= starts_of_row[position])

        return one_row

    def rows(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        position = q_idx + first
        return (kv_idx <= position) & (kv_idx >= starts[b, position])

    return rows


def block_mask(
    mask: CompressedMask,
    queries: Range | None = None,
    *,
    block_size: int | tuple[int, int] = 128,
    device: torch.device | str = "cpu",
) -> BlockMask:
    """What `create_block_mask(mask_mod(mask, queries), B, None, Q, S, BLOCK_SIZE=block_size)` gives, with no square.

    queries:    the positions of every row whose queries are given, with all S keys (context parallelism); None: all.
    block_size: tokens of a block, of queries and of keys.

    Takes time and memory in proportion to the blocks: BlockMask itself has an int32 for each block of queries and keys,
    whether empty or not. Raises ValueError for a piece that leaves the row and for a block size below 1.
    """
    size = (block_size, block_size) if isinstance(block_size, int) else block_size
    first, stop = query_piece(mask, queries, "block_mask")
    table = tile_table(mask, size, query_ranges=((first, stop),))
    kinds = np.stack([table.grid(row) for row in range(mask.rows)])[:, None]
    # PyTorch pads short blocks at the edges with forbidden pairs, so it never calls them full.
    lengths = (stop - first, mask.seq_length)
    if lengths[0] % size[0]:
        kinds[:, :, -1] = np.minimum(kinds[:, :, -1], PARTIAL)
    if lengths[1] % size[1]:
        kinds[..., -1] = np.minimum(kinds[..., -1], PARTIAL)
    partial, full = (_ordered(kinds == kind, device) for kind in (PARTIAL, FULL))
    return BlockMask.from_kv_blocks(
        *partial,
        *full,
        BLOCK_SIZE=size,
        mask_mod=mask_mod(mask, queries, device=device),
        seq_lengths=lengths,
    )


def _ordered(chosen: npt.NDArray[np.bool_], device: torch.device | str) -> tuple[Tensor, Tensor]:
    """How many blocks of keys are chosen for each block of queries, and their numbers, those not chosen after them."""
    counts = chosen.sum(axis=-1, dtype=np.int32)
    numbers = np.argsort(~chosen, axis=-1, kind="stable").astype(np.int32)
    return torch.from_numpy(counts).to(device), torch.from_numpy(numbers).to(device)
