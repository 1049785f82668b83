"""A corpus as rows of tokens, read without this project: the formats and rules that a file's `train_dataset` names.

PREFIX.bin and PREFIX.idx are Megatron-LM's (`indexed_dataset.py`), and the order of samples is that of its `GPTDataset`
for data that is read once: documents are shuffled, joined and cut, then samples are shuffled.
Arrays are (rows, tokens).
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path

import numpy as np


@dataclass(frozen=True)
class Rows:
    """ids and labels, how much each label counts, positions, and the number of each token's document in its row."""

    ids: np.ndarray
    labels: np.ndarray
    counts: np.ndarray
    positions: np.ndarray
    documents: np.ndarray


def documents_of(prefix: str) -> list[np.ndarray]:
    """The tokens of each document of a corpus in which each is one sequence of 2-byte ids."""
    index = Path(f"{prefix}.idx").read_bytes()
    magic, version, code, sequences, entries = struct.unpack_from("<9sQBQQ", index)
    assert (magic, version, code, entries) == (b"MMIDIDX\0\0", 1, 8, sequences + 1)
    lengths = np.frombuffer(index, "<i4", sequences, struct.calcsize("<9sQBQQ"))
    tokens = np.fromfile(f"{prefix}.bin", "<u2").astype(np.int64)
    assert len(tokens) == lengths.sum()
    return np.split(tokens, np.cumsum(lengths)[:-1])


def samples_of(prefix: str, *, seq_length: int, seed: int) -> np.ndarray:
    """All samples in the order of training, each with the label of its last token: (samples, seq_length + 1)."""
    documents = documents_of(prefix)
    random = np.random.RandomState(seed)
    order = np.arange(len(documents))
    random.shuffle(order)
    stream = np.concatenate([documents[number] for number in order])
    starts = np.arange((len(stream) - 1) // seq_length) * seq_length
    random.shuffle(starts)
    return np.stack([stream[start : start + seq_length + 1] for start in starts])


def rows_of(samples: np.ndarray, section: dict) -> Rows:
    """Samples as a model reads them; `section` is the file's `train_dataset.dataloader.config`."""
    ids, labels = samples[:, :-1], samples[:, 1:]
    ends = ids == section["eod"]
    documents = np.cumsum(ends, axis=1) - ends  # an end belongs to the document that it ends
    places = np.tile(np.arange(ids.shape[1]), (len(ids), 1))
    first = np.stack([np.searchsorted(row, row) for row in documents])
    return Rows(
        ids=ids,
        labels=labels,
        counts=np.where(ends, 0.0, 1.0) if section.get("eod_mask_loss") else np.ones(ids.shape),
        positions=places - first if section.get("reset_position_ids") else places,
        documents=documents if section.get("create_compressed_eod_mask") else np.zeros_like(ids),
    )


def one_further(rows: Rows) -> Rows:
    """At each place what stands one place to the right; past the end of a row is id 0, which does not count.

    Nor does what lies beyond the end of a document that is kept apart. Positions and documents stay those of the place.
    """

    def shifted(column: np.ndarray) -> np.ndarray:
        return np.concatenate([column[:, 1:], np.zeros_like(column[:, :1])], axis=1)

    last = np.concatenate([np.diff(rows.documents, axis=1) != 0, np.ones_like(rows.ids[:, :1], bool)], axis=1)
    return Rows(
        ids=shifted(rows.ids),
        labels=shifted(rows.labels),
        counts=np.where(last, 0.0, shifted(rows.counts)),
        positions=rows.positions,
        documents=rows.documents,
    )
