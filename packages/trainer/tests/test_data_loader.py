"""From a `train_dataset` section to each rank's rows: which samples, in which order, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from parallel_config.schema import Dataloader, DataloaderConfig, TrainDataset
from parallel_trainer.data.indexed import IndexedWriter
from parallel_trainer.data.loader import BatchLoader, build_dataset
from parallel_trainer.data.sample import Sample
from parallel_trainer.data.settings import parse_blend, parse_split
from parallel_trainer.errors import UserError


class Numbered:
    """Samples of two places that hold their own number."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, number: int) -> Sample:
        here = np.array([number, number], dtype=np.int32)
        return Sample(here, here + 1, np.ones(2, dtype=np.float32), np.arange(2, dtype=np.int32), np.array([2]))


def loader(size: int = 1000, **changes: Any) -> BatchLoader:
    options = {"global_batch_size": 8, "local_batch_size": 2, "data_parallel": 2, "shard_index": 0} | changes
    return BatchLoader(Numbered(size), **options)


def corpus(prefix: Path, token: int, *, documents: int = 20, vocab_size: int = 1000) -> str:
    with IndexedWriter(prefix, vocab_size=vocab_size) as writer:
        for _ in range(documents):
            writer.add_document(np.full(10, token))
    return str(prefix)


def section(*, sizes: tuple[int, ...] | None = None, loader: dict[str, Any] | None = None, **config: Any) -> Any:
    values = {"seq_length": 4, "split": "1, 0, 0"} | config
    options = {"type": "BlendedMegatronDatasetDataLoader", "datasets_type": "GPTDataset"} | (loader or {})
    return TrainDataset(dataloader=Dataloader(sizes=sizes, config=DataloaderConfig(**values), **options))


def test_a_rank_has_every_data_parallel_th_sample_in_micro_batches() -> None:
    """Step 3 of 8 samples is 24 … 31; shard 1 of 2 has the odd ones, two in each of two micro-batches."""
    batches = loader(shard_index=1).micro_batches(24)
    assert [batch.input_ids.tolist() for batch in batches] == [[[25, 25], [27, 27]], [[29, 29], [31, 31]]]
    assert [batch.labels[:, 0].tolist() for batch in batches] == [[26, 28], [30, 32]]
    assert batches[0].loss_mask.shape == batches[0].position_ids.shape == (2, 2)


@settings(deadline=None)
@given(
    size=st.integers(1, 50),
    step=st.integers(0, 30),
    data_parallel=st.sampled_from([1, 2, 3, 4, 6, 12]),
    shuffle_seed=st.none() | st.integers(0, 5),
)
def test_a_step_has_the_same_samples_for_every_plan(
    size: int, step: int, data_parallel: int, shuffle_seed: int | None
) -> None:
    def samples(shards: int) -> list[int]:
        return sorted(
            number
            for shard in range(shards)
            for number in loader(
                size,
                global_batch_size=12,
                local_batch_size=1,
                data_parallel=shards,
                shard_index=shard,
                shuffle_seed=shuffle_seed,
            )
            .sample_numbers(12 * step)
            .tolist()
        )

    assert samples(data_parallel) == samples(1)
    if shuffle_seed is None:
        assert samples(1) == sorted(place % size for place in range(12 * step, 12 * step + 12))


def test_after_the_last_sample_comes_the_first() -> None:
    """n = 10 in 4 shards: shard 2 has 2, 6, then 10 = 0."""
    rows = loader(10, global_batch_size=12, local_batch_size=1, data_parallel=4, shard_index=2)
    assert rows.sample_numbers(0).tolist() == [2, 6, 0]


