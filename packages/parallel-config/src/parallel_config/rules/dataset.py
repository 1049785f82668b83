"""The data to train on and to evaluate: sources, splits and columns of a GPTDataset."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import partial

from parallel_config.problems import Edit, Problem, show
from parallel_config.rules.degrees import set_each
from parallel_config.rules.engine import Facts, Rule, rule
from parallel_config.schema import Dataloader, DataloaderConfig

_TRAIN = "train_dataset.dataloader"
_EVAL = "eval_dataset.dataloader"
GPT_COLUMNS = ("input_ids", "labels", "loss_mask", "position_ids")
"""What a GPTDataset yields, in this order, before the column of its mask."""

_SPLIT = {_TRAIN: "1, 0, 0", _EVAL: "98, 2, 0"}
"""For each section an example."""

_PER_SPLIT = ("train_data_path", "valid_data_path", "test_data_path")
_WEIGHT = r"\s*(?:\d+\.?\d*|\.\d+)\s*"
_WEIGHTS = re.compile(f"{_WEIGHT}(?:,{_WEIGHT})*")


def _megatron(facts: Facts, loader_path: str) -> Dataloader | None:
    loader = facts.value(loader_path)
    return loader if loader.type == "BlendedMegatronDatasetDataLoader" else None


def _gpt_dataset(facts: Facts, loader_path: str) -> Iterator[Problem]:
    """This loader is told the dataset's type, three sample counts and the dataset's configuration."""
    loader = _megatron(facts, loader_path)
    if loader is None:
        return
    if loader.datasets_type is None:
        path = f"{loader_path}.datasets_type"
        yield facts.problem(
            path,
            f"is required with type {loader.type}",
            "Write datasets_type: GPTDataset.",
            fixes=set_each(path, ["GPTDataset"]),
        )
    sizes, path, optional = loader.sizes, f"{loader_path}.sizes", loader_path == _EVAL
    if (sizes is None and not optional) or (sizes is not None and (len(sizes) != 3 or min(sizes) < 0)):
        yield facts.problem(
            path,
            "must be three sample counts ≥ 0: train, valid, test",
            "Write, for example, sizes: [8000, 0, 0].",
            value=None if sizes is None else list(sizes),
            fixes=set_each(path, [[8000, 0, 0]]),
        )
    if not facts.wrote(f"{loader_path}.config"):
        length = facts.model.seq_length or 4096
        path = f"{loader_path}.config"
        yield facts.problem(
            path,
            f"is required with type {loader.type}",
            f"Write at least config: {{seq_length: {length}}}.",
            value=None,
            fixes=set_each(path, [{"seq_length": length}]),
        )


def _sources(facts: Facts, loader_path: str) -> Iterator[Problem]:
    """`data_path` comes with `split`; lists for each split replace both."""
    config = f"{loader_path}.config."
    data = facts.value(loader_path).config
    per_split = [name for name in _PER_SPLIT if getattr(data, name) is not None]
    if data.data_path is not None and per_split:
        yield facts.problem(
            config + "data_path",
            f"excludes {', '.join(per_split)}",
            "Keep data_path with split, or the lists for each split.",
            value=list(data.data_path),
            fixes=[
                tuple(Edit(config + name, action="remove") for name in per_split),
                (Edit(config + "data_path", action="remove"),)
                + ((Edit(config + "split", action="remove"),) if data.split is not None else ()),
            ],
        )
    elif data.split is not None and per_split:
        yield facts.problem(
            config + "split",
            f"excludes {', '.join(per_split)}",
            "Remove split: the lists say it.",
            fixes=[(Edit(config + "split", action="remove"),)],
        )
    elif data.data_path is not None and data.split is None:
        yield facts.problem(
            config + "split",
            "is required with data_path",
            f'Write, for example, split: "{_SPLIT[loader_path]}".',
            fixes=set_each(config + "split", [_SPLIT[loader_path]]),
        )
    yield from _blends(facts, data, config)
    if data.split is not None and not _split_weights(data.split):
        yield facts.problem(
            config + "split",
            "must be up to three weights ≥ 0 for train, valid and test, not all 0",
            f'Write, for example, split: "{_SPLIT[loader_path]}".',
            fixes=set_each(config + "split", [_SPLIT[loader_path]]),
        )


def _blends(facts: Facts, data: DataloaderConfig, config: str) -> Iterator[Problem]:
    for name in ("data_path", *_PER_SPLIT):
        entries, path = getattr(data, name), config + name
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


def _split_weights(split: str) -> list[float]:
    """The weights of train, valid and test, as far as they are written; empty for what is no such list."""
    weights = [float(weight) for weight in split.split(",")] if _WEIGHTS.fullmatch(split) else []
    return weights if len(weights) <= 3 and sum(weights) > 0 else []


@rule(f"{_TRAIN}.config.seq_length", "model.seq_length")
def same_length(facts: Facts) -> Iterator[Problem]:
    """The dataset cuts samples as long as the model's sequence."""
    path = f"{_TRAIN}.config.seq_length"
    data, model = facts.value(path), facts.model.seq_length
    if data is None or model is None or data == model:
        return
    default = "" if facts.wrote("model.seq_length") else f", the default of {facts.model.model_type}"
    yield facts.problem(
        path,
        f"must equal model.seq_length {model}{default}",
        f"Use {model} here, or {data} in model.",
        fixes=[*set_each(path, [model]), *set_each("model.seq_length", [data])],
    )


