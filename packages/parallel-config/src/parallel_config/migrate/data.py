"""The data to train on: `train_dataset`, whose loader both formats have in common.

Sources, in the mindformers 2.1.0 wheel: trainer/base_trainer.py (`_get_columns_with_strategy`: which columns a dataset
has where the file does not say), pynative/config/config.py (`TrainDatasetConfig`, `DataloaderConfig`).
"""

from __future__ import annotations

from parallel_config.migrate.draft import Draft, Kind
from parallel_config.rules.dataset import GPT_COLUMNS

_SECTION = "train_dataset"
_LOADER = f"{_SECTION}.data_loader"
_FEEDING = ("drop_remainder", "num_parallel_workers", "prefetch_size", "numa_enable")
_ONLY_GRAPH = ("use_broadcast_data",)


def data(draft: Draft) -> None:
    """Carry the loader as it is, and how it is fed to the ranks."""
    if not draft.has(f"{_LOADER}.type"):
        draft.refuse(_LOADER, "does not say what to train on", "Write the data loader into the old file first.")
        return
    for path in draft.keys(_LOADER):
        name = path.removeprefix(f"{_LOADER}.")
        if name == "config" and draft.keys(path):
            fields = {inner.removeprefix(f"{path}."): inner for inner in draft.keys(path)}
            for field, inner in sorted(fields.items(), key=lambda item: "." not in item[0]):
                if "." in field:
                    draft.leave(inner, "no loader has a field with a dot in its name", Kind.TRAINED)
                else:
                    draft.carry(inner, f"train_dataset.dataloader.config.{field}", draft.get(inner))
        elif name not in _ONLY_GRAPH and draft.has(path):
            draft.carry(path, f"train_dataset.dataloader.{name}", draft.get(path))
    worker = f"{_SECTION}.python_multiprocessing"
    draft.carry(worker, "train_dataset.dataloader.python_multiprocessing", draft.get(worker))
    for name in _FEEDING:
        draft.carry(f"{_SECTION}.{name}", f"train_dataset.{name}", draft.get(f"{_SECTION}.{name}"))
    _columns(draft)
    draft.leave("train_dataset_task", "MindFormers too takes train_dataset instead")


def _columns(draft: Draft) -> None:
    path, megatron = f"{_SECTION}.input_columns", draft.get(f"{_LOADER}.type") == "BlendedMegatronDatasetDataLoader"
    masks = f"{_LOADER}.config" if megatron else _LOADER
    columns = list(GPT_COLUMNS)
    if draft.switch(f"{masks}.create_compressed_eod_mask", False):
        columns.append("actual_seq_len")
    elif draft.switch(f"{masks}.create_attention_mask", megatron):
        columns.append("attention_mask")
    elif not (megatron or draft.has(path)):
        return
    how = "" if draft.has(path) else "what the dataset yields with these masks"
    draft.carry(path, "train_dataset.dataloader.column_names", draft.get(path, columns), how)
