"""What MindFormers calls the weights of a model that have Hugging Face's names here.

Names are those of MindFormers 2.0.0: of its dynamic-graph models (`pynative/transformers`, `pynative/base_models`), and
of its static-graph ones (`weight_mapping` in `models/*/utils.py`) where they differ. It fuses what are several weights
here, so that one of its names may stand for three.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from types import MappingProxyType

_OF_MODEL: Mapping[str, str] = MappingProxyType(
    {
        "model.embed_tokens": "embedding.word_embeddings",
        "model.norm": "decoder.final_layernorm",
        "lm_head": "output_layer",
    }
)

_OF_FEED_FORWARD = {
    "gate_proj": ("linear_fc1", "gating"),
    "up_proj": ("linear_fc1", "hidden"),
    "down_proj": ("linear_fc2",),
}

_OF_LAYER: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "post_attention_layernorm": ("pre_mlp_layernorm",),
        "self_attn.q_proj": ("self_attention.linear_qkv", "self_attention.linear_q"),
        "self_attn.k_proj": ("self_attention.linear_qkv", "self_attention.linear_k"),
        "self_attn.v_proj": ("self_attention.linear_qkv", "self_attention.linear_v"),
        "self_attn.q_norm": ("self_attention.q_layernorm",),
        "self_attn.k_norm": ("self_attention.k_layernorm",),
        "self_attn.q_a_proj": ("self_attention.linear_qkv", "self_attention.linear_q_down_proj"),
        "self_attn.q_a_layernorm": ("self_attention.q_layernorm",),
        "self_attn.q_b_proj": ("self_attention.linear_qb", "self_attention.linear_q_up_proj"),
        "self_attn.kv_a_proj_with_mqa": ("self_attention.linear_qkv", "self_attention.linear_kv_down_proj"),
        "self_attn.kv_a_layernorm": ("self_attention.k_layernorm", "self_attention.kv_layernorm"),
        "self_attn.kv_b_proj": ("self_attention.linear_kvb", "self_attention.linear_kv_up_proj"),
        "self_attn.o_proj": ("self_attention.linear_proj",),
        "mlp.gate": ("mlp.router",),
        "mlp.experts.gate_up_proj": ("mlp.experts.weight1",),
        "mlp.experts.down_proj": ("mlp.experts.weight2",),
        **{f"mlp.{ours}": tuple(f"mlp.{its}" for its in theirs) for ours, theirs in _OF_FEED_FORWARD.items()},
        **{
            f"mlp.shared_experts.{ours}": tuple(f"mlp.shared_experts.{its}" for its in theirs)
            for ours, theirs in _OF_FEED_FORWARD.items()
        },
    }
)
"""Of a layer's weights, without `weight` or `bias` at the end. What is missing is called the same."""

_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+?)(\.weight|\.bias)?")
_KIND = re.compile(r"\.(weight|bias)$")


def mindformers_names(names: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """By the name of each weight of a model those that MindFormers has for it."""
    every = tuple(names)
    further = {match[1] for name in every if (match := re.fullmatch(r"model\.layers\.(\d+)\.enorm\.weight", name))}
    return {name: tuple(_named(name, further)) for name in every}


def _named(name: str, further: set[str]) -> Iterable[str]:
    """further: numbers of the layers that predict one token further ahead."""
    match = _LAYER.fullmatch(name)
    if match is None:
        kind = _KIND.search(name)
        end = kind[0] if kind else ""
        stem = name.removesuffix(end)
        theirs = [f"{_OF_MODEL.get(stem, stem)}{end}"]
    else:
        number, inner, end = match[1], match[2], match[3] or ""
        parts = [f"{part}{end}" for part in _OF_LAYER.get(inner, (inner,))]
        theirs = _further(parts) if number in further else [f"decoder.layers.{number}.{part}" for part in parts]
    for each in theirs:
        yield from (each, f"model.{each}")  # the model for training holds the model proper under that name


def _further(parts: list[str]) -> list[str]:
    """Of the one layer that predicts further: what is not its block's lies beside it."""
    beside = ("enorm.", "hnorm.", "eh_proj.")
    return [
        f"mtp.layers.0.{part}"
        if part.startswith(beside)
        else "mtp.layers.0.final_layernorm.weight"
        if part == "shared_head.norm.weight"
        else f"mtp.layers.0.transformer_layer.{part}"
        for part in parts
    ]
