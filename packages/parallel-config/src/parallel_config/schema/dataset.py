"""The sections `train_dataset` and `eval_dataset`: which samples are read, in what form."""

from __future__ import annotations

from typing import Any

from attrs import Factory, frozen

from parallel_config.schema.setting import setting

LOADERS = ("BlendedMegatronDatasetDataLoader", "HFDataLoader", "MindDataset", "OrderedIndexDataLoader")


@frozen
class DataloaderConfig:
    """What a GPTDataset reads and how it masks. Token ids of -1 mean that there is no such token."""

    data_path: tuple[str | int | float, ...] | None = None
    train_data_path: tuple[str | int | float, ...] | None = None
    valid_data_path: tuple[str | int | float, ...] | None = None
    test_data_path: tuple[str | int | float, ...] | None = None
    split: str | None = None
    seq_length: int | None = setting(None, minimum=1)
    seed: int = setting(1234, minimum=0)
    eod: int = setting(-1, minimum=-1)
    pad: int = setting(-1, minimum=-1)
    eod_mask_loss: bool = False
    reset_position_ids: bool = False
    reset_attention_mask: bool = False
    create_attention_mask: bool = True
    create_compressed_eod_mask: bool = False
    eod_pad_length: int | None = setting(None, minimum=1)
    compressed_eod_mask_length: int | None = setting(None, minimum=1)
    add_extra_token_to_sequence: bool = True
    drop_last_partial_validation_sequence: bool = True
    num_dataset_builder_threads: int = setting(1, minimum=1)
    path_to_cache: str | None = None
    mmap_bin_files: bool | None = None
    extra: dict[str, Any] = Factory(dict)

    @property
    def actual_seq_len_width(self) -> int:
        """Documents that a sample has room for: `eod_pad_length`, the older `compressed_eod_mask_length`, or 128."""
        return self.eod_pad_length or self.compressed_eod_mask_length or 128


@frozen
class Dataloader:
    """Where samples come from. The three mask fields after `config` are those of HFDataLoader."""

    type: str | None = setting(None, options=LOADERS)
    shuffle: bool = False
    column_names: tuple[str, ...] = ("input_ids", "labels")
    python_multiprocessing: bool = False
    datasets_type: str | None = setting(None, options=("GPTDataset",))
    sizes: tuple[int, ...] | None = None
    config: DataloaderConfig = Factory(DataloaderConfig)
    create_attention_mask: bool = False
    create_compressed_eod_mask: bool = False
    compressed_eod_mask_length: int = setting(128, minimum=1)
    extra: dict[str, Any] = Factory(dict)


@frozen
class TrainDataset:
    """The training data and how it is fed to the ranks."""

    dataloader: Dataloader = Factory(Dataloader)
    drop_remainder: bool = True
    num_parallel_workers: int = setting(8, minimum=1)
    prefetch_size: int = setting(1, minimum=1)
    numa_enable: bool = False
    use_distribute_dataset: bool = False
    balance_enabled: bool = False


@frozen
class EvalDataset(TrainDataset):
    """Held-out data whose loss is measured during training: an extension, shaped like `train_dataset`.

    Where `dataloader` is left out it is that of the training data; either way its samples are those of the split
    `valid`. `interval` are the steps between two evaluations, and there is one after the last step. `samples` says how
    many are taken; where it is left out, the second number of `sizes` does, and where that is 0 or left out, all are.
    """

    interval: int | None = setting(None, minimum=1)
    samples: int | None = setting(None, minimum=1)