def _columns(facts: Facts, loader_path: str) -> Iterator[Problem]:
    """Written column names are those that a GPTDataset yields, in its order."""
    loader, path = _megatron(facts, loader_path), f"{loader_path}.column_names"
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


_MASKS = ("create_attention_mask", "create_compressed_eod_mask")
_ALIKE = ("seq_length", *_MASKS, "reset_attention_mask")
"""Of both datasets' configurations: what the model is built for."""


def _of_loader(loader_path: str) -> tuple[Rule, Rule, Rule]:
    """The rules that a section's dataloader keeps by itself."""
    names = [f"{loader_path}.{name}" for name in ("type", "datasets_type", "sizes", "config", "column_names")]
    of_config = [f"{loader_path}.config.{name}" for name in ("data_path", "split", *_PER_SPLIT)]
    masks = [f"{loader_path}.config.{name}" for name in _MASKS]
    return (
        rule(*names[:4])(partial(_gpt_dataset, loader_path=loader_path)),
        rule(names[3], *of_config)(partial(_sources, loader_path=loader_path)),
        rule(names[0], names[4], *masks)(partial(_columns, loader_path=loader_path)),
    )


def _of_both(*names: str) -> Iterator[str]:
    return (f"{loader}.config.{name}" for loader in (_TRAIN, _EVAL) for name in names)


@rule("eval_dataset.samples", *_of_both("data_path", "split", *_PER_SPLIT))
def held_out(facts: Facts) -> Iterator[Problem]:
    """What is evaluated has samples of its own: the split `valid`."""
    own = facts.wrote(_EVAL)
    loader_path = _EVAL if own else _TRAIN
    loader, config = _megatron(facts, loader_path), f"{loader_path}.config."
    if loader is None or not facts.wrote("eval_dataset"):
        return
    data, example = loader.config, ["corpus/valid_text_document"]
    if data.valid_data_path is None and data.data_path is None:
        path = config + "valid_data_path"
        yield facts.problem(
            path,
            "or data_path is required: eval_dataset has nothing to read",
            "Write, for example, valid_data_path: [corpus/valid_text_document], or data_path and split.",
            fixes=set_each(path, [example]),
        )
        return
    weights = _split_weights(data.split) if data.split is not None else []
    if data.valid_data_path is None and weights and not sum(weights[1:2]):
        path = config + "split"
        yield facts.problem(
            path,
            "must have a second number > 0: it is the part that eval_dataset reads",
            f'Write, for example, split: "{_SPLIT[_EVAL]}".',
            fixes=set_each(path, [_SPLIT[_EVAL]]),
        )
    blend = data.data_path if data.valid_data_path is None else data.valid_data_path
    counted = facts.config.eval_dataset.samples is not None or (loader.sizes or (0, 0))[1]
    if blend and _is_number(blend[0]) and not counted:
        path = "eval_dataset.samples"
        yield facts.problem(
            path,
            "is required where corpora have weights: such a mixture has no length of its own",
            "Write, for example, samples: 100; or leave the weights out to take all.",
            fixes=set_each(path, [100]),
        )


@rule(*_of_both(*_ALIKE))
def evaluated_alike(facts: Facts) -> Iterator[Problem]:
    """Samples are as long, and their documents as far apart, as in training: the model is built for these."""
    if not (facts.wrote(_EVAL) and facts.wrote(_TRAIN)):
        return
    for name in _ALIKE:
        path = f"{_EVAL}.config.{name}"
        here, trained = facts.value(path), facts.value(f"{_TRAIN}.config.{name}")
        if here != trained:
            shown = show(trained)
            yield facts.problem(
                path,
                f"must equal that of train_dataset, {shown}",
                f"Write {shown}, or leave eval_dataset.dataloader out to read the training data's valid part.",
                fixes=[*set_each(path, [trained]), (Edit(_EVAL, action="remove"),)],
            )


RULES = (*_of_loader(_TRAIN), same_length, *_of_loader(_EVAL), evaluated_alike, held_out)
