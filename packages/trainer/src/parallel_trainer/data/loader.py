"""From the section `train_dataset` to the rows that each rank trains on, step by step."""

from __future__ import annotations

from typing import Any

import numpy as np

from parallel_trainer.batch import MicroBatch
from parallel_trainer.data.blend import BlendedDataset, requested_samples
from parallel_trainer.data.gpt_dataset import Dataset, GPTDataset, check_token_ids
from parallel_trainer.data.indexed import IndexedCorpus
from parallel_trainer.data.sample import stack
from parallel_trainer.data.settings import (
    SPLITS,
    TRAIN,
    SampleSettings,
    Source,
    Split,
    sample_settings,
    sources,
)
from parallel_trainer.errors import UserError

SCAN_LIMIT_BYTES = 1 << 30
"""Corpora up to this size are checked against the vocabulary at start-up, larger ones as they are read."""


def build_dataset(
    train_dataset: Any,
    *,
    vocab_size: int,
    num_samples: int | None = None,
    split: Split = "train",
    path: str = TRAIN,
) -> Dataset:
    """The dataset that a `train_dataset` section describes: a GPTDataset, or several of them mixed.

    `path` is that of its dataloader in messages.

    `dataloader.sizes` says how many samples are wanted: the text is read as often as that takes, and after
    the last sample the same order comes again. Where it is not written, `num_samples` says so; where that is
    None as well, the text is read once. Raises UserError for whatever cannot be read or trained on.
    """
    dataloader = train_dataset.dataloader
    settings = sample_settings(dataloader, split=split, path=path)
    if settings.eod >= vocab_size:
        raise UserError(
            f"{path}.config.eod {settings.eod} is no token of model.vocab_size {vocab_size}: ids are "
            f"0 … {vocab_size - 1}; write the id that `parallel-train data build` printed, or -1 for none"
        )
    blend, part = sources(dataloader.config, split=split, path=path)
    corpora = [_open(source, vocab_size) for source in blend]
    size = _size(dataloader.sizes, num_samples, split)
    if blend[0].weight is not None:
        return _weighted(corpora, blend, settings, part, size, vocab_size)
    if len(corpora) == 1:
        return GPTDataset.of(corpora[0], settings, num_samples=size, part=part, vocab_size=vocab_size)
    datasets = [GPTDataset.of(corpus, settings, part=part, vocab_size=vocab_size) for corpus in corpora]
    counts = [len(dataset) for dataset in datasets]
    total = sum(counts) if size is None else min(size, sum(counts))
    return BlendedDataset.of(datasets, weights=counts, size=total)


class BatchLoader:
    """The rows of one rank for any step. Which those are depends on the arguments and on how much was read before.

    A step takes the next global_batch_size samples of the dataset, whatever the number of shards; after the last sample
    comes the first again. With `consumed` samples read before, row j of shard s is sample
    consumed + s + data_parallel · j; with `neighbours` row j of its micro-batch m is sample
    consumed + (data_parallel · m + s) · local_batch_size + j, so that micro-batches are the same for every number of
    shards.
    """

    def __init__(
        self,
        dataset: Dataset,
        *,
        global_batch_size: int,
        local_batch_size: int,
        data_parallel: int,
        shard_index: int,
        shuffle_seed: int | None = None,
        neighbours: bool = False,
    ) -> None:
        """`shuffle_seed` adds a permutation of the whole dataset, another one for each pass over it
        (`dataloader.shuffle: true`). ValueError for sizes that do not divide."""
        if global_batch_size % (data_parallel * local_batch_size):
            raise ValueError(
                f"global_batch_size {global_batch_size} must be a multiple of data_parallel {data_parallel} "
                f"· local_batch_size {local_batch_size} = {data_parallel * local_batch_size}"
            )
        if not 0 <= shard_index < data_parallel:
            raise ValueError(f"shard_index {shard_index} must be 0 … data_parallel {data_parallel} - 1")
        self._dataset = dataset
        self._rows = global_batch_size // data_parallel
        self._local_batch_size = local_batch_size
        self._data_parallel = data_parallel
        self._shard_index = shard_index
        self._shuffle_seed = shuffle_seed
        self._neighbours = neighbours

    def sample_numbers(self, consumed: int) -> np.ndarray:
        """Numbers in the dataset of this rank's rows in the step after `consumed` samples: int64 (rows,)."""
        rows = np.arange(self._rows, dtype=np.int64)
        if self._neighbours:
            number, row = np.divmod(rows, self._local_batch_size)
            position = consumed + (self._data_parallel * number + self._shard_index) * self._local_batch_size + row
        else:
            position = consumed + self._shard_index + self._data_parallel * rows
        passes, numbers = np.divmod(position, len(self._dataset))
        if self._shuffle_seed is None:
            return numbers
        for number in np.unique(passes).tolist():
            here = passes == number
            permutation = np.random.default_rng((self._shuffle_seed, number)).permutation(len(self._dataset))
            numbers[here] = permutation[numbers[here]]
        return numbers

    def micro_batches(self, consumed: int) -> list[MicroBatch]:
        """The rows of the step after `consumed` samples: num_accumulation_steps batches of (local_batch_size, S)."""
        samples = [self._dataset[number] for number in self.sample_numbers(consumed).tolist()]
        size = self._local_batch_size
        return [stack(samples[first : first + size]) for first in range(0, len(samples), size)]


def _open(source: Source, vocab_size: int) -> IndexedCorpus:
    corpus = IndexedCorpus.open(source.prefix)
    if corpus.tokens.nbytes <= SCAN_LIMIT_BYTES:
        check_token_ids(corpus, vocab_size)
    return corpus


def _weighted(
    corpora: list[IndexedCorpus],
    blend: tuple[Source, ...],
    settings: SampleSettings,
    part: tuple[float, float],
    size: int | None,
    vocab_size: int,
) -> Dataset:
    if size is None:
        raise UserError(
            "train_dataset.dataloader.sizes is not written, and a blend with weights has no length of its "
            "own: write the number of samples, as sizes: [8000, 0, 0], or leave the weights out"
        )
    weights = [source.weight for source in blend if source.weight is not None]
    counts = requested_samples(weights, size)
    datasets = [
        GPTDataset.of(corpus, settings, num_samples=count, part=part, vocab_size=vocab_size)
        for corpus, count in zip(corpora, counts, strict=True)
    ]
    return BlendedDataset.of(datasets, weights=weights, size=sum(counts))


def _size(sizes: Any, num_samples: int | None, split: Split) -> int | None:
    if not sizes:
        return num_samples
    if len(sizes) != len(SPLITS):
        raise UserError(
            f"train_dataset.dataloader.sizes {list(sizes)} must be 3 numbers of samples: train, valid, test"
        )
    size = int(sizes[SPLITS.index(split)])
    if size < 1:
        raise UserError(
            f"train_dataset.dataloader.sizes {list(sizes)} asks for {size} samples of {split}; it must be at least 1"
        )
    return size
