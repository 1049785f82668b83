"""The sections `train_dataset` and `eval_dataset`: which samples are read, in what form."""

from __future__ import annotations

from typing import Any

from attrs import Factory, frozen

from parallel_config.schema.setting import NOWHERE, PathText, setting

LOADERS = ("BlendedMegatronDatasetDataLoader", "HFDataLoader", "MindDataset", "OrderedIndexDataLoader")


@frozen
class DataloaderConfig:
    """What a GPTDataset reads and how it masks. Token ids of -1 mean that there is no such token."""

    data_path: tuple[PathText | int | float, ...] | None = setting(
        None, about="Prefixes of .bin/.idx pairs, or weights and prefixes in turn."
    )
    train_data_path: tuple[PathText | int | float, ...] | None = setting(
        None, about="The same for the split of training alone."
    )
    valid_data_path: tuple[PathText | int | float, ...] | None = setting(
        None, about="The same for the split of evaluation alone."
    )
    test_data_path: tuple[PathText | int | float, ...] | None = setting(
        None, about="The same for the split of tests alone."
    )
    split: str | None = setting(
        None, about="How documents are shared out to training, evaluation and tests: three weights."
    )
    seq_length: int | None = setting(None, minimum=1, about="Tokens of a sample.")
    seed: int = setting(1234, minimum=0, about="Where the order of documents and samples comes from.")
    eod: int = setting(-1, minimum=-1, about="The token that ends a document; -1: none.")
    pad: int = setting(-1, minimum=-1, about="The token that fills a sample; -1: none.")
    eod_mask_loss: bool = setting(False, about="Do not learn what follows the end of a document.")
    reset_position_ids: bool = setting(False, about="Count positions from 0 in each document.")
    reset_attention_mask: bool = setting(False, about="Keep documents apart in the dense mask.")
    create_attention_mask: bool = setting(True, about="Make a dense mask; it is held compressed here in any case.")
    create_compressed_eod_mask: bool = setting(False, about="Keep documents apart by a compressed mask.")
    eod_pad_length: int | None = setting(None, minimum=1, about="Documents that a sample has room for.")
    compressed_eod_mask_length: int | None = setting(None, minimum=1, about="The older name of eod_pad_length.")
    add_extra_token_to_sequence: bool = setting(
        True, about="Read one token more than seq_length, so that each token has a label."
    )
    drop_last_partial_validation_sequence: bool = setting(
        True, about="Leave out the last sample of an evaluation if it is not full."
    )
    num_dataset_builder_threads: int = setting(1, minimum=1, about="Threads that build the sample index.", acts=NOWHERE)
    path_to_cache: PathText | None = setting(None, about="Folder of built sample indices.", acts=NOWHERE)
    mmap_bin_files: bool | None = setting(None, about="Map .bin files into memory; they always are here.", acts=NOWHERE)
    extra: dict[str, Any] = Factory(dict)

    @property
    def actual_seq_len_width(self) -> int:
        """Documents that a sample has room for: `eod_pad_length`, the older `compressed_eod_mask_length`, or 128."""
        return self.eod_pad_length or self.compressed_eod_mask_length or 128


@frozen
class Dataloader:
    """Where samples come from. The three mask fields after `config` are those of HFDataLoader."""

    type: str | None = setting(
        None, options=LOADERS, about="Which loader; BlendedMegatronDatasetDataLoader alone is implemented."
    )
    shuffle: bool = setting(False, about="Draw samples in another order each epoch, on top of the dataset's own order.")
    column_names: tuple[str, ...] = setting(("input_ids", "labels"), about="Columns of a sample.")
    python_multiprocessing: bool = setting(False, about="Load samples in processes.", acts=NOWHERE)
    datasets_type: str | None = setting(None, options=("GPTDataset",), about="Which dataset: GPTDataset.")
    sizes: tuple[int, ...] | None = setting(None, about="Samples of training, evaluation and tests.")
    config: DataloaderConfig = Factory(DataloaderConfig)
    create_attention_mask: bool = setting(False, about="The same for HFDataLoader.", acts=NOWHERE)
    create_compressed_eod_mask: bool = setting(False, about="The same for HFDataLoader.", acts=NOWHERE)
    compressed_eod_mask_length: int = setting(128, minimum=1, about="The same for HFDataLoader.", acts=NOWHERE)
    extra: dict[str, Any] = Factory(dict)


@frozen
class TrainDataset:
    """The training data and how it is fed to the ranks."""

    dataloader: Dataloader = Factory(Dataloader)
    drop_remainder: bool = setting(True, about="Leave out a last batch that is not full.", acts=NOWHERE)
    num_parallel_workers: int = setting(8, minimum=1, about="Threads of MindSpore's dataset engine.", acts=NOWHERE)
    prefetch_size: int = setting(
        1, minimum=1, about="Batches that MindSpore's dataset engine reads ahead.", acts=NOWHERE
    )
    numa_enable: bool = setting(False, about="Bind the dataset engine to a NUMA node.", acts=NOWHERE)
    use_distribute_dataset: bool = setting(
        False, about="Read on one rank and send to those with the same samples.", acts=NOWHERE
    )
    balance_enabled: bool = setting(False, about="Give ranks equally much attention to compute.", acts=NOWHERE)


@frozen
class EvalDataset(TrainDataset):
    """Held-out data whose loss is measured during training: an extension, shaped like `train_dataset`.

    Where `dataloader` is left out it is that of the training data; either way its samples are those of the split
    `valid`. `interval` are the steps between two evaluations, and there is one after the last step. `samples` says how
    many are taken; where it is left out, the second number of `sizes` does, and where that is 0 or left out, all are.
    """

    interval: int | None = setting(None, minimum=1, about="Steps between two evaluations.")
    samples: int | None = setting(
        None, minimum=1, about="Samples that an evaluation takes; null: as sizes says, or all."
    )