@given(step=st.integers(0, 3), local_batch_size=st.sampled_from([1, 2, 3]), data_parallel=st.sampled_from([1, 2, 4]))
def test_neighbours_are_in_one_micro_batch_for_every_plan(step: int, local_batch_size: int, data_parallel: int) -> None:
    sizes = {"global_batch_size": 24, "local_batch_size": local_batch_size, "data_parallel": data_parallel}
    found = [
        micro_batch
        for shard in range(data_parallel)
        for micro_batch in loader(50, neighbours=True, shard_index=shard, **sizes)
        .sample_numbers(24 * step)
        .reshape(-1, local_batch_size)
        .tolist()
    ]
    samples = [place % 50 for place in range(24 * step, 24 * step + 24)]
    assert sorted(found, key=lambda of: samples.index(of[0])) == [
        samples[first : first + local_batch_size] for first in range(0, 24, local_batch_size)
    ]


def test_shuffling_takes_each_sample_once_in_a_pass_and_otherwise_in_the_next() -> None:
    rows = loader(16, data_parallel=1, shuffle_seed=7)
    passes = [rows.sample_numbers(first).tolist() + rows.sample_numbers(first + 8).tolist() for first in (0, 16)]
    assert [sorted(numbers) for numbers in passes] == [list(range(16))] * 2
    assert passes[0] != passes[1] != list(range(16))
    assert loader(16, data_parallel=1, shuffle_seed=7).sample_numbers(16).tolist() == passes[1][:8]


