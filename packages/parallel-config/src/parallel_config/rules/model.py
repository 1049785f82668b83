"""The model by itself: options that exclude each other."""

from __future__ import annotations

from collections.abc import Iterator

from parallel_config.problems import Edit, Problem
from parallel_config.rules.degrees import set_each
from parallel_config.rules.engine import Facts, rule
from parallel_config.schema.model import MODEL_DEFAULTS

_MAY_BE_NULL = ("q_lora_rank", "pad_token_id")
"""Null means: queries are not projected through a low rank; nothing is padded."""


@rule("model")
def no_value(facts: Facts) -> Iterator[Problem]:
    """A field with a default is not null, unless null says something."""
    model = facts.model
    for name, default in MODEL_DEFAULTS.get(model.model_type or "", {}).items():
        path = f"model.{name}"
        if name in _MAY_BE_NULL or getattr(model, name) is not None or not facts.wrote(path):
            continue
        yield facts.problem(
            path,
            "must not be null",
            f"Remove it for the default of model_type {model.model_type}, {default}.",
            fixes=[(Edit(path, action="remove"),), (Edit(path, default),)],
        )


@rule("model.use_flash_attention", "model.use_attn_mask_compression", "model.use_eod_attn_mask_compression")
def compression_needs_flash(facts: Facts) -> Iterator[Problem]:
    """Only flash attention reads compressed masks."""
    model, path = facts.model, "model.use_flash_attention"
    compressed = [
        name for name in ("use_attn_mask_compression", "use_eod_attn_mask_compression") if getattr(model, name)
    ]
    if model.use_flash_attention is False and compressed:
        yield facts.problem(
            path,
            f"must be true with {' and '.join(compressed)} true",
            "Write true, or switch the compression off.",
            fixes=set_each(path, [True]),
        )


@rule("model.chunk_loss_num", "model.calculate_per_token_loss")
def chunked_loss(facts: Facts) -> Iterator[Problem]:
    """A chunked loss is not also computed for each token."""
    chunks, path = facts.model.chunk_loss_num, "model.chunk_loss_num"
    if chunks is not None and chunks > 1 and facts.model.calculate_per_token_loss:
        yield facts.problem(
            path,
            "must be 0 or 1 with calculate_per_token_loss true",
            "Use 0, or calculate_per_token_loss false.",
            fixes=[*set_each(path, [0]), *set_each("model.calculate_per_token_loss", [False])],
        )


@rule("model.first_k_dense_replace", "model.moe_layer_freq")
def leading_dense_layers(facts: Facts) -> Iterator[Problem]:
    """Dense leading layers and a spacing of MoE layers are two ways to say one thing."""
    dense, spacing, path = (
        facts.model.first_k_dense_replace,
        facts.model.moe_layer_freq,
        "model.moe_layer_freq",
    )
    if dense and spacing is not None and spacing > 1:
        yield facts.problem(
            path,
            f"must be 1 with first_k_dense_replace {dense} > 0",
            "Use 1, or first_k_dense_replace 0.",
            fixes=[*set_each(path, [1]), *set_each("model.first_k_dense_replace", [0])],
        )


RULES = (no_value, compression_needs_flash, chunked_loss, leading_dense_layers)
