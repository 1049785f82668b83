"""What the compressed form saves: making a mask, its tiles against PyTorch's, and tiles that attention skips.

    python benchmarks/masks.py [--rounds 5]

NumPy works on one thread. Times are medians of rounds in which the things compared take turns, so that a busy machine
slows all of them. The comparison with FlexAttention's `create_block_mask` needs PyTorch 2.6 or newer, about 11 GB of
memory, and runs once. NumPy before 2.0 does not know newer processors: set OPENBLAS_CORETYPE (`SkylakeX` for
AVX-512, `Haswell` for AVX2) for its matrix products to be as fast as they can.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import resource
import sys
import time
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from statistics import median
from typing import Any, Literal
from unittest.mock import patch

if "OPENBLAS_NUM_THREADS" not in os.environ:
    # NumPy's BLAS reads it once, when NumPy is imported.
    os.environ["OPENBLAS_NUM_THREADS"] = "1"

import numpy as np
from mask_compression import attention_tiles
from mask_compression.attention import attention
from mask_compression.attention_backward import attention_backward
from mask_compression.building import from_lengths
from mask_compression.mask import CompressedMask, Ints
from mask_compression.tiles import TileTable, tile_table
from mask_compression.tokens import from_tokens

EOD = 0
HEADS, KV_HEADS, HEAD_DIM = 8, 2, 64


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=5, help="runs of each thing, in turns (default 5)")
    rounds = parser.parse_args().rounds
    wrong = [*compress(rounds), *tables(rounds)]
    skipping(rounds)
    for fault in wrong:
        print(fault, file=sys.stderr)
    sys.exit(1 if wrong else 0)


def compress(rounds: int) -> list[str]:
    """A million tokens with about a thousand documents, from the tokens. Returns what is wrong."""
    generator = np.random.default_rng(0)
    tokens = generator.integers(1, 50_000, 2**20, np.int32)
    tokens[generator.choice(tokens.size, 1000, replace=False)] = EOD
    (seconds,) = medians([lambda: from_tokens(tokens, EOD)], rounds)
    tracemalloc.start()
    mask = from_tokens(tokens, EOD)
    held, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    print(f"from_tokens: {tokens.size:,} tokens, {len(mask.ends):,} documents")
    print(f"  {1e3 * seconds:.2f} ms (goal: 10); holds {held / 1e3:.1f} kB, at most {peak / 1e3:.0f} kB (goal: 1,000)")
    return [f"from_tokens took {peak / 1e6:.1f} MB beyond the tokens, more than 1"] if peak > 1e6 else []


def tables(rounds: int) -> list[str]:
    """The tiles of 16 documents in 32,768 tokens, against those that PyTorch finds by looking at every pair.

    Returns what is wrong.
    """
    mask = packed(32_768, 16)
    (seconds,) = medians([lambda: tile_table(mask)], rounds)
    table = tile_table(mask)
    print(f"tile_table: {mask.seq_length:,} tokens, 16 documents, tiles of 128 x 128")
    print(f"  {1e3 * seconds:.2f} ms (goal: 20); {table.full} full, {table.partial} partial, {table.empty} empty tiles")
    if importlib.util.find_spec("torch") is None:
        print("  create_block_mask: skipped, PyTorch is not installed (pip install torch)")
        return []
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    theirs, their_seconds = block_mask_tiles(mask)
    gigabytes = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024 / 1e9
    same = all(np.array_equal(table.tiles(kind)[:, 1:], tiles) for kind, tiles in theirs.items())
    print(
        f"  create_block_mask: {their_seconds:.2f} s and {gigabytes:.1f} GB, {their_seconds / seconds:,.0f} x the time"
    )
    print(f"  same tiles: {'yes' if same else 'NO'}")
    return [] if same else ["tile_table and create_block_mask disagree"]


def skipping(rounds: int) -> None:
    """Attention as it is, and the same code made to visit and mask every tile."""
    seq_length = 4096
    generator = np.random.default_rng(0)
    shapes = [(1, seq_length, heads, HEAD_DIM) for heads in (HEADS, KV_HEADS, KV_HEADS, HEADS)]
    q, k, v, d_out = (generator.standard_normal(shape, np.float32) for shape in shapes)
    print(f"attention: {seq_length:,} tokens, {HEADS} heads on {KV_HEADS}, head_dim {HEAD_DIM}, float32; milliseconds")
    print("  (goal: a ratio of 1.7 and more)")
    print(f"  {'':16} {'visible':>8} {'forward':>8} {'all':>6} {'ratio':>6} {'backward':>9} {'all':>6} {'ratio':>6}")
    for documents in (1, 16, 64):
        mask = packed(seq_length, documents)
        out, lse = attention(q, k, v, mask)

        def forward(mask: CompressedMask = mask) -> None:
            attention(q, k, v, mask)

        def backward(mask: CompressedMask = mask, out: Any = out, lse: Any = lse) -> None:
            attention_backward(d_out, q, k, v, out, lse, mask)

        skipped = [forward, unskipped(forward), backward, unskipped(backward)]
        a, b, c, d = (1e3 * seconds for seconds in medians(skipped, rounds))
        name = f"{documents} document{'s' * (documents > 1)}"
        visible = f"{100 * mask.visible_pairs / seq_length**2:.1f} %"
        print(f"  {name:16} {visible:>8} {a:8.1f} {b:6.0f} {b / a:6.2f} {c:9.1f} {d:6.0f} {d / c:6.2f}")


def packed(seq_length: int, documents: int) -> CompressedMask:
    """One row of documents of random lengths."""
    cuts = np.random.default_rng(documents).choice(np.arange(1, seq_length), documents - 1, replace=False)
    return from_lengths(np.diff([0, *np.sort(cuts), seq_length]))


def unskipped(call: Callable[[], None]) -> Callable[[], None]:
    """The call with a table in which no tile is empty and none is full."""

    def every_tile(*arguments: Any) -> TileTable:
        table = tile_table(*arguments)
        nothing, all_keys = np.zeros_like(table.first), np.full_like(table.first, table.key_tiles)
        return replace(table, first=nothing, full_first=nothing, full_stop=nothing, stop=all_keys)

    def changed() -> None:
        with patch.object(attention_tiles, "tile_table", every_tile):
            call()

    return changed


def block_mask_tiles(mask: CompressedMask) -> tuple[dict[Literal["partial", "full"], Ints], float]:
    """The (tile of queries, tile of keys) of each kind in PyTorch's BlockMask, and the seconds that making it takes."""
    import torch
    from torch.nn.attention.flex_attention import create_block_mask

    documents = torch.from_numpy(np.repeat(np.arange(len(mask.lengths)), mask.lengths))

    def visible(batch: Any, head: Any, query: Any, key: Any) -> Any:
        return (documents[query] == documents[key]) & (query >= key)

    start = time.perf_counter()
    made = create_block_mask(visible, None, None, mask.seq_length, mask.seq_length, device="cpu", BLOCK_SIZE=128)
    seconds = time.perf_counter() - start
    tiles: dict[Literal["partial", "full"], Ints] = {}
    kind: Literal["partial", "full"]
    for kind, counts, indices in (
        ("partial", made.kv_num_blocks, made.kv_indices),
        ("full", made.full_kv_num_blocks, made.full_kv_indices),
    ):
        used = [np.sort(row[:count]) for count, row in zip(counts[0, 0].numpy(), indices[0, 0].numpy(), strict=True)]
        tiles[kind] = np.stack((np.repeat(np.arange(len(used)), list(map(len, used))), np.concatenate(used)), axis=1)
    return tiles, seconds


def medians(calls: list[Callable[[], Any]], rounds: int) -> list[float]:
    """Median seconds of each call, after one run that does not count."""
    times: list[list[float]] = [[] for _ in calls]
    for counted in range(rounds + 1):
        for call, taken in zip(calls, times, strict=True):
            start = time.perf_counter()
            call()
            if counted:
                taken.append(time.perf_counter() - start)
    return [median(taken) for taken in times]


if __name__ == "__main__":
    main()
