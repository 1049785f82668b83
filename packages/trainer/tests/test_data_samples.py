"""Samples of a corpus against a walk token by token and against rows worked out by hand."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from parallel_trainer.data.gpt_dataset import GPTDataset, check_token_ids
from parallel_trainer.data.indexed import IndexedCorpus, IndexedWriter
from parallel_trainer.data.sample import Sample, make_sample, stack
from parallel_trainer.data.sample_order import sample_order
from parallel_trainer.data.settings import SampleSettings
from parallel_trainer.errors import UserError


def corpus_of(prefix: Path, documents: list[list[int]], vocab_size: int = 1000) -> IndexedCorpus:
    with IndexedWriter(prefix, vocab_size=vocab_size) as writer:
        for document in documents:
            writer.add_document(np.array(document, dtype=np.int64))
    return IndexedCorpus.open(prefix)


def walked_samples(
    documents: list[list[int]], seq_length: int, num_samples: int | None, seed: int, extra: int, partial: bool
) -> list[list[int]]:
    """The samples in shuffled order, by drawing the same random numbers and copying token by token."""
    per_epoch = sum(map(len, documents))
    epochs = 1
    while num_samples is not None and epochs * per_epoch < num_samples * seq_length + extra:
        epochs += 1
    separate = False
    full = ((epochs - 1) * per_epoch - extra) // seq_length
    if epochs > 1:
        separate = num_samples - full < int(0.8 * ((per_epoch - extra) // seq_length))
    random = np.random.RandomState(seed)
    order: list[int] = []
    for part in (epochs - 1, 1) if separate else (epochs,):
        numbers = np.array(list(range(len(documents))) * part, dtype=np.int32)
        random.shuffle(numbers)
        order.extend(numbers.tolist())
    stream = [token for number in order for token in documents[number]]
    samples, start = [], 0
    while start + seq_length + extra <= len(stream) or (partial and start + extra < len(stream)):
        samples.append(stream[start : start + seq_length + extra])
        start += seq_length
    shuffled: list[int] = []
    for first, last in ((0, full), (full, len(samples))) if separate else ((0, len(samples)),):
        numbers = np.arange(first, last, dtype=np.uint32)
        random.shuffle(numbers)
        shuffled.extend(numbers.tolist())
    return [samples[number] for number in shuffled]


@settings(max_examples=100, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 9), min_size=1, max_size=8).filter(any),
    seq_length=st.integers(1, 7),
    num_samples=st.none() | st.integers(1, 60),
    seed=st.integers(0, 2**32 - 1),
    extra=st.booleans(),
    partial=st.booleans(),
)
def test_samples_are_those_of_a_walk_token_by_token(
    tmp_path_factory: pytest.TempPathFactory,
    lengths: list[int],
    seq_length: int,
    num_samples: int | None,
    seed: int,
    extra: bool,
    partial: bool,
) -> None:
    ends = np.cumsum(lengths).tolist()
    documents = [list(range(end - length, end)) for length, end in zip(lengths, ends, strict=True)]
    expected = walked_samples(documents, seq_length, num_samples, seed, int(extra), partial)
    corpus = corpus_of(tmp_path_factory.getbasetemp() / "walk", documents)
    options = SampleSettings(seq_length=seq_length, seed=seed, pad=-1, extra_token=extra, keep_partial=partial)
    if not expected:
        with pytest.raises(UserError, match="one sample needs seq_length"):
            GPTDataset.of(corpus, options, num_samples=num_samples)
        return
    dataset = GPTDataset.of(corpus, options, num_samples=num_samples)
    width = seq_length + extra
    padded = [sample + [-1] * (width - len(sample)) for sample in expected]
    assert [dataset.tokens(number).tolist() for number in range(len(dataset))] == padded
    assert num_samples is None or len(dataset) >= num_samples


def test_a_last_epoch_of_which_little_is_needed_comes_last() -> None:
    """10 sequences of 10 tokens, S = 10: one epoch is 9 samples; 11 samples need 2, the second hardly."""
    order = sample_order(np.arange(10), np.full(10, 10), seq_length=10, num_samples=11, seed=3)
    assert sorted(order.document_index[:10].tolist()) == list(range(10))
    assert sorted(order.document_index[10:].tolist()) == list(range(10))
    assert sorted(order.shuffle_index[:9].tolist()) == list(range(9))
    assert sorted(order.shuffle_index[9:].tolist()) == list(range(9, 19))


def test_a_last_epoch_of_which_most_is_needed_is_mixed_with_the_others() -> None:
    mixed = [
        sorted(
            sample_order(np.arange(10), np.full(10, 10), seq_length=10, num_samples=17, seed=seed)
            .document_index[:10]
            .tolist()
        )
        != list(range(10))
        for seed in range(5)
    ]
    assert any(mixed)


def test_a_million_documents_are_ordered_without_going_through_each(
    lines_run: Callable[[Callable[[], object]], int],
) -> None:
    lengths = np.random.default_rng(0).integers(0, 2000, 1_000_000)

    def ordered() -> np.ndarray:
        return sample_order(np.arange(len(lengths)), lengths, seq_length=4096, num_samples=None, seed=1)

    assert lines_run(ordered) < 10_000
    order = ordered()
    assert len(order) == (int(lengths.sum()) - 1) // 4096


@pytest.mark.parametrize(("part", "numbers"), [((0.0, 0.5), {0, 1}), ((0.5, 1.0), {2, 3, 4}), ((0.1, 0.3), {0, 1})])
def test_a_split_takes_rounded_shares_of_the_sequences(
    tmp_path: Path, part: tuple[float, float], numbers: set[int]
) -> None:
    """Halves round to even numbers: 2.5 to 2, 0.5 to 0, 1.5 to 2."""
    corpus = corpus_of(tmp_path / "text", [[number] * 4 for number in range(5)])
    dataset = GPTDataset.of(corpus, SampleSettings(seq_length=2), part=part)
    assert {int(token) for number in range(len(dataset)) for token in dataset.tokens(number)} == numbers


def test_pub_cp_03_labels_are_shifted_before_anything_is_cut() -> None:
    """PUB-CP-03, in a sample."""
    raw = np.array([11, 12, 13, 14, 15, 16, 17, 18, 19])
    sample = make_sample(raw, SampleSettings(seq_length=8, eod=14, eod_mask_loss=True))
    assert sample.input_ids[:4].tolist() == [11, 12, 13, 14]
    assert sample.labels[:4].tolist() == [12, 13, 14, 15]
    assert sample.loss_mask[:4].tolist() == [1, 1, 1, 0]
    assert sample.input_ids[4:].tolist() == [15, 16, 17, 18]
    assert sample.labels[4:].tolist() == [16, 17, 18, 19]
    assert sample.loss_mask[4:].tolist() == [1, 1, 1, 1]
    assert sample.loss_mask.sum() == 7


@pytest.mark.parametrize(
    ("tokens", "positions"),
    [
        ([5, 6, 0, 7, 8, 9, 0, 4], [0, 1, 2, 0, 1, 2, 3, 0]),
        ([5, 0, 0, 7, 0, 0, 0, 3], [0, 1, 0, 0, 1, 0, 0, 0]),
        ([5, 6, 7, 0], [0, 1, 2, 3]),
        ([5, 6, 7, 8], [0, 1, 2, 3]),
        ([0, 5, 6, 7], [0, 0, 1, 2]),
        ([5, 6, 0, 7, 8, 0], [0, 1, 2, 0, 1, 2]),
    ],
)
def test_pub_mask_01_positions_restart_after_each_end(tokens: list[int], positions: list[int]) -> None:
    """PUB-MASK-01, position ids of rows a to f."""
    settings = SampleSettings(seq_length=len(tokens), eod=0, reset_position_ids=True)
    sample = make_sample(np.array([*tokens, 9]), settings)
    assert sample.position_ids.tolist() == positions
    plain = make_sample(np.array([*tokens, 9]), SampleSettings(seq_length=len(tokens), eod=0))
    assert plain.position_ids.tolist() == list(range(len(tokens)))


def test_pub_mask_02_ends_of_a_micro_batch_count_through_its_rows_and_start_anew_in_the_next() -> None:
    """PUB-MASK-02, in the trainer."""
    settings = SampleSettings(seq_length=8, eod=0, separate_documents=True)

    def sample(lengths: list[int]) -> Sample:
        tokens = np.full(9, 5)
        tokens[np.cumsum(lengths) - 1] = 0
        return make_sample(tokens, settings)

    a, b, c, d = (sample(lengths) for lengths in ([3, 5], [8], [1, 7], [4, 4]))
    masks = [stack([a, b]).mask, stack([c, d]).mask]
    assert [mask.actual_seq_len.tolist() for mask in masks] == [[3, 8, 16], [1, 8, 12, 16]]
    for mask in masks:
        assert mask.rows * mask.seq_length == 16
        assert mask.dense()[1, 0].tolist() == [True] + [False] * 7


def test_padding_is_no_end_of_document_where_the_end_is_token_0() -> None:
    """Padding becomes 0 in the inputs; the mask was made before that."""
    settings = SampleSettings(seq_length=6, eod=0, pad=99, separate_documents=True)
    sample = make_sample(np.array([5, 6, 0, 99, 99, 99, 99]), settings)
    assert sample.input_ids.tolist() == [5, 6, 0, 0, 0, 0]
    assert sample.document_ends.tolist() == [3, 6]


@pytest.mark.parametrize("pad", [5, -1])
def test_an_end_of_document_that_is_the_padding_too_is_read_and_learned(pad: int) -> None:
    """PUB2-DATA-01: with pad 5 the values are those without padding."""
    tokens = np.array([7, 8, 9, 5, 11, 12, 5, 13, 14])
    sample = make_sample(tokens, SampleSettings(seq_length=8, eod=5, pad=pad))
    assert sample.input_ids.tolist() == [7, 8, 9, 5, 11, 12, 5, 13]
    assert sample.labels.tolist() == [8, 9, 5, 11, 12, 5, 13, 14]
    assert sample.loss_mask.tolist() == [1, 1, 1, 1, 1, 1, 1, 1]
    rolled = make_sample(tokens[:8], SampleSettings(seq_length=8, eod=5, pad=pad, extra_token=False))
    assert rolled.input_ids.tolist() == [7, 8, 9, 5, 11, 12, 5, 13]
    assert rolled.labels.tolist() == [8, 9, 5, 11, 12, 5, 13, 0]
    assert rolled.loss_mask.tolist() == [1, 1, 1, 1, 1, 1, 1, 0]


def test_places_filled_up_are_padding_where_that_is_the_end_of_documents_too(tmp_path: Path) -> None:
    corpus = corpus_of(tmp_path / "c", [[7, 8, 5, 9, 11, 5]])
    settings = SampleSettings(seq_length=8, eod=5, pad=5, keep_partial=True, separate_documents=True)
    sample = GPTDataset.of(corpus, settings)[0]
    assert sample.input_ids.tolist() == [7, 8, 5, 9, 11, 5, 0, 0]
    assert sample.labels.tolist() == [8, 5, 9, 11, 5, 0, 0, 0]
    assert sample.loss_mask.tolist() == [1, 1, 1, 1, 1, 0, 0, 0]
    assert sample.document_ends.tolist()[:2] == [3, 6]


def test_padding_counts_nowhere_and_becomes_zero() -> None:
    sample = make_sample(np.array([5, 6, 99, 99, 99]), SampleSettings(seq_length=4, pad=99))
    assert sample.input_ids.tolist() == [5, 6, 0, 0]
    assert sample.labels.tolist() == [6, 0, 0, 0]
    assert sample.loss_mask.tolist() == [1, 0, 0, 0]


def test_without_the_extra_token_the_last_place_has_no_label() -> None:
    sample = make_sample(np.array([5, 6, 7]), SampleSettings(seq_length=3, extra_token=False))
    assert sample.input_ids.tolist() == [5, 6, 7]
    assert sample.labels.tolist() == [6, 7, 0]
    assert sample.loss_mask.tolist() == [1, 1, 0]


def test_dtypes_are_those_of_the_columns() -> None:
    sample = make_sample(np.array([1, 2, 3], dtype=np.uint16), SampleSettings(seq_length=2))
    assert {sample.input_ids.dtype, sample.labels.dtype, sample.position_ids.dtype} == {np.dtype("int32")}
    assert sample.loss_mask.dtype == np.dtype("float32")


def test_one_sample_leaves_no_trace_in_the_next(tmp_path: Path) -> None:
    """The mask of a padded sample must not reach the samples after it, whoever edits what it got."""
    corpus = corpus_of(tmp_path / "text", [[1, 2, 3, 4, 5, 6, 7]])
    dataset = GPTDataset.of(corpus, SampleSettings(seq_length=4, keep_partial=True))
    partial = next(number for number in range(2) if dataset[number].loss_mask.sum() == 2)
    dataset[partial].loss_mask[:] = 0
    dataset[partial].input_ids[:] = 0
    whole = dataset[1 - partial]
    assert whole.loss_mask.tolist() == [1, 1, 1, 1]
    assert whole.input_ids.tolist() == [1, 2, 3, 4]
    assert dataset[partial].input_ids.tolist() == [5, 6, 7, 0]


def test_numbers_outside_the_dataset_are_errors(tmp_path: Path) -> None:
    dataset = GPTDataset.of(corpus_of(tmp_path / "text", [[1, 2, 3]]), SampleSettings(seq_length=2))
    for number in (-1, 1):
        with pytest.raises(IndexError):
            dataset[number]


def test_too_little_text_says_how_much_is_needed(tmp_path: Path) -> None:
    corpus = corpus_of(tmp_path / "text", [[1, 2, 3], []])
    with pytest.raises(UserError, match=r"hold 3 tokens and one sample needs seq_length 8 \+ 1 = 9"):
        GPTDataset.of(corpus, SampleSettings(seq_length=8))
    with pytest.raises(UserError, match="1 sequences of this split hold no tokens"):
        GPTDataset.of(corpus, SampleSettings(seq_length=8), part=(0.5, 1.0))
    assert len(GPTDataset.of(corpus, SampleSettings(seq_length=8), num_samples=2)) == 2


def test_an_id_that_the_model_lacks_is_named_with_its_document(tmp_path: Path) -> None:
    corpus = corpus_of(tmp_path / "text", [[1, 2, 3], [4, 256, 5]])
    message = r"document 1 \(sequence 1\) has the token id 256, and with model.vocab_size 256 .*at least 257"
    with pytest.raises(UserError, match=message):
        check_token_ids(corpus, 256)
    dataset = GPTDataset.of(corpus, SampleSettings(seq_length=5), vocab_size=256)
    with pytest.raises(UserError, match=message):
        dataset[0]
    check_token_ids(corpus, 257)
