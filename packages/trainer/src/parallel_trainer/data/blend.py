"""Several datasets mixed by weights, and the order in which a mixture takes from them."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from attrs import frozen

from parallel_trainer.data.gpt_dataset import Dataset
from parallel_trainer.data.sample import Sample

MARGIN = 1.005
"""Each source is asked for half a percent more than its share, so that none runs out (Megatron's number)."""
BLOCK = 1024
"""Steps of the mixing order that are worked out one after the other; blocks are worked out side by side."""


@frozen(eq=False)
class BlendedDataset:
    """Samples of several datasets in a fixed mixture. Made by `BlendedDataset.of`.

    source_index: int32 (N,), which dataset sample i comes from.
    sample_index: int64 (N,), which of that dataset's samples it is.
    """

    datasets: tuple[Dataset, ...]
    source_index: np.ndarray
    sample_index: np.ndarray

    @classmethod
    def of(cls, datasets: Sequence[Dataset], *, weights: Sequence[float], size: int) -> BlendedDataset:
        """`size` samples, dataset d having the share weights[d] / sum(weights).

        A dataset that has fewer samples than its share starts over.
        """
        source_index = mixing_order(normalized(weights), size)
        sample_index = np.empty(size, dtype=np.int64)
        for number, dataset in enumerate(datasets):
            places = np.flatnonzero(source_index == number)
            sample_index[places] = np.arange(len(places)) % len(dataset)
        return cls(tuple(datasets), source_index, sample_index)

    def __len__(self) -> int:
        return len(self.source_index)

    def __getitem__(self, number: int) -> Sample:
        """Sample `number` of the mixture. IndexError outside 0 … len - 1."""
        if not 0 <= number < len(self):
            raise IndexError(f"sample {number} of a mixture of {len(self)}")
        return self.datasets[self.source_index[number]][int(self.sample_index[number])]


def normalized(weights: Sequence[float]) -> np.ndarray:
    """Weights divided by their sum, float64."""
    array = np.asarray(weights, dtype=np.float64)
    return array / array.sum()


def requested_samples(weights: Sequence[float], size: int) -> tuple[int, ...]:
    """How many samples each source is asked for when `size` are wanted; their sum is the mixture's length."""
    return tuple(math.ceil(size * weight * MARGIN) for weight in normalized(weights).tolist())


def mixing_order(weights: np.ndarray, size: int) -> np.ndarray:
    """Source of each of `size` samples, int32 (size,): the one furthest behind its share.

    Sample i comes from the source d with the largest weights[d] · max(i, 1) - taken[d], the first of equals,
    with `taken` counted up to i . `weights` float64, positive, of sum 1.

    Blocks of samples are worked out at the same time, each from a guess of what was taken before it. A block
    whose guess was not what the block before arrived at is done again from that, until all agree: then the
    result is the one that a plain loop gives. The rule makes up for a wrong guess within a few samples per
    source, so two rounds are usual and weights below one in 100,000 take more.
    """
    blocks = -(-size // BLOCK)
    order = np.empty((blocks, BLOCK), dtype=np.int32)
    firsts = np.arange(blocks, dtype=np.int64) * BLOCK
    before = np.stack([_likely_counts(weights, int(first)) for first in firsts]) if blocks else np.empty((0, 1))
    after = np.empty_like(before)
    stale = np.arange(blocks)
    while stale.size:
        order[stale], after[stale] = _follow(weights, firsts[stale], before[stale])
        stale = 1 + np.flatnonzero(np.any(before[1:] != after[:-1], axis=1))
        before[stale] = after[stale - 1]
    return order.reshape(-1)[:size]


def _likely_counts(weights: np.ndarray, first: int) -> np.ndarray:
    """A guess of what the first samples took of each source: its share, rounded so that the sum is right."""
    counts = np.floor(weights * first)
    behind = np.argsort(counts - weights * first, kind="stable")
    counts[behind[: first - int(counts.sum())]] += 1
    return counts


def _follow(weights: np.ndarray, firsts: np.ndarray, before: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The choices of m blocks, int32 (m, BLOCK), and what was taken of each source by then, (m, sources)."""
    order = np.empty((BLOCK, len(firsts)), dtype=np.int32)
    taken = before.copy()
    rows = np.arange(len(firsts))
    for step in range(BLOCK):
        position = np.maximum(firsts + step, 1).astype(np.float64)
        chosen = np.argmax(weights * position[:, None] - taken, axis=1)
        taken[rows, chosen] += 1
        order[step] = chosen
    return order.T, taken
