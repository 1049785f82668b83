"""What context parallelism asks of masks, columns and rotary embedding (specification, section 3.3)."""

from __future__ import annotations

from collections.abc import Iterator

from parallel_config.problems import Edit, Fix, Problem
from parallel_config.rules.dataset import GPT_COLUMNS
from parallel_config.rules.degrees import set_each
from parallel_config.rules.engine import Facts, rule

_CP = "parallelism.context_parallel"
_CAUSAL = "model.use_attn_mask_compression"
_EOD = "model.use_eod_attn_mask_compression"
_LOADER = "train_dataset.dataloader."
_DATA = _LOADER + "config."
_DOCUMENTS = ("reset_position_ids", "reset_attention_mask", "eod_mask_loss")


@rule(_CP, _CAUSAL, _EOD, _DATA + "create_compressed_eod_mask", _LOADER + "type")
def compressed_mask(facts: Facts) -> Iterator[Problem]:
    """cp > 1 needs a compressed attention mask."""
    model, cp = facts.model, facts.parallelism.context_parallel
    compressed = model.use_attn_mask_compression or model.use_eod_attn_mask_compression
    if cp == 1 or compressed or not (facts.wrote("model") or facts.wrote("train_dataset")):
        return
    yield facts.problem(
        _CAUSAL,
        f"must be on: context parallel (context_parallel {cp} > 1) requires a compressed attention mask",
        "Set use_attn_mask_compression: true in model for non-EOD data, or create_compressed_eod_mask: true"
        " with create_attention_mask: false in train_dataset.dataloader.config for EOD data.",
        fixes=[*_compressions(facts), *set_each(_CP, [1])],
    )


def _compressions(facts: Facts) -> list[Fix]:
    """Ways to compress the mask that the data has: causal over the whole sample, or within each document."""
    loader = facts.config.train_dataset.dataloader
    causal: Fix = (Edit(_CAUSAL, True),)
    if loader.type == "HFDataLoader" and loader.create_compressed_eod_mask:
        return [(Edit(_EOD, True),)]
    if loader.type != "BlendedMegatronDatasetDataLoader":
        return [causal]
    within = [Edit(_DATA + "create_compressed_eod_mask", True), Edit(_DATA + "create_attention_mask", False)]
    if facts.wrote(_LOADER + "column_names"):
        within.append(Edit(_LOADER + "column_names", [*GPT_COLUMNS, "actual_seq_len"]))
    if any(getattr(loader.config, name) for name in _DOCUMENTS):
        return [tuple(within)]
    return [causal, tuple(within)] if loader.config.eod >= 0 else [causal]


@rule(
    _CP,
    _LOADER + "type",
    _DATA + "create_compressed_eod_mask",
    _DATA + "create_attention_mask",
    _LOADER + "create_attention_mask",
    decides=(_DATA + "create_attention_mask",),
)
def dense_mask(facts: Facts) -> Iterator[Problem]:
    """cp > 1 takes no dense mask from the dataset: the file must not ask for one."""
    loader, cp = facts.config.train_dataset.dataloader, facts.parallelism.context_parallel
    path, data = _DATA + "create_attention_mask", loader.config
    asked = facts.wrote(path)
    if loader.type == "BlendedMegatronDatasetDataLoader":
        # A compressed mask wins over the dense one that is the default.
        asked = asked or not data.create_compressed_eod_mask
    wanted = {
        path: asked and data.create_attention_mask,
        _LOADER + "create_attention_mask": loader.create_attention_mask,
    }
    for where, dense in wanted.items():
        if cp > 1 and dense:
            yield facts.problem(
                where,
                f"must be false with context_parallel {cp} > 1, which takes compressed masks only",
                "Write false.",
                fixes=set_each(where, [False]),
            )


@rule(_CP, _LOADER + "type", _LOADER + "column_names")
def sharded_columns(facts: Facts) -> Iterator[Problem]:
    """cp > 1 cuts position_ids with the tokens, and takes no attention_mask. (GPTDataset: see `dataset.columns`.)"""
    loader, cp = facts.config.train_dataset.dataloader, facts.parallelism.context_parallel
    names = list(loader.column_names)
    if cp == 1 or loader.type in (None, "BlendedMegatronDatasetDataLoader"):
        return
    if "position_ids" in names and "attention_mask" not in names:
        return
    kept = [name for name in names if name != "attention_mask"]
    instead = kept if "position_ids" in kept else [*kept, "position_ids"]
    yield facts.problem(
        _LOADER + "column_names",
        f"must have position_ids and no attention_mask with context_parallel {cp} > 1",
        f"Write [{', '.join(instead)}].",
        value=names,
        fixes=set_each(_LOADER + "column_names", [instead]),
    )


@rule(_CP, _EOD, "model.apply_rope_fusion")
def fused_rotary_embedding(facts: Facts) -> Iterator[Problem]:
    """The fused rotary embedding knows positions within a cut sequence only from a compressed EOD mask."""
    model, cp = facts.model, facts.parallelism.context_parallel
    if cp == 1 or not model.apply_rope_fusion or model.use_eod_attn_mask_compression:
        return
    yield facts.problem(
        "model.apply_rope_fusion",
        f"must be false with context_parallel {cp} > 1 without EOD mask compression",
        "Write false.",
        fixes=set_each("model.apply_rope_fusion", [False]),
    )


RULES = (compressed_mask, dense_mask, sharded_columns, fused_rotary_embedding)
