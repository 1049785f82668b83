"""Text to token ids, token ids to files, files to the rows that each rank trains on. NumPy only."""

from __future__ import annotations

from parallel_trainer.data.blend import BlendedDataset
from parallel_trainer.data.gpt_dataset import Dataset, GPTDataset
from parallel_trainer.data.indexed import IndexedCorpus, IndexedWriter
from parallel_trainer.data.loader import BatchLoader, build_dataset
from parallel_trainer.data.sample import Sample
from parallel_trainer.data.settings import SampleSettings
from parallel_trainer.data.tokenizer import ByteTokenizer, Tokenizer, load_tokenizer

__all__ = [
    "BatchLoader",
    "BlendedDataset",
    "ByteTokenizer",
    "Dataset",
    "GPTDataset",
    "IndexedCorpus",
    "IndexedWriter",
    "Sample",
    "SampleSettings",
    "Tokenizer",
    "build_dataset",
    "load_tokenizer",
]
