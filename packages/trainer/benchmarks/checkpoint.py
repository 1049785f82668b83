"""Saving and loading a checkpoint on one rank, beside the safetensors library writing and reading the same arrays.

Prints both times and their ratio; above 1 the checkpoint is faster. Both wait until what they wrote is on the disk. A
checkpoint also has a checksum of every MiB, which is verified when it is read.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
from device_mesh import ParallelMesh, connect
from parallel_trainer.checkpoint import index, write
from parallel_trainer.checkpoint.index import Checkpoint, State
from parallel_trainer.checkpoint.load import load_arrays
from parallel_trainer.parallel.layout import ModelLayout
from parallel_trainer.parallel.weights import Normal, Weight
from safetensors.numpy import load_file, save_file


def fastest(work: Callable[[], object], times: int = 3) -> float:
    """Seconds of the fastest run."""
    found = []
    for _ in range(times):
        start = time.perf_counter()
        work()
        found.append(time.perf_counter() - start)
    return min(found)


def main() -> None:
    """Run both."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=int, default=256, help="of float32 in 16 tensors (default: 256)")
    args = parser.parse_args()
    rows = args.megabytes * (1 << 20) // (16 * 4 * 1024)
    weights = {f"w{number}": Weight(f"w{number}", (rows, 1024), init=Normal(1.0)) for number in range(16)}
    degrees = SimpleNamespace(pp=1, dp_replicate=1, dp_shard=1, cp=1, tp=1, ep=1)
    layout = ModelLayout(weights, ParallelMesh(degrees), dict.fromkeys(weights, (0,)))
    held = layout.stored(0)
    arrays = {name: np.full(holding.size, 0.5, np.float32) for name, holding in held.items()}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)

        def save() -> None:
            contents = {
                key: write.Content(held[key], "F32", lambda first, last, array=array: array[first:last])
                for key, array in arrays.items()
            }
            tensors, sizes = write.joined([("ours", write.write_file(folder / "ours", contents))])
            Checkpoint(folder, tensors, sizes, State(1, 1, 1, 1), "", "", 1, {}, {}, index.BLOCK_BYTES).write()

        def load() -> None:
            load_arrays(
                Checkpoint.open(folder),
                arrays,
                lambda key, _: held[key].runs,
                connect("single"),
                list(arrays),
                dtype=np.dtype(np.float32),
            )

        def save_peer() -> None:
            save_file(arrays, folder / "peer")
            descriptor = os.open(folder / "peer", os.O_RDONLY)
            os.fsync(descriptor)
            os.close(descriptor)

        for what, ours, peer in (("save", save, save_peer), ("load", load, lambda: load_file(folder / "peer"))):
            one, other = fastest(ours), fastest(peer)
            print(f"{what} {args.megabytes} MiB: {one:.2f} s, safetensors {other:.2f} s, ratio {other / one:.2f}")


if __name__ == "__main__":
    main()
