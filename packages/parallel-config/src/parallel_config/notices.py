"""What a file writes without effect, and keys of open sections that are probably misspelt."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from attrs import fields, has

from parallel_config.cautions import cautions
from parallel_config.likeness import most_alike
from parallel_config.paths import join
from parallel_config.problems import show
from parallel_config.schema import Extensions, Parallelism, TrainConfig, written_fields
from parallel_config.schema.setting import is_reserved
from parallel_config.value_types import known_keys

_ONLY_WITH = {
    "pipeline_parallel": (
        "pipeline_parallel_interleave_num",
        "pipeline_parallel_schedule",
        "pipeline_parallel_overlap_p2p",
        "pipeline_parallel_overlap_b_f",
        "pipeline_parallel_zero_bubble",
    ),
    "tensor_parallel": ("enable_mc2", "enable_loss_parallel"),
    "context_parallel": (
        "context_parallel_method",
        "context_parallel_async",
        "context_parallel_order",
        "ulysses_degree_in_cp",
    ),
    "expert_parallel": ("expert_parallel_async_d2h",),
}
"""Fields of `parallelism` that say something only when this degree is above 1."""

_SURELY_MISSPELT = 0.88
"""Likeness from which an unknown key is questioned; the reference's own extra keys stay below."""


def notices(config: TrainConfig) -> tuple[str, ...]:
    """One sentence each on fields without effect, extensions, sequence_parallel, cautions and likely misspellings."""
    inert = ", ".join(f"{path} ({reason})" for path, reason in inert_fields(config).items())
    found = [f"Accepted, but without effect: {inert}."] if inert else []
    return (*found, *_extensions(config), *_sequence_parallel(config), *cautions(config), *_misspelt(config, ""))


def inert_fields(config: TrainConfig) -> dict[str, str]:
    """The fields whose values have no effect because of what else the file says, or that are reserved; with why."""
    return dict([*_reserved(config, ""), *_inert(config)])


def _reserved(section: object, path: str) -> Iterator[tuple[str, str]]:
    for attribute in fields(type(section)):  # type: ignore[arg-type]
        value, inner = getattr(section, attribute.name), join(path, attribute.name)
        if is_reserved(attribute) and value != attribute.default:
            yield inner, "reserved"
        if has(type(value)) and attribute.name != "source":
            yield from _reserved(value, inner)


def _inert(config: TrainConfig) -> Iterator[tuple[str, str]]:
    sizes, default = config.parallelism, Parallelism()
    for degree, names in _ONLY_WITH.items():
        for name in names:
            if getattr(sizes, degree) == 1 and getattr(sizes, name) != getattr(default, name):
                yield f"parallelism.{name}", f"{degree} is 1"
    if sizes.pipeline_parallel == 1 and isinstance(sizes.pipeline_parallel_layers_per_stage, tuple):
        yield "parallelism.pipeline_parallel_layers_per_stage", "pipeline_parallel is 1"
    dispatcher = sizes.moe_token_dispatcher_type
    if dispatcher != "alltoall_deredundancy" and sizes.npu_nums_per_device != default.npu_nums_per_device:
        yield "parallelism.npu_nums_per_device", f"moe_token_dispatcher_type is {dispatcher}"
    if not 0 <= config.profiler.profiler_level <= 2:
        level = config.profiler.profiler_level
        yield "profiler.profiler_level", f"levels are 0, 1 and 2, and this is {level}"
    if config.extensions.initial_weights == "mindformers" and "model.initializer_range" in written_fields(config):
        yield "model.initializer_range", "extensions.initial_weights is mindformers, which starts with 0.01"
    colossal = sizes.context_parallel > 1 and sizes.context_parallel_method == "colossal"
    if colossal and sizes.ulysses_degree_in_cp not in (None, 1):
        yield "parallelism.ulysses_degree_in_cp", "context_parallel_method is colossal"


def _extensions(config: TrainConfig) -> Iterator[str]:
    sizes = config.parallelism
    used = []
    if sizes.context_parallel > 1 and sizes.context_parallel_async and sizes.context_parallel_method == "colossal":
        used.append("context_parallel_async with colossal (keys and values travel in a ring)")
    if sizes.context_parallel > 1 and sizes.context_parallel_order != "contiguous":
        used.append(f"context_parallel_order {sizes.context_parallel_order}")
    if sizes.pipeline_parallel > 1 and sizes.pipeline_parallel_zero_bubble != "none":
        used.append(f"pipeline_parallel_zero_bubble {sizes.pipeline_parallel_zero_bubble}")
    if used:
        yield f"Extensions of this project, which MindFormers r2.0.0 refuses: {', '.join(used)}."
    own = config.extensions
    chosen = f", initial_weights {own.initial_weights}" if own.initial_weights != Extensions().initial_weights else ""
    sections = {"eval_dataset": "", "extensions": f" (engine {own.engine}{chosen})"}
    ignored = [f"section {name}{what}" for name, what in sections.items() if name in written_fields(config)]
    if ignored:
        yield f"Extensions of this project, which MindFormers r2.0.0 ignores: {', '.join(ignored)}."


def _sequence_parallel(config: TrainConfig) -> Iterator[str]:
    sizes = config.parallelism
    if "parallelism.sequence_parallel" not in written_fields(config):
        return
    if sizes.tensor_parallel > 1 and not sizes.sequence_parallel:
        yield (
            "parallelism.sequence_parallel: false has no effect: sequence parallelism comes with"
            f" tensor_parallel {sizes.tensor_parallel} and cannot be switched off."
        )
    elif sizes.context_parallel > 1 and sizes.sequence_parallel:
        yield (
            "parallelism.sequence_parallel: true is not a switch, and conflicts with context_parallel"
            f" {sizes.context_parallel} by its name: sequence parallelism follows tensor_parallel"
            f" {sizes.tensor_parallel} alone. Remove the field."
        )


def _misspelt(section: object, path: str) -> Iterator[str]:
    cls: Any = type(section)
    for key in getattr(section, "extra", {}):
        meant = most_alike(key, known_keys(cls), at_least=_SURELY_MISSPELT)
        if meant is not None:
            value = getattr(section, meant)
            now = "" if value is None or has(type(value)) else f", which is {show(value)} now"
            yield f"{join(path, key)} is not a field known here and is kept as it is: did you mean {meant}{now}?"
    for attribute in fields(type(section)):  # type: ignore[arg-type]
        value = getattr(section, attribute.name)
        if has(type(value)) and attribute.name != "source":
            yield from _misspelt(value, join(path, attribute.name))
