"""One corpus as a sequence of training samples of equal length."""

from __future__ import annotations

from typing import Protocol

import numpy as np
from attrs import frozen

from parallel_trainer.data.indexed import IndexedCorpus
from parallel_trainer.data.sample import Sample, make_sample
from parallel_trainer.data.sample_order import SampleOrder, sample_order
from parallel_trainer.data.settings import WHOLE, SampleSettings
from parallel_trainer.errors import UserError

SCAN_BLOCK = 1 << 22
"""Tokens looked at in one go when a corpus is checked against a vocabulary."""


class Dataset(Protocol):
    """Samples by number, 0 … len - 1; the same number gives the same sample on every rank, at any time."""

    def __len__(self) -> int: ...

    def __getitem__(self, number: int) -> Sample: ...


@frozen(eq=False)
class GPTDataset:
    """Samples of `settings.seq_length` tokens out of the part of a corpus that belongs to a split.

    Sequences are shuffled, joined and cut without regard to where documents end; then the samples are
    shuffled. Each sample is made from the corpus when it is asked for: nothing is kept
    between two of them. Made by `GPTDataset.of`.
    """

    corpus: IndexedCorpus
    settings: SampleSettings
    order: SampleOrder
    vocab_size: int | None

    @classmethod
    def of(
        cls,
        corpus: IndexedCorpus,
        settings: SampleSettings,
        *,
        num_samples: int | None = None,
        part: tuple[float, float] = WHOLE,
        vocab_size: int | None = None,
    ) -> GPTDataset:
        """Samples of the sequences round(low · n) … round(high · n) - 1 of the corpus, (low, high) = `part`.

        At least `num_samples` of them, reading the text as often as that takes; None reads it once.
        With `vocab_size`, a sample that holds another token id than 0 … vocab_size - 1 is refused. Raises
        UserError when there are too few tokens.
        """
        first, last = (round(bound * len(corpus)) for bound in part)
        try:
            order = sample_order(
                np.arange(first, last),
                corpus.lengths[first:last],
                seq_length=settings.seq_length,
                num_samples=num_samples,
                seed=settings.seed,
                extra_token=settings.extra_token,
                keep_partial=settings.keep_partial,
            )
        except UserError as error:
            raise UserError(f"corpus {corpus.prefix} ({len(corpus)} sequences): {error}") from None
        return cls(corpus, settings, order, vocab_size)

    def __len__(self) -> int:
        return len(self.order)

    def __getitem__(self, number: int) -> Sample:
        """Sample `number` in shuffled order. IndexError outside 0 … len - 1."""
        if not 0 <= number < len(self):
            raise IndexError(f"sample {number} of a dataset of {len(self)}")
        return make_sample(self.tokens(number), self.settings)

    def tokens(self, number: int) -> np.ndarray:
        """The tokens that sample `number` is made of: int64 (S + 1,), or (S,) without the extra token."""
        chosen = int(self.order.shuffle_index[number])
        (first, start), (last, stop) = self.order.sample_index[chosen : chosen + 2].tolist()
        wanted = self.settings.seq_length + self.settings.extra_token
        tokens = np.full(wanted, self.settings.filler, dtype=np.int64)
        filled = 0
        for place in range(first, last + 1):
            sequence = int(self.order.document_index[place])
            piece = self.corpus.sequence(
                sequence,
                start=start if place == first else 0,
                stop=stop + self.settings.extra_token if place == last else None,
            )
            if self.vocab_size is not None:
                _check_piece(self.corpus, sequence, piece, self.vocab_size)
            tokens[filled : filled + len(piece)] = piece
            filled += len(piece)
        return tokens


def check_token_ids(corpus: IndexedCorpus, vocab_size: int) -> None:
    """Read the whole corpus and raise UserError at the first token id that is not 0 … vocab_size - 1."""
    limits = np.iinfo(corpus.dtype)
    if limits.min >= 0 and limits.max < vocab_size:
        return
    for first in range(0, len(corpus.tokens), SCAN_BLOCK):
        block = corpus.tokens[first : first + SCAN_BLOCK]
        if block.max() >= vocab_size or block.min() < 0:
            place = first + int(np.flatnonzero((block >= vocab_size) | (block < 0))[0])
            sequence = int(np.searchsorted(corpus.starts, place, side="right")) - 1
            raise _outside(corpus, sequence, int(corpus.tokens[place]), vocab_size, int(corpus.tokens.max()))


def _check_piece(corpus: IndexedCorpus, sequence: int, piece: np.ndarray, vocab_size: int) -> None:
    bad = piece[(piece >= vocab_size) | (piece < 0)]
    if bad.size:
        raise _outside(corpus, sequence, int(bad[0]), vocab_size, int(bad.max()))


def _outside(corpus: IndexedCorpus, sequence: int, token: int, vocab_size: int, largest: int) -> UserError:
    document = int(np.searchsorted(corpus.documents, sequence, side="right")) - 1
    larger = f"a vocab_size of at least {largest + 1}, or " if largest >= vocab_size else ""
    return UserError(
        f"corpus {corpus.prefix}: document {document} (sequence {sequence}) has the token id {token}, and "
        f"with model.vocab_size {vocab_size} ids must be 0 … {vocab_size - 1}: use {larger}a corpus built "
        "with the tokenizer of the model"
    )
