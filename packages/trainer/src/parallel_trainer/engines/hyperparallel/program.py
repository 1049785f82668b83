"""The program of a rank: a plan's calls, dimension by dimension in MindFormers' order."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from parallel_config import ParallelPlan, TrainConfig, plan

from parallel_trainer.engines.hyperparallel import (
    context_parallel,
    fully_shard,
    mesh,
    pipeline,
    recompute,
    refusals,
    step,
    tensor_parallel,
)
from parallel_trainer.engines.hyperparallel.blocks import Chunks, rank_chunks
from parallel_trainer.engines.hyperparallel.calls import Call, Phase, Program
from parallel_trainer.errors import UserError
from parallel_trainer.models.config import model_config
from parallel_trainer.support import refusals as refused_here

ENVIRONMENT = {"HYPER_PARALLEL_PLATFORM": "mindspore"}
"""HyperParallel chooses its framework when it is first imported, and never again."""


def check(config: TrainConfig, world_size: int) -> tuple[ParallelPlan, tuple[Chunks, ...]]:
    """The plan and the chunks of each pipeline rank, if all of it can be said in calls; no data is looked at.

    Raises ConfigError for a file that breaks a rule, one UserError with all that cannot be mapped.
    """
    made = plan(config, world_size)
    if world_size == 1:
        raise UserError("HyperParallel splits work over ranks, and there is 1: use --world-size 2 or more.")
    model_config(config.model)
    found = [*refused_here(config), *refusals.unmapped(config, made)]
    chunks: tuple[Chunks, ...] = ()
    if not found:
        chunks = rank_chunks(config, made)
        found = list(refusals.unsplittable(config, made, [block for of in chunks for chunk in of for block in chunk]))
    if found:
        raise UserError("HyperParallel cannot be given this file:", [str(problem) for problem in found])
    return made, chunks


def check_run(config: TrainConfig, world_size: int) -> None:
    """Raise UserError, or ConfigError, with all that keeps the engine from training a file."""
    problems = [str(problem) for problem in refusals.unserved(config)]
    try:
        check(config, world_size)
    except UserError as error:
        problems += error.problems
    if problems:
        raise UserError("A run with HyperParallel does not do all of this file:", problems)


def run_notes(config: TrainConfig, plan: ParallelPlan) -> Iterator[str]:
    """What a user has to know of a run by these calls."""
    yield "HyperParallel trains, by calls that have never run on an NPU (docs/ascend.md)."
    yield from _overlap(config, plan)


def program(config: TrainConfig, world_size: int, rank: int = 0) -> Program:
    """What rank `rank` of `world_size` calls. Raises as `check` does."""
    made, every_chunk = check(config, world_size)
    pp_rank = rank // (world_size // made.pp)
    chunks = every_chunk[pp_rank]
    indices = tuple(stage for stage, at in enumerate(made.stage_ranks) if at == pp_rank)
    every_block = [block for chunk in chunks for block in chunk]
    return Program(
        environment=ENVIRONMENT,
        chunks=indices,
        setup=tuple(_setup(config, made, chunks, indices)),
        step=(
            step.micro_batches(made),
            step.update(every_block, made, len(chunks), config.training.max_norm),
        ),
        notes=tuple(_notes(config, made)),
    )


def _setup(config: TrainConfig, plan: ParallelPlan, chunks: Chunks, indices: tuple[int, ...]) -> Iterator[Phase]:
    yield from _phase("start", mesh.start())
    yield from _phase("meshes", mesh.meshes(plan))
    blocks = [block for chunk in chunks for block in chunk]
    sizes = config.parallelism
    if plan.tp > 1:
        title = f"tensor and sequence parallelism over {plan.tp}"
        loss_parallel = sizes.enable_loss_parallel
        split = (tensor_parallel.split_parameters(block, plan, loss_parallel=loss_parallel) for block in blocks)
        said = map(tensor_parallel.say_ranks, range(len(chunks)))
        yield from _phase(title, (*said, *(call for calls in split for call in calls)))
    if plan.ep > 1:
        spread = (tensor_parallel.spread_experts(block) for block in blocks if block.has_experts)
        yield from _phase(f"expert parallelism over {plan.ep}", (call for calls in spread for call in calls))
    if plan.cp > 1:
        calls = context_parallel.attend_across_ranks(plan, blocks)
        yield from _phase(f"context parallelism over {plan.cp}", calls)
    modules = list(recompute.recomputed(config.recompute, blocks))
    yield from _phase("recomputed activations", recompute.wrap(modules))
    yield from _sharding(config, plan, chunks)
    if plan.pp > 1:
        yield from _phase(f"virtual stages {', '.join(map(str, indices))}", pipeline.stages(plan, indices))
        overlap = pipeline.overlaps_experts(sizes, plan, every_chunk_has_experts=_experts_everywhere(config, plan))
        yield from _phase("schedule", pipeline.schedule(sizes, plan, len(chunks), overlap_b_f=overlap))


def _sharding(config: TrainConfig, plan: ParallelPlan, chunks: Chunks) -> Iterator[Phase]:
    title = f"shards over {plan.fsdp}" + (f", {plan.dp_replicate} replicas" if plan.dp_replicate > 1 else "")
    calls = list(fully_shard.policies(config))
    summed: list[Call] = []
    fetched: list[Call] = []
    for number, blocks in enumerate(chunks):
        for block in blocks:
            calls += fully_shard.wrap(block, plan, config)
        calls += fully_shard.wrap_root(number, plan, config)
        summed += fully_shard.reduce_by_sum(blocks, number, plan)
        fetched += fully_shard.fetch_ahead(blocks, plan)
    yield from _phase(title, calls)
    yield from _phase("gradients are summed", summed)
    yield from _phase("fetched ahead", fetched)


def _phase(title: str, calls: Iterable[Call]) -> Iterator[Phase]:
    made = tuple(calls)
    if made:
        yield Phase(title, made)


def _experts_everywhere(config: TrainConfig, plan: ParallelPlan) -> bool:
    has_experts = model_config(config.model).has_experts
    return all(any(map(has_experts, range(first, last + 1))) for first, last in plan.stage_layers)


def _notes(config: TrainConfig, plan: ParallelPlan) -> Iterator[str]:
    yield "No call of these has run on an NPU, nor with HyperParallel 1.0."
    yield (
        "The model's modules have these names and parameters of their own, and the core of attention is a module "
        "self_attn.core_attention: engines.hyperparallel.model.Chunk."
    )
    yield (
        "A micro-batch's loss is a sum over its tokens, times a factor with which the gradient is that of the mean "
        "over the tokens of the global batch that count, however they are spread over ranks."
    )
    if plan.ep > 1:
        yield (
            "HyperParallel 1.0 has no exchange of tokens for MindSpore: the model's experts do it themselves over "
            f'sparse["ep"] ({plan.moe_token_dispatcher_type}).'
        )
    if plan.cp > 1:
        yield 'Each rank of data["cp"] is given one contiguous block of the sequence, with its position ids.'
        if plan.context_parallel_async:
            yield "Nothing may stand between self_attn.q_handoff, k_handoff, v_handoff and the core of attention."
    if plan.pp > 1:
        yield "The modules of a chunk keep the numbers that layers have in the whole model."
    yield from _overlap(config, plan)


def _overlap(config: TrainConfig, plan: ParallelPlan) -> Iterator[str]:
    if config.parallelism.pipeline_parallel_overlap_b_f and plan.pp > 1:
        everywhere = _experts_everywhere(config, plan)
        if pipeline.overlaps_experts(config.parallelism, plan, every_chunk_has_experts=everywhere):
            yield "overlap_b_f: the backward and the forward of a step run one after the other; no callback is given."
        else:
            yield "overlap_b_f is left out: it needs experts in every chunk, expert_parallel > 1 and alltoall."
