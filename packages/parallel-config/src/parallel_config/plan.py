"""The parallel plan: every degree and count that follows from a configuration and a world size."""

from __future__ import annotations

from typing import Any

from attrs import evolve, frozen

from parallel_config.document import Document
from parallel_config.problems import Problem, config_error, in_order
from parallel_config.rules import Facts, broken_rules
from parallel_config.rules.fitting import ulysses_degree
from parallel_config.schema import Parallelism, TrainConfig
from parallel_config.stages import Range, even_ranges, in_virtual_order, parse_item, stage_ranks
from parallel_config.structure import structure

MAX_WORLD_SIZE = 2**31 - 1
"""Ranks are numbered with 32-bit integers wherever processes communicate."""


@frozen
class ParallelPlan:
    """How `world_size` ranks share the work. Immutable; every later decision reads only this.

    `dp_replicate · dp_shard · cp · tp · pp == world_size`. `stage_layers` has the closed layer range of each
    virtual stage, in order; it is empty where the number of layers is not known. `loss_scale` is the
    specification's coefficient 1 / (world_size // pp). `interleave_num` is the number of chunks on each
    physical stage, `schedule` the order in which micro-batches pass them (1f1b, interleaved_1f1b or gpipe), and
    `zero_bubble` says whether their backwards are split: none, zbh1 or zbv.
    """

    world_size: int
    data_parallel: int
    dp_replicate: int
    dp_shard: int
    fsdp: int
    cp: int
    tp: int
    pp: int
    ep: int
    efsdp: int
    fsdp_enabled: bool
    reshard_after_forward: bool
    sequence_parallel: bool
    ulysses_degree: int
    context_parallel_method: str
    context_parallel_async: bool
    context_parallel_order: str
    moe_token_dispatcher_type: str
    npu_nums_per_device: int
    local_batch_size: int
    global_batch_size: int
    num_accumulation_steps: int
    loss_scale: float
    interleave_num: int
    schedule: str
    zero_bubble: str
    stage_layers: tuple[Range, ...]

    @property
    def stage_ranks(self) -> tuple[int, ...]:
        """The pipeline rank that holds each virtual stage."""
        return stage_ranks(self.pp, self.interleave_num, self.zero_bubble)

    @classmethod
    def from_degrees(
        cls,
        world_size: int,
        *,
        data_parallel_shard: int = -1,
        tensor_parallel: int = 1,
        context_parallel: int = 1,
        pipeline_parallel: int = 1,
        expert_parallel: int = 1,
        local_batch_size: int = 1,
        global_batch_size: int | None = None,
        reshard_after_forward_policy: str = "default",
        context_parallel_method: str = "colossal",
        context_parallel_async: bool = False,
        context_parallel_order: str = "contiguous",
        ulysses_degree_in_cp: int | None = None,
        pipeline_parallel_interleave_num: int = 1,
        pipeline_parallel_layers_per_stage: str | list[str] | None = "auto",
        pipeline_parallel_schedule: str = "1f1b",
        pipeline_parallel_zero_bubble: str = "none",
        num_hidden_layers: int | None = None,
        moe_token_dispatcher_type: str = "alltoall",
        npu_nums_per_device: int = 8,
    ) -> ParallelPlan:
        """A plan from plain degrees under their YAML names, checked by the same rules as a file.

        A global batch size left out becomes one micro-batch for each replica. Raises `ConfigError`.
        """
        parallelism = {
            "data_parallel_shard": data_parallel_shard,
            "tensor_parallel": tensor_parallel,
            "context_parallel": context_parallel,
            "pipeline_parallel": pipeline_parallel,
            "expert_parallel": expert_parallel,
            "reshard_after_forward_policy": reshard_after_forward_policy,
            "context_parallel_method": context_parallel_method,
            "context_parallel_async": context_parallel_async,
            "context_parallel_order": context_parallel_order,
            "ulysses_degree_in_cp": ulysses_degree_in_cp,
            "pipeline_parallel_interleave_num": pipeline_parallel_interleave_num,
            "pipeline_parallel_layers_per_stage": pipeline_parallel_layers_per_stage,
            "pipeline_parallel_schedule": pipeline_parallel_schedule,
            "pipeline_parallel_zero_bubble": pipeline_parallel_zero_bubble,
            "moe_token_dispatcher_type": moe_token_dispatcher_type,
            "npu_nums_per_device": npu_nums_per_device,
        }
        training = {"local_batch_size": local_batch_size}
        written = {} if global_batch_size is None else {"global_batch_size": global_batch_size}
        model = {} if num_hidden_layers is None else {"num_hidden_layers": num_hidden_layers}
        structured = structure(
            Document.from_values({"parallelism": parallelism, "training": training | written, "model": model})
        )
        if structured.problems:
            raise config_error(structured.problems)
        # Only the global batch size counts as written: no model section exists that could lack anything.
        config = evolve(structured.config, source=Document.from_values({"training": written}))
        return plan(config, world_size)


