"""FlexAttention: our BlockMask equals PyTorch's own, and what PyTorch computes with it is what the mask means."""

from __future__ import annotations

import shutil

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from mask_compression import CompressedMask, SequenceShard, causal, from_lengths
from mask_compression.attention import attention
from mask_compression.flex_attention import block_mask, mask_mod
from mask_oracle import batches, square
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, create_mask, flex_attention

# PyTorch computes uncompiled on a CPU, and says that this is slow.
pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile:UserWarning")

FIELDS = ("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices")
TRANSPOSED = ("q_num_blocks", "q_indices", "full_q_num_blocks", "full_q_indices")


def torchs_own(rows: list[list[int]], piece: tuple[int, int], block_size: tuple[int, int]) -> BlockMask:
    """The block mask of documents as PyTorch's documentation builds it: from document ids and the whole square."""
    ids = torch.tensor([[number for number, length in enumerate(row) for _ in range(length)] for row in rows])
    first, stop = piece

    def documents(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        position = q_idx + first
        return (position >= kv_idx) & (ids[b, position] == ids[b, kv_idx])

    return create_block_mask(
        documents, len(rows), None, stop - first, ids.shape[1], device="cpu", BLOCK_SIZE=block_size
    )


def assert_equal(ours: BlockMask, theirs: BlockMask) -> None:
    assert ours.seq_lengths == theirs.seq_lengths
    assert ours.BLOCK_SIZE == theirs.BLOCK_SIZE
    assert ours.shape == theirs.shape
    for field in FIELDS + TRANSPOSED:
        a, b = getattr(ours, field), getattr(theirs, field)
        assert a.dtype == b.dtype, field
        assert torch.equal(a, b), field
    assert ours.sparsity() == theirs.sparsity()


@pytest.mark.parametrize("block", [(128, 128), (64, 128), (128, 32)])
@pytest.mark.parametrize(
    "rows",
    [
        [[1024]],
        [[1], [1]],
        [[127]],
        [[128]],
        [[129]],
        [[300, 1, 1, 722, 500]],
        [[1000, 24], [1024], [1] * 24 + [1000]],
        [[256, 128, 640], [130, 894]],
        [[100] * 13],
    ],
)
def test_equals_create_block_mask(rows: list[list[int]], block: tuple[int, int]) -> None:
    mask = from_lengths(rows)
    piece = (0, mask.seq_length)
    assert_equal(block_mask(mask, block_size=block), torchs_own(rows, piece, block))


def test_the_usual_block_size_is_torchs() -> None:
    ours = block_mask(causal(512))
    theirs = create_block_mask(lambda b, h, q, k: q >= k, 1, None, 512, 512, device="cpu")
    assert_equal(ours, theirs)
    assert_equal(block_mask(causal(512), block_size=64), torchs_own([[512]], (0, 512), (64, 64)))


@settings(deadline=None, max_examples=100)
@given(batches(), st.integers(1, 9), st.integers(1, 9), st.data())
def test_equals_create_block_mask_for_any_piece(
    rows: list[list[int]], block_q: int, block_k: int, data: st.DataObject
) -> None:
    mask = from_lengths(rows)
    start = data.draw(st.integers(0, mask.seq_length - 1))
    piece = (start, data.draw(st.integers(start + 1, mask.seq_length)))
    assert_equal(block_mask(mask, piece, block_size=(block_q, block_k)), torchs_own(rows, piece, (block_q, block_k)))


@pytest.mark.parametrize("rows", [[[7]], [[3, 4]], [[3, 4], [7], [1, 5, 1]]])
def test_mask_mod_is_the_dense_mask(rows: list[list[int]]) -> None:
    mask = from_lengths(rows)
    expected = np.stack([square(row) for row in rows])
    for first, stop in ((0, 7), (2, 6)):
        seen = create_mask(mask_mod(mask, (first, stop)), len(rows), None, stop - first, 7, device="cpu")
        np.testing.assert_array_equal(seen[:, 0].numpy(), expected[:, first:stop])
        np.testing.assert_array_equal(seen[:, 0].numpy(), mask.dense()[:, first:stop])


def tensors(rows: int, size: int) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v of (rows, 4 or 2 heads, size, 16) in float64."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((rows, 4, size, 16), (rows, 2, size, 16), (rows, 2, size, 16))
    return tuple(torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)  # type: ignore[return-value]


def ours(mask: CompressedMask, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    out, _ = attention(*(x.transpose(1, 2).contiguous().numpy() for x in (q, k, v)), mask)
    return torch.from_numpy(out).transpose(1, 2)


@pytest.mark.parametrize("rows", [[[200]], [[60, 1, 139], [200], [1] * 50 + [150]]])
def test_attention_equals_scaled_dot_product_attention_and_flex_attention(rows: list[list[int]]) -> None:
    mask = from_lengths(rows)
    q, k, v = tensors(len(rows), 200)
    dense = torch.from_numpy(mask.dense())[:, None]
    sdpa = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=dense, enable_gqa=True)
    torch.testing.assert_close(ours(mask, q, k, v), sdpa, rtol=1e-12, atol=1e-12)
    flex = flex_attention(q, k, v, block_mask=block_mask(mask), enable_gqa=True)
    torch.testing.assert_close(flex, sdpa, rtol=1e-12, atol=1e-12)


def test_a_mask_of_one_row_serves_a_batch() -> None:
    mask = from_lengths([60, 40])
    q, k, v = tensors(3, 100)
    flex = flex_attention(q, k, v, block_mask=block_mask(mask), enable_gqa=True)
    dense = torch.from_numpy(mask.dense())[:, None]
    sdpa = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=dense, enable_gqa=True)
    torch.testing.assert_close(flex, sdpa, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("order", ["contiguous", "zigzag"])
def test_context_parallel_pieces_join_to_the_whole(order: str) -> None:
    mask = from_lengths([[60, 1, 139], [200]])
    q, k, v = tensors(2, 200)
    whole = flex_attention(q, k, v, block_mask=block_mask(mask), enable_gqa=True)
    for rank in range(2):
        for first, stop in SequenceShard(200, 2, rank, order).ranges:  # type: ignore[arg-type]
            piece = block_mask(mask, (first, stop))
            out = flex_attention(q[:, :, first:stop], k, v, block_mask=piece, enable_gqa=True)
            torch.testing.assert_close(out, whole[:, :, first:stop], rtol=1e-12, atol=1e-12)


def test_bad_values() -> None:
    with pytest.raises(ValueError, match=r"queries = \(4, 9\) must be a piece of a row: .* seq_length = 8"):
        block_mask(causal(8), (4, 9))
    with pytest.raises(ValueError, match="0"):
        block_mask(causal(8), block_size=0)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # raised while PyTorch imports parts of itself
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile on a CPU needs a C++ compiler: install g++")
def test_a_compiled_kernel_that_skips_blocks() -> None:
    mask = from_lengths([[300, 1, 699], [1000], [500, 500]])
    q, k, v = (x.float() for x in tensors(3, 1000))
    dense = torch.from_numpy(mask.dense())[:, None, 512:]
    q = q[:, :, 512:]
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=dense, enable_gqa=True)
    with torch.no_grad():
        out = torch.compile(flex_attention)(q, k, v, block_mask=block_mask(mask, (512, 1000)), enable_gqa=True)
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)
