"""The training data: sources, splits and columns of a GPTDataset."""

from __future__ import annotations

import re
from collections.abc import Iterator

from parallel_config.problems import Edit, Problem
from parallel_config.rules.degrees import set_each
from parallel_config.rules.engine import Facts, rule
from parallel_config.schema import Dataloader, DataloaderConfig

_LOADER = "train_dataset.dataloader."
_CONFIG = _LOADER + "config."
GPT_COLUMNS = ("input_ids", "labels", "loss_mask", "position_ids")
"""What a GPTDataset yields, in this order, before the column of its mask."""

_PER_SPLIT = ("train_data_path", "valid_data_path", "test_data_path")
_WEIGHT = r"\s*(?:\d+\.?\d*|\.\d+)\s*"
_WEIGHTS = re.compile(f"{_WEIGHT}(?:,{_WEIGHT})*")


def _megatron(facts: Facts) -> Dataloader | None:
    loader = facts.config.train_dataset.dataloader
    return loader if loader.type == "BlendedMegatronDatasetDataLoader" else None


@rule(_LOADER + "type", _LOADER + "datasets_type", _LOADER + "sizes", _LOADER + "config")
def gpt_dataset(facts: Facts) -> Iterator[Problem]:
    """This loader is told the dataset's type, three sample counts and the dataset's configuration."""
    loader = _megatron(facts)
    if loader is None:
        return
    if loader.datasets_type is None:
        yield facts.problem(
            _LOADER + "datasets_type",
            f"is required with type {loader.type}",
            "Write datasets_type: GPTDataset.",
            fixes=set_each(_LOADER + "datasets_type", ["GPTDataset"]),
        )
    sizes = loader.sizes
    if sizes is None or len(sizes) != 3 or min(sizes) < 0:
        yield facts.problem(
            _LOADER + "sizes",
            "must be three sample counts ≥ 0: train, valid, test",
            "Write, for example, sizes: [8000, 0, 0].",
            value=None if sizes is None else list(sizes),
            fixes=set_each(_LOADER + "sizes", [[8000, 0, 0]]),
        )
    if not facts.wrote(_LOADER + "config"):
        length = facts.model.seq_length or 4096
        yield facts.problem(
            _LOADER + "config",
            f"is required with type {loader.type}",
            f"Write at least config: {{seq_length: {length}}}.",
            value=None,
            fixes=set_each(_LOADER + "config", [{"seq_length": length}]),
        )


@rule(_LOADER + "config", *(_CONFIG + name for name in ("data_path", "split", *_PER_SPLIT)))
def sources(facts: Facts) -> Iterator[Problem]:
    """`data_path` comes with `split`; lists for each split replace both."""
    data = facts.config.train_dataset.dataloader.config
    per_split = [name for name in _PER_SPLIT if getattr(data, name) is not None]
    if data.data_path is not None and per_split:
        yield facts.problem(
            _CONFIG + "data_path",
            f"excludes {', '.join(per_split)}",
            "Keep data_path with split, or the lists for each split.",
            value=list(data.data_path),
            fixes=[
                tuple(Edit(_CONFIG + name, action="remove") for name in per_split),
                (Edit(_CONFIG + "data_path", action="remove"),)
                + ((Edit(_CONFIG + "split", action="remove"),) if data.split is not None else ()),
            ],
        )
    elif data.split is not None and per_split:
        yield facts.problem(
            _CONFIG + "split",
            f"excludes {', '.join(per_split)}",
            "Remove split: the lists say it.",
            fixes=[(Edit(_CONFIG + "split", action="remove"),)],
        )
    elif data.data_path is not None and data.split is None:
        yield facts.problem(
            _CONFIG + "split",
            "is required with data_path",
            'Write, for example, split: "1, 0, 0".',
            fixes=set_each(_CONFIG + "split", ["1, 0, 0"]),
        )
    yield from _blends(facts, data)
    yield from _split_weights(facts, data.split)


def _blends(facts: Facts, data: DataloaderConfig) -> Iterator[Problem]:
    for name in ("data_path", *_PER_SPLIT):
        entries, path = getattr(data, name), _CONFIG + name
        if entries is None:
            continue
        weights = [_is_number(entry) for entry in entries]
        if not entries:
            rule_text, instead = "must not be empty", None
        elif not any(weights) or (len(entries) % 2 == 0 and weights == [True, False] * (len(entries) // 2)):
            continue
        else:
            rule_text = "must be prefixes only, or pairs of a weight and a prefix: weight, prefix, weight, prefix"
            instead = [entry for entry, weight in zip(entries, weights, strict=True) if not weight] or None
        yield facts.problem(
            path,
            rule_text,
            f'Write, for example, {name}: ["1", corpus/text_document].',
            value=list(entries),
            fixes=[(Edit(path, instead if instead else ["1", "corpus/text_document"]),)],
        )


def _is_number(entry: object) -> bool:
    try:
        float(str(entry))
    except ValueError:
        return False
    return True


def _split_weights(facts: Facts, split: str | None) -> Iterator[Problem]:
    if split is None:
        return
    weights = [float(weight) for weight in split.split(",")] if _WEIGHTS.fullmatch(split) else []
    if 1 <= len(weights) <= 3 and sum(weights) > 0:
        return
    yield facts.problem(
        _CONFIG + "split",
        "must be up to three weights ≥ 0 for train, valid and test, not all 0",
        'Write, for example, split: "1, 0, 0".',
        fixes=set_each(_CONFIG + "split", ["1, 0, 0"]),
    )


@rule(_CONFIG + "seq_length", "model.seq_length")
def same_length(facts: Facts) -> Iterator[Problem]:
    """The dataset cuts samples as long as the model's sequence."""
    data, model, path = facts.value(_CONFIG + "seq_length"), facts.model.seq_length, _CONFIG + "seq_length"
    if data is None or model is None or data == model:
        return
    default = "" if facts.wrote("model.seq_length") else f", the default of {facts.model.model_type}"
    yield facts.problem(
        path,
        f"must equal model.seq_length {model}{default}",
        f"Use {model} here, or {data} in model.",
        fixes=[*set_each(path, [model]), *set_each("model.seq_length", [data])],
    )


@rule(
    _LOADER + "type",
    _LOADER + "column_names",
    _CONFIG + "create_attention_mask",
    _CONFIG + "create_compressed_eod_mask",
)
def columns(facts: Facts) -> Iterator[Problem]:
    """Written column names are those that a GPTDataset yields, in its order."""
    loader, path = _megatron(facts), _LOADER + "column_names"
    if loader is None or not facts.wrote(path):
        return
    expected = list(GPT_COLUMNS)
    if loader.config.create_compressed_eod_mask:
        expected.append("actual_seq_len")
        reason = "create_compressed_eod_mask is true"
    elif loader.config.create_attention_mask:
        expected.append("attention_mask")
        reason = "create_attention_mask is true"
    else:
        reason = "no mask column is made"
    if list(loader.column_names) == expected:
        return
    yield facts.problem(
        path,
        f"must be the columns of a GPTDataset, in order: [{', '.join(expected)}] ({reason})",
        "Write this list, or change the mask fields of config.",
        value=list(loader.column_names),
        fixes=set_each(path, [expected]),
    )


RULES = (gpt_dataset, sources, same_length, columns)
