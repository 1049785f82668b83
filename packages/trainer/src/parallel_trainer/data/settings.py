"""A section's `dataloader`, of training or evaluation, checked and made ready for the data classes."""

from __future__ import annotations

import itertools
import re
from typing import Any, Literal

import numpy as np
from attrs import field, frozen
from attrs.validators import ge

from parallel_trainer.errors import UserError

Split = Literal["train", "valid", "test"]
SPLITS: tuple[Split, ...] = ("train", "valid", "test")
WHOLE = (0.0, 1.0)
TRAIN = "train_dataset.dataloader"


@frozen(kw_only=True)
class SampleSettings:
    """How a corpus is cut into samples and what a sample looks like. Token ids of -1 mean: no such token.

    seq_length: tokens that the model reads in one sample, S.
    seed:       of the shuffles of sequences and samples.
    eod, pad:   ids of the tokens that end a document and that fill up a short sample.
    extra_token: S + 1 tokens are read, so that the last place has a label as well.
    eod_mask_loss: the prediction made at an end of a document does not count.
    reset_position_ids: positions start again after each end of a document.
    separate_documents: a token sees no token of another document.
    max_documents: most documents that a sample may have where they are separated; None: any number.
    keep_partial: a last sample with fewer tokens is kept and filled up with `pad`.
    """

    seq_length: int = field(validator=ge(1))
    seed: int = 1234
    eod: int = -1
    pad: int = -1
    extra_token: bool = True
    eod_mask_loss: bool = False
    reset_position_ids: bool = False
    separate_documents: bool = False
    max_documents: int | None = None
    keep_partial: bool = False

    @property
    def filler(self) -> int:
        """What stands in places that are filled up until `make_sample` masks them: `pad`, or -1 where that is `eod`.

        Ends of documents are then not taken for padding.
        """
        return -1 if self.pad == self.eod else self.pad


@frozen
class Source:
    """One corpus of a blend: its prefix and its weight as written, None where weights are left out."""

    prefix: str
    weight: float | None


def sample_settings(dataloader: Any, *, split: Split = "train", path: str = TRAIN) -> SampleSettings:
    """Settings of a `dataloader` section of a configuration, at `path`. Raises UserError for what cannot be done."""
    check_loader(dataloader, path)
    config = dataloader.config
    if config.seq_length is None:
        raise UserError(f"{path}.config.seq_length is not written: give the model's seq_length")
    if not 0 <= config.seed < 2**32:
        raise UserError(f"{path}.config.seed is {config.seed}: it must be 0 … {2**32 - 1}")
    for switch in ("eod_mask_loss", "reset_position_ids", "reset_attention_mask", "create_compressed_eod_mask"):
        if getattr(config, switch) and config.eod < 0:
            raise UserError(
                f"{path}.config.{switch} is true and eod is {config.eod}: without the id of the token that ends a "
                f"document it would do nothing. Write eod (256 for the byte tokenizer), or {switch}: false"
            )
    return SampleSettings(
        seq_length=config.seq_length,
        seed=config.seed,
        eod=config.eod,
        pad=config.pad,
        extra_token=config.add_extra_token_to_sequence,
        eod_mask_loss=config.eod_mask_loss,
        reset_position_ids=config.reset_position_ids,
        # The dense mask that a file may ask for says the same as the compressed one, and is never built.
        separate_documents=config.create_compressed_eod_mask or config.reset_attention_mask,
        max_documents=config.actual_seq_len_width if config.create_compressed_eod_mask else None,
        keep_partial=split == "valid" and not config.drop_last_partial_validation_sequence,
    )


def check_loader(dataloader: Any, path: str = TRAIN) -> None:
    """Refuse a `dataloader` section of a type that is not read here."""
    if dataloader.type != "BlendedMegatronDatasetDataLoader":
        raise UserError(
            f"{path}.type {dataloader.type!r} cannot be read yet: "
            "BlendedMegatronDatasetDataLoader, with datasets_type GPTDataset, is what exists. "
            "`parallel-train data build` writes a corpus for it"
        )
    if dataloader.datasets_type != "GPTDataset":
        raise UserError(f"{path}.datasets_type is {dataloader.datasets_type!r}: it must be GPTDataset")


