"""What every kernel set refuses, in the same words."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from parallel_trainer.batch import IGNORED_LABEL, token_weights


def check_ids(ids: np.ndarray, vocab_size: int) -> None:
    """Raises ValueError for an id outside 0 to vocab_size-1."""
    if ids.size and not (ids.min() >= 0 and ids.max() < vocab_size):
        wrong = ids[(ids < 0) | (ids >= vocab_size)]
        raise ValueError(
            f"embedding: {wrong.size} of {ids.size} token ids are outside the vocabulary, the first "
            f"is {wrong[0]}; ids have to be 0 to {vocab_size - 1} for vocab_size {vocab_size}; "
            f"use the tokenizer that belongs to the model or a vocab_size of at least {ids.max() + 1}"
        )


def check_sizes(sizes: Sequence[int], features: int) -> None:
    """Raises ValueError for sizes of parts that do not add up to the features."""
    if sum(sizes) != features:
        raise ValueError(f"split: sizes {tuple(sizes)} add up to {sum(sizes)}; they have to add up to {features}")


def check_pairs(pairs: int, head_dim: int) -> None:
    """Raises ValueError for more pairs than a head of `head_dim` dimensions has."""
    if 2 * pairs > head_dim:
        raise ValueError(
            f"rotary: a table of {pairs} frequencies turns {2 * pairs} dimensions, and "
            f"heads have {head_dim}; use at most {head_dim // 2} frequencies"
        )


def check_counts(counts: np.ndarray, experts: int, rows: int) -> None:
    """Raises ValueError for counts that do not give each of the experts a part of the rows."""
    if len(counts) != experts or counts.sum() != rows or (counts < 0).any():
        raise ValueError(
            f"grouped_mlp: counts {counts.tolist()} for {experts} experts and {rows} rows: there has to be "
            "one number, 0 or more, for each expert, and they have to add up to the rows"
        )


def labels_among(
    labels: np.ndarray, loss_mask: np.ndarray | None, *, first: int, size: int, vocab_size: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Labels as columns of the logits of the `size` ids from `first` on, all (N,).

    Returns how much the loss of each token counts, float64; the column of its label; and whether the token counts and
    the label is among these columns. Raises ValueError for a label of no token.
    """
    labels = np.asarray(labels).reshape(-1)
    weights = token_weights(labels, loss_mask)
    wrong = labels[(weights != 0) & ((labels < 0) | (labels >= vocab_size))]
    if wrong.size:
        raise ValueError(
            f"cross_entropy_sum: {wrong.size} of {labels.size} labels are outside the vocabulary, the first "
            f"is {wrong[0]}; a label that counts has to be 0 to {vocab_size - 1} for vocab_size "
            f"{vocab_size}; use {IGNORED_LABEL} or a loss_mask of 0 for tokens that do not count"
        )
    columns = labels - first
    return weights, columns, (weights != 0) & (columns >= 0) & (columns < size)


def check_heads(heads: int, kv_heads: int) -> None:
    """Raises ValueError for query heads that are not a multiple of the key/value heads."""
    if heads % kv_heads:
        raise ValueError(
            f"attention: {heads} query heads cannot share {kv_heads} key/value heads; the first has to be a multiple "
            f"of the second; use {-(-heads // kv_heads) * kv_heads} query heads"
        )


def check_whole_rows(keys: int, seq_length: int) -> None:
    """Raises ValueError for keys that are a part of their rows, for kernels that need all."""
    if keys != seq_length:
        raise ValueError(
            f"attention: keys are {keys} positions of rows of {seq_length}; this kernel needs those of whole rows; "
            "gather them first (context parallelism that is not context_parallel_async does)"
        )
