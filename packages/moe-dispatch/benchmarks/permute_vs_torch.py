"""Tokens into the order of their experts and back on one rank, against the same in PyTorch on the CPU.

    pip install ./packages/parallel-config ./packages/device-mesh ./packages/moe-dispatch torch
    python packages/moe-dispatch/benchmarks/permute_vs_torch.py

Timed together: finding the order and the counts, gathering rows, and adding up each token's weighted rows. PyTorch does
the last in two ways, of which the faster counts. Processor time of one thread each, medians of runs in turns.
"""

from __future__ import annotations

import argparse
import os

for _name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ[_name] = "1"

import time  # noqa: E402
from collections.abc import Callable  # noqa: E402
from statistics import median  # noqa: E402
from typing import Any  # noqa: E402

import numpy as np  # noqa: E402
import torch  # noqa: E402
from device_mesh import connect  # noqa: E402
from moe_dispatch import AllToAllDispatcher  # noqa: E402

TOKENS, TOP_K, EXPERTS, HIDDEN = 65_536, 8, 256, 1024
GOAL = 1.5


def ours(tokens: Any, expert_ids: Any, weights: Any) -> Any:
    """Through a dispatcher of one rank."""
    route = AllToAllDispatcher(connect("single"), EXPERTS).route(expert_ids)
    return route.combine(route.dispatch(tokens), weights)


def torch_permuted(tokens: Any, expert_ids: Any) -> tuple[Any, Any, Any]:
    """The order of slots, the token of each, and the rows."""
    chosen = expert_ids.flatten()
    torch.bincount(chosen, minlength=EXPERTS)
    order = torch.argsort(chosen, stable=True)
    sources = order // TOP_K
    return order, sources, tokens.index_select(0, sources)


def torch_index_add(tokens: Any, expert_ids: Any, weights: Any) -> Any:
    order, sources, rows = torch_permuted(tokens, expert_ids)
    weighted = rows * weights.flatten()[order].unsqueeze(1)
    return torch.zeros_like(tokens).index_add_(0, sources, weighted)


def torch_scatter_add(tokens: Any, expert_ids: Any, weights: Any) -> Any:
    order, sources, rows = torch_permuted(tokens, expert_ids)
    weighted = rows * weights.flatten()[order].unsqueeze(1)
    return torch.zeros_like(tokens).scatter_add_(0, sources.unsqueeze(1).expand(-1, HIDDEN), weighted)


def medians(calls: list[Callable[[], Any]], rounds: int) -> list[float]:
    """Median seconds of processor time of each call, after one run that does not count."""
    times: list[list[float]] = [[] for _ in calls]
    for counted in range(rounds + 1):
        for call, taken in zip(calls, times, strict=True):
            start = time.process_time()
            call()
            if counted:
                taken.append(time.process_time() - start)
    return [median(taken) for taken in times]


def main() -> None:
    """Print the times and the ratio."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=3)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    generator = np.random.default_rng(0)
    scores = generator.random((TOKENS, EXPERTS), np.float32)
    arrays = [
        generator.standard_normal((TOKENS, HIDDEN), np.float32),
        np.argpartition(scores, -TOP_K, axis=1)[:, -TOP_K:],
        generator.random((TOKENS, TOP_K), np.float32),
    ]
    tensors = [torch.from_numpy(array) for array in arrays]
    difference = float(np.abs(ours(*arrays) - torch_index_add(*tensors).numpy()).max())
    mine, add, scatter = medians(
        [lambda: ours(*arrays), lambda: torch_index_add(*tensors), lambda: torch_scatter_add(*tensors)], rounds
    )
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