@pytest.mark.parametrize(
    ("world", "pp", "cp", "tp", "shards"),
    [
        (8, 2, 1, 2, [0, 0, 1, 1, 0, 0, 1, 1]),
        (16, 2, 2, 2, [0, 0, 0, 0, 1, 1, 1, 1, 0, 0, 0, 0, 1, 1, 1, 1]),
        (8, 1, 1, 2, [0, 0, 1, 1, 2, 2, 3, 3]),
    ],
)
def test_pub_data_01_ranks_of_one_pipeline_read_the_same_samples(
    world: int, pp: int, cp: int, tp: int, shards: list[int]
) -> None:
    """PUB-DATA-01: a rank's shard is its place on the batch axis; what it reads is then the shard's alone."""
    data_parallel = world // (pp * cp * tp)
    read = [
        loader(
            global_batch_size=data_parallel, local_batch_size=1, data_parallel=data_parallel,
            shard_index=rank % (world // pp) // tp // cp,
        ).sample_numbers(0).tolist()
        for rank in range(world)
    ]  # fmt: skip
    assert read == [[shard] for shard in shards]


def test_pub_cfg_03_sizes_that_do_not_divide_are_refused() -> None:
    assert len(loader(global_batch_size=24, data_parallel=4).micro_batches(0)) == 3
    with pytest.raises(ValueError, match=r"global_batch_size 20 .* data_parallel 4 · local_batch_size 2 = 8"):
        loader(global_batch_size=20, data_parallel=4)
    with pytest.raises(ValueError, match=r"global_batch_size 8 .* data_parallel 4 · local_batch_size 4 = 16"):
        loader(global_batch_size=8, local_batch_size=4, data_parallel=4)
    with pytest.raises(ValueError, match="shard_index 2"):
        loader(shard_index=2)


def test_one_prefix_without_weight_is_read_as_it_is(tmp_path: Path) -> None:
    """200 tokens in samples of 4: (200 - 1) // 4 = 49 in one pass, 99 in the two that 50 samples take."""
    path = corpus(tmp_path / "a", 7)
    assert len(build_dataset(section(data_path=(path,)), vocab_size=1000)) == 49
    assert len(build_dataset(section(data_path=(path,), sizes=(50, 0, 0)), vocab_size=1000)) == 99
    assert len(build_dataset(section(data_path=(path,)), vocab_size=1000, num_samples=50)) == 99


def test_weights_are_shares_of_the_requested_samples(tmp_path: Path) -> None:
    paths = (3, corpus(tmp_path / "a", 1), "1", corpus(tmp_path / "b", 2))
    dataset = build_dataset(section(data_path=paths, sizes=(8000, 0, 0)), vocab_size=1000)
    assert len(dataset) == 8040
    tokens = [int(dataset[number].input_ids[0]) for number in range(8000)]
    assert (tokens.count(1), tokens.count(2)) == (6000, 2000)


def test_without_weights_shares_follow_the_sizes_of_the_corpora(tmp_path: Path) -> None:
    """9 and 20 documents of 10 tokens: (90 - 1) // 4 = 22 and 49 samples."""
    paths = (corpus(tmp_path / "a", 1, documents=9), corpus(tmp_path / "b", 2))
    dataset = build_dataset(section(data_path=paths, sizes=(1000, 0, 0)), vocab_size=1000)
    tokens = [int(dataset[number].input_ids[0]) for number in range(len(dataset))]
    assert (tokens.count(1), tokens.count(2)) == (22, 49)
    assert len(build_dataset(section(data_path=paths, sizes=(30, 0, 0)), vocab_size=1000)) == 30


def test_each_split_reads_its_own_part_or_its_own_list(tmp_path: Path) -> None:
    first, second = corpus(tmp_path / "a", 1), corpus(tmp_path / "b", 2)
    lists = section(train_data_path=(first,), valid_data_path=(second,), split=None)
    assert build_dataset(lists, vocab_size=1000, split="valid")[0].input_ids.tolist() == [2, 2, 2, 2]
    shared = section(data_path=(first,), split="3, 1")
    assert len(build_dataset(shared, vocab_size=1000)) == (150 - 1) // 4
    assert len(build_dataset(shared, vocab_size=1000, split="valid")) == (50 - 1) // 4


def test_settings_reach_the_samples(tmp_path: Path) -> None:
    with IndexedWriter(tmp_path / "a", vocab_size=10) as writer:
        writer.add_document(np.array([1, 9, 2, 3, 4]))
    options = {
        "data_path": (str(tmp_path / "a"),),
        "eod": 9,
        "eod_mask_loss": True,
        "reset_position_ids": True,
    }
    sample = build_dataset(section(**options), vocab_size=10)[0]
    assert sample.position_ids.tolist() == [0, 1, 0, 1]
    assert sample.loss_mask.tolist() == [1, 0, 1, 1]


@pytest.mark.parametrize(
    ("options", "lengths"),
    [
        ({"create_compressed_eod_mask": True}, [[2, 1, 1], [4]]),
        ({"reset_attention_mask": True}, [[2, 1, 1], [4]]),
        ({}, [[4], [4]]),
    ],
)
def test_documents_are_kept_apart_where_the_file_says_so(
    tmp_path: Path, options: dict[str, bool], lengths: list[list[int]]
) -> None:
    with IndexedWriter(tmp_path / "a", vocab_size=10) as writer:
        writer.add_document(np.array([1, 9, 9, 2, 3, 4, 5, 6, 9]))
    dataset = build_dataset(section(data_path=(str(tmp_path / "a"),), eod=9, **options), vocab_size=10)
    rows = BatchLoader(dataset, global_batch_size=2, local_batch_size=2, data_parallel=1, shard_index=0)
    (batch,) = rows.micro_batches(0)
    first = int(np.flatnonzero(batch.input_ids[:, 0] == 1)[0])
    assert batch.input_ids[[first, 1 - first]].tolist() == [[1, 9, 9, 2], [3, 4, 5, 6]]
    assert [np.diff(batch.mask.row_ends(row), prepend=0).tolist() for row in (first, 1 - first)] == lengths


@pytest.mark.parametrize("field", ["eod_pad_length", "compressed_eod_mask_length"])
def test_more_documents_than_the_width_of_actual_seq_len_are_refused(tmp_path: Path, field: str) -> None:
    with IndexedWriter(tmp_path / "a", vocab_size=10) as writer:
        writer.add_document(np.array([1, 9, 9, 2, 3]))
    options = {"data_path": (str(tmp_path / "a"),), "eod": 9, "create_compressed_eod_mask": True}
    with pytest.raises(UserError, match=r"3 documents, and .* room for 2: write .*eod_pad_length: 3 or more"):
        build_dataset(section(**options, **{field: 2}), vocab_size=10)[0]
    assert (
        len(build_dataset(section(**options, **{field: 128, "eod_pad_length": 3}), vocab_size=10)[0].document_ends) == 3
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"loader": {"type": "HFDataLoader"}}, "type 'HFDataLoader' cannot be read yet"),
        ({"loader": {"datasets_type": None}}, "datasets_type is None: it must be GPTDataset"),
        ({"create_compressed_eod_mask": True}, "create_compressed_eod_mask is true and eod is -1"),
        ({"reset_attention_mask": True}, "reset_attention_mask is true and eod is -1"),
        ({"create_compressed_eod_mask": True, "eod": 1000}, "eod 1000 is no token of model.vocab_size 1000"),
        ({"seq_length": None}, "seq_length is not written"),
        ({"seed": 2**32}, "seed is 4294967296"),
        ({"eod_mask_loss": True}, "eod_mask_loss is true and eod is -1"),
        ({"data_path": None}, "data_path is not written"),
        ({"data_path": ()}, "data_path is empty"),
        ({"split": None}, "split is required with data_path"),
        ({"split": "1, -1, 0"}, "'1, -1, 0': it must be up to 3 numbers ≥ 0"),
        ({"train_data_path": ("x",)}, "train_data_path and data_path are both written"),
        ({"train_data_path": ("x",), "data_path": None}, "train_data_path and split are both written"),
        ({"valid_data_path": ("x",), "data_path": None, "split": None}, "train_data_path is not written"),
        ({"data_path": (1, "x")}, "sizes is not written, and a blend with weights"),
        ({"sizes": (0, 0, 0)}, "asks for 0 samples of train"),
        ({"sizes": (5,)}, "must be 3 numbers of samples"),
        ({"data_path": ("missing",)}, "missing.idx does not exist"),
        ({"split": "0, 1, 0"}, "0 sequences of this split hold no tokens"),
    ],
)
def test_what_cannot_be_read_is_refused_with_the_field(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    path = corpus(tmp_path / "x", 1)
    options = {"data_path": (path,)} | changes
    if options["data_path"] == (1, "x"):
        options["data_path"] = (1, path)
    with pytest.raises(UserError, match=message):
        build_dataset(section(**options), vocab_size=1000)


def test_an_id_outside_the_model_s_vocabulary_is_found_before_training(tmp_path: Path) -> None:
    path = corpus(tmp_path / "a", 300)
    with pytest.raises(UserError, match=r"document 0 .* token id 300, and with model.vocab_size 300"):
        build_dataset(section(data_path=(path,)), vocab_size=300)


@pytest.mark.parametrize(
    ("entries", "expected"),
    [
        (["1", "a"], [("a", 1.0)]),
        ([0.3, "a", 7, "b"], [("a", 0.3), ("b", 7.0)]),
        (["a"], [("a", None)]),
        (["a", "b"], [("a", None), ("b", None)]),
    ],
)
def test_blends_are_read_with_and_without_weights(entries: list[Any], expected: list[tuple[str, float | None]]) -> None:
    assert [(source.prefix, source.weight) for source in parse_blend(entries)] == expected


@pytest.mark.parametrize("entries", [[1, "a", "b"], [1, "a", "b", "c"], [0, "a"], [-1, "a"], ["nan", "a"]])
def test_mixed_and_senseless_weights_are_refused(entries: list[Any]) -> None:
    with pytest.raises(UserError, match="data_path"):
        parse_blend(entries)


@pytest.mark.parametrize(
    ("text", "train", "valid"),
    [
        ("1, 0, 0", (0, 1), (1, 1)),
        ("969,30,1", (0, 0.969), (0.969, 0.999)),
        ("3/1", (0, 0.75), (0.75, 1)),
        ("1 1 2", (0, 0.25), (0.25, 0.5)),
        ("[.5, .5]", (0, 0.5), (0.5, 1)),
    ],
)
def test_splits_are_fractions(text: str, train: tuple[float, float], valid: tuple[float, float]) -> None:
    assert parse_split(text)[:2] == (pytest.approx(train), pytest.approx(valid))


@pytest.mark.parametrize("text", ["", "a", "0, 0, 0", "1, 2, 3, 4", "1, nan", "inf", "1,,2"])
def test_other_splits_are_refused(text: str) -> None:
    with pytest.raises(UserError, match="split"):
        parse_split(text)
