"""Tokens into the order of their experts and back on one rank, against the same in PyTorch on the CPU.

    pip install ./packages/parallel-config ./packages/device-mesh ./packages/moe-dispatch torch
    python packages/moe-dispatch/benchmarks/permute_vs_torch.py

Timed together: finding the order and the counts, gathering rows, and adding up each token's weighted rows. PyTorch does
the last in two ways, of which the faster counts. Medians of processor time, with one thread and a process of its own
for each: memory that one gives back would make the other side's next allocation slow.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from statistics import median
from typing import Any

import numpy as np
from device_mesh import connect
from moe_dispatch import AllToAllDispatcher

TOKENS, TOP_K, EXPERTS, HIDDEN = 65_536, 8, 256, 1024
GOAL = 1.5


def batch() -> tuple[Any, Any, Any]:
    """Tokens (T, H), expert ids and weights (T, K)."""
    generator = np.random.default_rng(0)
    scores = generator.random((TOKENS, EXPERTS), np.float32)
    tokens = generator.standard_normal((TOKENS, HIDDEN), np.float32)
    expert_ids = np.argpartition(scores, -TOP_K, axis=1)[:, -TOP_K:]
    return tokens, expert_ids, generator.random((TOKENS, TOP_K), np.float32)


def ours(tokens: Any, expert_ids: Any, weights: Any) -> Any:
    """Through a dispatcher of one rank."""
    route = AllToAllDispatcher(connect("single"), EXPERTS).route(expert_ids)
    return route.combine(route.dispatch(tokens), weights)


def in_torch(tokens: Any, expert_ids: Any, weights: Any, *, scatter: bool) -> Any:
    """The same from PyTorch's operators."""
    import torch

    chosen = expert_ids.flatten()
    torch.bincount(chosen, minlength=EXPERTS)
    order = torch.argsort(chosen, stable=True)
    sources = order // TOP_K
    rows = tokens.index_select(0, sources)
    weighted = rows * weights.flatten()[order].unsqueeze(1)
    out = torch.zeros_like(tokens)
    if scatter:
        return out.scatter_add_(0, sources.unsqueeze(1).expand(-1, HIDDEN), weighted)
    return out.index_add_(0, sources, weighted)


def our_seconds(rounds: int) -> float:
    """Our side's median."""
    arrays = batch()
    return median_seconds(lambda: ours(*arrays), rounds)


def torch_seconds(rounds: int) -> tuple[float, float, float]:
    """PyTorch's medians with index_add and scatter_add, and the largest difference between its result and ours."""
    import torch

    torch.set_num_threads(1)
    arrays = batch()
    tensors = [torch.from_numpy(array) for array in arrays]
    add, scatter = (
        median_seconds(lambda scatter=scatter: in_torch(*tensors, scatter=scatter), rounds)  # type: ignore[misc]
        for scatter in (False, True)
    )
    return add, scatter, float(np.abs(ours(*arrays) - in_torch(*tensors, scatter=False).numpy()).max())


def median_seconds(call: Callable[[], Any], rounds: int) -> float:
    """Of processor time, after one run that does not count."""
    taken = []
    for _ in range(rounds + 1):
        start = time.process_time()
        call()
        taken.append(time.process_time() - start)
    return median(taken[1:])


def in_own_process(function: Callable[[int], Any], rounds: int) -> Any:
    """The function's result, from a fresh process."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
        return process.submit(function, rounds).result()


def main() -> None:
    """Print the times and the ratio."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ[name] = "1"
    mine = in_own_process(our_seconds, rounds)
    add, scatter, difference = in_own_process(torch_seconds, rounds)
    print(f"{TOKENS:,} tokens, top {TOP_K} of {EXPERTS} experts, hidden {HIDDEN:,}, float32, one thread")
    print(
        f"  plan, permute, unpermute {mine:.2f} s; PyTorch {add:.2f} s with index_add, {scatter:.2f} s with scatter_add"
    )
    print(
        f"  PyTorch takes {min(add, scatter) / mine:.2f} times as long (goal: {GOAL}); "
        f"results differ by {difference:.1e} at most"
    )


if __name__ == "__main__":
    main()
