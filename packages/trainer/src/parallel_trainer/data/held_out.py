"""From the section `eval_dataset` to the rows of an evaluation: every held-out sample once, for any number of ranks."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from attrs import evolve, frozen
from parallel_config import TrainConfig, written_fields

from parallel_trainer.batch import MicroBatch
from parallel_trainer.data.blend import BlendedDataset
from parallel_trainer.data.gpt_dataset import Dataset, GPTDataset
from parallel_trainer.data.loader import build_dataset
from parallel_trainer.data.sample import Sample, stack
from parallel_trainer.data.settings import TRAIN, check_loader, sources
from parallel_trainer.errors import UserError


@frozen(eq=False)
class HeldOut:
    """The first `size` samples of a dataset, of which none is part of another."""

    dataset: Dataset
    size: int

    @classmethod
    def of(cls, config: TrainConfig, *, vocab_size: int) -> HeldOut | None:
        """What the section `eval_dataset` describes; None for a file without it.

        Raises UserError for what cannot be read, and for more samples than there are: none is counted twice.
        """
        written = written_fields(config)
        if "eval_dataset" not in written:
            return None
        section, loader = config.eval_dataset, config.eval_dataloader
        path = "eval_dataset.dataloader" if "eval_dataset.dataloader" in written else TRAIN
        wanted = section.samples or (loader.sizes[1] if loader.sizes and len(loader.sizes) == 3 else 0)
        once = evolve(section, dataloader=evolve(loader, sizes=None))
        try:
            check_loader(loader, path)
            blend, _ = sources(loader.config, split="valid", path=path)
            weighted = blend[0].weight is not None  # such a mixture has no length of its own
            number = (wanted or None) if weighted else None
            dataset = build_dataset(once, vocab_size=vocab_size, num_samples=number, split="valid", path=path)
        except UserError as error:
            raise UserError(f"eval_dataset cannot be read: {error}") from None
        _check_size(dataset, wanted)
        return cls(dataset, wanted or len(dataset))

    def passes(self, rows: int, shards: int) -> int:
        """How many micro-batches of so many rows each of the shards has."""
        return -(-self.size // (rows * shards))

    def micro_batches(self, rows: int, shards: int, shard: int) -> Iterator[MicroBatch]:
        """Those of one shard, equally many for each: row j of all is sample shard + shards · j.

        Rows past the last sample hold tokens of the first, and their loss_mask is 0.
        """
        for number in range(self.passes(rows, shards)):
            first = shard + shards * rows * number
            yield stack([self._row(sample) for sample in range(first, first + shards * rows, shards)])

    def _row(self, number: int) -> Sample:
        if number < self.size:
            return self.dataset[number]
        sample = self.dataset[0]
        return evolve(sample, loss_mask=np.zeros_like(sample.loss_mask))


def _check_size(dataset: Dataset, wanted: int) -> None:
    """Raise UserError where `wanted` samples, 0 for all, are more than the text holds."""
    if len(dataset) < wanted:
        raise UserError(
            f"eval_dataset asks for {wanted} samples, and the text to evaluate holds {len(dataset)}, each taken once: "
            f"write samples: {len(dataset)} or less, leave it out for all, or hold out more text"
        )
    for part in dataset.datasets if isinstance(dataset, BlendedDataset) else ():
        if isinstance(part, GPTDataset) and len(np.unique(part.order.document_index)) < len(part.order.document_index):
            raise UserError(
                f"eval_dataset asks for {wanted} samples, and corpus {part.corpus.prefix} holds fewer than its share "
                "of them, each taken once: write fewer samples, another weight, or hold out more text"
            )
