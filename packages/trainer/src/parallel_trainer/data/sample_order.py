"""Which tokens make up which sample, and in what order samples come: pure arithmetic on sequence lengths.

The three index arrays equal those of Megatron's GPTDataset for the same seed, draw for draw. They take well
under a second for a million sequences, so no index is written to disk and none can be out of date.
"""

from __future__ import annotations

import numpy as np
from attrs import frozen

from parallel_trainer.errors import UserError

LAST_EPOCH_THRESHOLD = 0.8
"""A last epoch of which less than this part is needed is shuffled on its own, after the full ones."""


@frozen(eq=False)
class SampleOrder:
    """N samples over sequences that are read one after the other, E times.

    document_index: int32 (E · sequences,), sequence numbers in reading order.
    sample_index:   int64 (N + 1, 2), for each sample where it starts: place in document_index, token in it.
    shuffle_index:  uint32 or int64 (N,), permutation of the samples.
    """

    document_index: np.ndarray
    sample_index: np.ndarray
    shuffle_index: np.ndarray

    def __len__(self) -> int:
        return len(self.shuffle_index)


def sample_order(
    sequences: np.ndarray,
    lengths: np.ndarray,
    *,
    seq_length: int,
    num_samples: int | None,
    seed: int,
    extra_token: bool = True,
    keep_partial: bool = False,
) -> SampleOrder:
    """The order of samples.

    sequences:   (n,) numbers of the sequences to read.
    lengths:     (n,) tokens of each of them.
    num_samples: how many samples are wanted; at least so many come. None takes each sequence once.
    Raises UserError when the sequences hold too few tokens for one sample.
    """
    tokens_per_epoch = int(lengths.sum(dtype=np.int64))
    extra = int(extra_token)
    if tokens_per_epoch == 0:
        raise UserError(
            f"the {len(lengths)} sequences of this split hold no tokens: give it a larger part of `split`, "
            "or build the corpus from more text"
        )
    epochs = _epochs(tokens_per_epoch, num_samples, seq_length, extra)
    usable = epochs * tokens_per_epoch - extra
    total = -(-usable // seq_length) if keep_partial else usable // seq_length
    if total < 1:
        raise UserError(
            f"the {len(lengths)} sequences of this split hold {tokens_per_epoch} tokens and one sample needs "
            f"seq_length {seq_length} + {extra} = {seq_length + extra}: lower seq_length, add text, "
            "or ask for a number of samples, so that the text is read several times"
        )
    before_last = ((epochs - 1) * tokens_per_epoch - extra) // seq_length
    separate = (
        epochs > 1
        and num_samples is not None
        and num_samples - before_last < int(LAST_EPOCH_THRESHOLD * ((tokens_per_epoch - extra) // seq_length))
    )
    random = np.random.RandomState(seed)
    document_index = _document_index(sequences, epochs, separate, random)
    length_of = np.zeros(int(sequences.max()) + 1, dtype=np.int64)
    length_of[sequences] = lengths
    return SampleOrder(
        document_index=document_index,
        sample_index=_sample_index(length_of[document_index], total, seq_length, extra),
        shuffle_index=_shuffle_index(before_last if separate else total, total, random),
    )


def _epochs(tokens_per_epoch: int, num_samples: int | None, seq_length: int, extra: int) -> int:
    if num_samples is None:
        return 1
    return max(1, -(-(num_samples * seq_length + extra) // tokens_per_epoch))


def _document_index(sequences: np.ndarray, epochs: int, separate: bool, random: np.random.RandomState) -> np.ndarray:
    together = np.tile(sequences.astype(np.int32), epochs - 1 if separate else epochs)
    random.shuffle(together)
    if not separate:
        return together
    last = sequences.astype(np.int32)
    random.shuffle(last)
    return np.concatenate((together, last))


def _sample_index(lengths: np.ndarray, samples: int, seq_length: int, extra: int) -> np.ndarray:
    """Places where samples start. A sample ends in the first sequence with which it has all its tokens."""
    ends = np.cumsum(lengths, dtype=np.int64)
    # Only a kept partial sample, the last, can ask for more tokens than there are.
    needed = np.minimum(np.arange(1, samples + 1, dtype=np.int64) * seq_length + extra, ends[-1])
    place = np.searchsorted(ends, needed, side="left")
    index = np.zeros((samples + 1, 2), dtype=np.int64)
    index[1:, 0] = place
    index[1:, 1] = needed - extra - (ends[place] - lengths[place])
    return index


def _shuffle_index(first: int, total: int, random: np.random.RandomState) -> np.ndarray:
    """Samples 0 … first - 1 in random order, then the others in random order."""
    dtype = np.uint32 if total < np.iinfo(np.uint32).max - 1 else np.int64
    parts = [np.arange(first, dtype=dtype), np.arange(first, total, dtype=dtype)]
    for part in parts:
        random.shuffle(part)
    return np.concatenate(parts)
