"""Where every inferred value comes from, in one line each, and what could not be checked."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from attrs import frozen

from parallel_config.plan import ParallelPlan, plan
from parallel_config.problems import show
from parallel_config.schema import TrainConfig, written_fields
from parallel_config.schema.model import MODEL_DEFAULTS
from parallel_config.stages import as_texts


@frozen
class Explanation:
    """A value, and a line that says which rule and which numbers gave it."""

    name: str
    value: Any
    text: str

    def __str__(self) -> str:
        return self.text


def explain(config: TrainConfig, world_size: int) -> tuple[Explanation, ...]:
    """Every inferred value with its origin, then notes. Raises `ConfigError` where there is no plan."""
    inferred = plan(config, world_size)
    return (
        *_degrees(config, inferred),
        *_behaviour(config, inferred),
        *_batch(config, inferred),
        *_stages(config, inferred),
        *_notes(config),
    )


def _line(name: str, value: Any, origin: str) -> Explanation:
    return Explanation(name, value, f"{name} {show(value)} ← {origin}")


def _degrees(config: TrainConfig, plan: ParallelPlan) -> Iterator[Explanation]:
    rest = f"world_size {plan.world_size} // (tp {plan.tp} · cp {plan.cp} · pp {plan.pp})"
    yield _line("data_parallel", plan.data_parallel, rest)
    if config.parallelism.data_parallel_shard == -1:
        yield _line("dp_shard", plan.dp_shard, rest)
    else:
        yield _line("dp_shard", plan.dp_shard, f"data_parallel_shard {plan.dp_shard}")
    yield _line("dp_replicate", plan.dp_replicate, f"data_parallel {plan.data_parallel} // dp_shard {plan.dp_shard}")
    yield _line("fsdp", plan.fsdp, f"dp_shard {plan.dp_shard} · cp {plan.cp}")
    yield _line("fsdp_enabled", plan.fsdp_enabled, f"dp_shard {plan.dp_shard} > 1 or cp {plan.cp} > 1")
    yield _line("efsdp", plan.efsdp, f"dp_shard {plan.dp_shard} · cp {plan.cp} · tp {plan.tp} // ep {plan.ep}")


def _behaviour(config: TrainConfig, plan: ParallelPlan) -> Iterator[Explanation]:
    policy = config.parallelism.reshard_after_forward_policy
    origin = f"reshard_after_forward_policy {policy}"
    if policy == "default":
        origin += f" with pp {plan.pp}: only without pipelining"
    yield _line("reshard_after_forward", plan.reshard_after_forward, origin)
    yield _line("sequence_parallel", plan.sequence_parallel, f"tp {plan.tp} > 1")
    method = "" if plan.cp == 1 else f"context_parallel_method {plan.context_parallel_method} with "
    yield _line("ulysses_degree", plan.ulysses_degree, f"{method}cp {plan.cp}")
    if plan.cp > 1:
        pieces = {
            "contiguous": "one of cp equal pieces of the sequence on each rank",
            "zigzag": f"two of {2 * plan.cp} equal pieces on each rank, r and {2 * plan.cp - 1} - r (an extension)",
        }
        yield _line("context_parallel_order", plan.context_parallel_order, pieces[plan.context_parallel_order])
    yield _line("loss_scale", plan.loss_scale, f"1 / (world_size {plan.world_size} // pp {plan.pp})")


def _batch(config: TrainConfig, plan: ParallelPlan) -> Iterator[Explanation]:
    step = f"data_parallel {plan.data_parallel} · local_batch_size {plan.local_batch_size}"
    written = written_fields(config)
    if plan.global_batch_size != config.training.global_batch_size:
        yield _line("global_batch_size", plan.global_batch_size, f"{step}, as the file writes no batch size")
    elif "training.global_batch_size" not in written:
        yield _line("global_batch_size", plan.global_batch_size, "the default")
    yield _line(
        "num_accumulation_steps",
        plan.num_accumulation_steps,
        f"global_batch_size {plan.global_batch_size} // ({step})",
    )


def _stages(config: TrainConfig, plan: ParallelPlan) -> Iterator[Explanation]:
    if plan.zero_bubble != "none":
        origin = f"pipeline_parallel_zero_bubble {plan.zero_bubble} (an extension)"
        yield _line("stage_ranks", list(plan.stage_ranks), origin)
    layers = config.model.num_hidden_layers
    if not plan.stage_layers:
        yield _line("stage_layers", [], "unknown, as the file has no num_hidden_layers")
        return
    pieces = as_texts(plan.stage_layers)
    written = config.parallelism.pipeline_parallel_layers_per_stage
    if plan.pp > 1 and isinstance(written, tuple):
        origin = "pipeline_parallel_layers_per_stage, in the order of the virtual stages"
    else:
        parts = f"pp {plan.pp} · interleave_num {plan.interleave_num}"
        origin = f"num_hidden_layers {layers} over {parts} virtual stage" + "s" * (len(pieces) > 1)
    yield Explanation("stage_layers", plan.stage_layers, f"stage_layers {', '.join(pieces)} ← {origin}")


def _notes(config: TrainConfig) -> Iterator[Explanation]:
    written, model = written_fields(config), config.model
    defaults = MODEL_DEFAULTS.get(model.model_type or "", {})
    filled = [name for name in defaults if f"model.{name}" not in written]
    if filled:
        yield Explanation("model defaults", filled, f"defaults of model_type {model.model_type}: {', '.join(filled)}")
    if config.training.max_norm <= 0:
        yield Explanation(
            "max_norm",
            config.training.max_norm,
            f"max_norm {config.training.max_norm:g} ≤ 0: gradients are not clipped",
        )
    unknown = [
        f"{name} (for {rule})"
        for name, rule in (
            ("num_hidden_layers", "the layers of each stage"),
            ("num_attention_heads", "tensor_parallel and the Ulysses degree"),
            ("intermediate_size", "tensor_parallel"),
            ("seq_length", "context_parallel and tensor_parallel"),
        )
        if getattr(model, name) is None
    ]
    if unknown:
        yield Explanation("not checked", unknown, f"not checked, as the file has no {', '.join(unknown)}")