def sources(
    config: Any, *, split: Split = "train", path: str = TRAIN
) -> tuple[tuple[Source, ...], tuple[float, float]]:
    """The corpora to blend, and the part (low, high) of each that belongs to `split`, as fractions.

    config: of the `dataloader` at `path`.
    """
    own = getattr(config, f"{split}_data_path")
    lists = [f"{name}_data_path" for name in SPLITS if getattr(config, f"{name}_data_path") is not None]
    if lists and (config.data_path is not None or config.split is not None):
        other = "data_path" if config.data_path is not None else "split"
        raise UserError(
            f"{path}.config.{lists[0]} and {other} are both written: give one list for each split, or data_path with "
            "split"
        )
    if lists:
        if own is None:
            raise UserError(f"{path}.config.{split}_data_path is not written, only {', '.join(lists)}: add it")
        return parse_blend(own, f"{path}.config.{split}_data_path"), WHOLE
    if config.data_path is None:
        raise UserError(
            f"{path}.config.data_path is not written: list the prefix of a corpus made by `parallel-train data "
            "build` (mock data, which MindFormers makes up in this case, is not available)"
        )
    if config.split is None:
        raise UserError(f'{path}.config.split is required with data_path: write "1, 0, 0" to train on all of it')
    return parse_blend(config.data_path, f"{path}.config.data_path"), parse_split(config.split, f"{path}.config.split")[
        SPLITS.index(split)
    ]


def parse_blend(entries: Any, name: str = "data_path") -> tuple[Source, ...]:
    """`[weight, prefix, weight, prefix, …]` or `[prefix, prefix, …]` as sources, weights as written."""
    entries = list(entries)
    if not entries:
        raise UserError(f"{name} is empty: list at least one prefix")
    weights = [_number(entry) for entry in entries[::2]]
    if len(entries) % 2 == 0 and all(weight is not None for weight in weights):
        blend = tuple(Source(str(prefix), weight) for prefix, weight in zip(entries[1::2], weights, strict=True))
    else:
        numbers = [entry for entry in entries if _number(entry) is not None]
        if numbers:
            raise UserError(
                f"{name} {entries} mixes prefixes with the number {numbers[0]}: give every prefix a weight "
                "before it, as [0.7, first, 0.3, second], or none of them"
            )
        blend = tuple(Source(str(prefix), None) for prefix in entries)
    for source in blend:
        if source.weight is not None and not 0 < source.weight < float("inf"):
            raise UserError(
                f"{name}: the weight {source.weight:g} of {source.prefix} must be more than 0 and finite; "
                "leave out a corpus that is not to be read"
            )
    return blend


def parse_split(text: str, name: str = "split") -> tuple[tuple[float, float], ...]:
    """`"969, 30, 1"` as the fractions (low, high) of train, valid and test. Missing numbers are 0."""
    parts = re.split(r"\s*[,/]\s*|\s+", text.strip().strip("[]()").strip())
    numbers = [_number(part) for part in parts]
    if (
        len(parts) > len(SPLITS)
        or any(number is None or not 0 <= number < float("inf") for number in numbers)
        or not sum(number or 0.0 for number in numbers)
    ):
        raise UserError(
            f'{name} {text!r}: it must be up to 3 numbers ≥ 0, not all 0, for train, valid and test, such as "98, 1, 1"'
        )
    padded = np.asarray([number or 0.0 for number in numbers] + [0.0] * (len(SPLITS) - len(parts)))
    fractions = (padded / padded.sum()).tolist()
    bounds = [0.0]
    for fraction in fractions:
        bounds.append(bounds[-1] + fraction)
    return tuple(itertools.pairwise(bounds))


def _number(entry: Any) -> float | None:
    try:
        return float(entry)
    except (TypeError, ValueError):
        return None