def world_size_problems(world_size: Any) -> tuple[Problem, ...]:
    """What is wrong with a world size by itself."""
    if isinstance(world_size, int) and not isinstance(world_size, bool) and 1 <= world_size <= MAX_WORLD_SIZE:
        return ()
    shown = world_size if not isinstance(world_size, int) or abs(world_size) < 10**18 else "(too long to show)"
    rule = f"must be an integer ≥ 1 and ≤ {MAX_WORLD_SIZE}"
    return (Problem("world_size", shown, rule, "Give the number of ranks, such as 8."),)


def plan(config: TrainConfig, world_size: int) -> ParallelPlan:
    """Infer every degree for `world_size` ranks. Raises `ConfigError` with all problems."""
    problems = world_size_problems(world_size)
    facts = Facts(config, None if problems else world_size)
    problems = in_order((*problems, *broken_rules(facts)))
    if problems:
        raise config_error(problems)
    return infer(facts)


def infer(facts: Facts) -> ParallelPlan:
    """The plan of a configuration that no rule objects to (specification, "Limitations")."""
    sizes, local, world_size = facts.parallelism, facts.training.local_batch_size, facts.world_size
    assert world_size is not None
    tp, cp, pp, ep = (
        sizes.tensor_parallel,
        sizes.context_parallel,
        sizes.pipeline_parallel,
        sizes.expert_parallel,
    )
    dp_shard = facts.dp_shard
    reshard = {"always": True, "never": False, "default": pp == 1}
    return ParallelPlan(
        world_size=world_size,
        data_parallel=facts.data_parallel,
        dp_replicate=facts.data_parallel // dp_shard,
        dp_shard=dp_shard,
        fsdp=dp_shard * cp,
        cp=cp,
        tp=tp,
        pp=pp,
        ep=ep,
        efsdp=dp_shard * cp * tp // ep,
        fsdp_enabled=dp_shard > 1 or cp > 1,
        reshard_after_forward=reshard[sizes.reshard_after_forward_policy],
        sequence_parallel=tp > 1,
        ulysses_degree=ulysses_degree(sizes.context_parallel_method, cp, sizes.ulysses_degree_in_cp),
        context_parallel_method=sizes.context_parallel_method,
        context_parallel_async=sizes.context_parallel_async,
        context_parallel_order=sizes.context_parallel_order,
        moe_token_dispatcher_type=sizes.moe_token_dispatcher_type,
        npu_nums_per_device=sizes.npu_nums_per_device,
        local_batch_size=local,
        global_batch_size=facts.global_batch_size,
        num_accumulation_steps=facts.global_batch_size // (facts.data_parallel * local),
        loss_scale=1.0 / (world_size // pp),
        interleave_num=sizes.pipeline_parallel_interleave_num if pp > 1 else 1,
        schedule=_schedule(sizes),
        zero_bubble=sizes.pipeline_parallel_zero_bubble if pp > 1 else "none",
        stage_layers=_stage_layers(facts),
    )


def _schedule(sizes: Parallelism) -> str:
    """As the reference reads it: 1F1B of several chunks is interleaved."""
    if sizes.pipeline_parallel == 1:
        return "1f1b"
    several = sizes.pipeline_parallel_interleave_num > 1
    return "interleaved_1f1b" if several else sizes.pipeline_parallel_schedule


def _stage_layers(facts: Facts) -> tuple[Range, ...]:
    sizes, layers = facts.parallelism, facts.model.num_hidden_layers
    pp, written = sizes.pipeline_parallel, sizes.pipeline_parallel_layers_per_stage
    if pp > 1 and isinstance(written, tuple):
        chunks = sizes.pipeline_parallel_interleave_num
        ranks = stage_ranks(pp, chunks, sizes.pipeline_parallel_zero_bubble)
        return in_virtual_order([parse_item(item, index, chunks) for index, item in enumerate(written)], ranks)
    if layers is None:
        return ()
    parts = pp * sizes.pipeline_parallel_interleave_num if pp > 1 else 1
    return even_ranges(layers, parts) or ()
