"""Pipeline parallelism: the rank's virtual stages, and a schedule with the arguments that its class accepts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from parallel_config import ParallelPlan
from parallel_config.schema import Parallelism

from parallel_trainer.engines.hyperparallel.calls import Attribute, Call, Module, Name, Use
from parallel_trainer.engines.hyperparallel.mesh import DEVICE_MESH, PP, TP

_SCHEDULES = "hyper_parallel.core.pipeline_parallel"
STAGE = "hyper_parallel.PipelineStage"


def seed(plan: ParallelPlan) -> float:
    """What the loss that a chunk returns is multiplied by; `HyperParallelTrainer` makes the factor that completes it.

    Gradients are summed over micro-batches and over all ranks of a stage, also those of tp, whose replicated loss goes
    back once on each. So the sum is divided by all of them, once, here.
    """
    return plan.loss_scale / plan.num_accumulation_steps


def stages(plan: ParallelPlan, indices: Sequence[int]) -> Iterator[Call]:
    """One stage for each of the rank's chunks, whose virtual stages are `indices`."""
    yield Call(
        Name("parallel_trainer.engines.hyperparallel.runtime.scaled_stage"),
        (Name(STAGE),),
        {"loss_scale": seed(plan), "tp": TP if plan.tp > 1 else None},
        result="Stage",
        why="its own seed would divide by the copies of a loss again, and it finds no tp in views of a flat world",
    )
    for chunk, index in enumerate(indices):
        yield Call(
            Use("Stage", owner=STAGE),
            (),
            {
                "submodule": Module("", chunk),
                "stage_index": index,
                "stage_num": plan.pp * plan.interleave_num,
                "device": Attribute(PP, "device_type", DEVICE_MESH),
                "group": Call(Attribute(PP, "get_group", DEVICE_MESH)),
                "mesh": PP,
            },
            result=f"stage_{chunk}",
        )


def overlaps_experts(parallelism: Parallelism, plan: ParallelPlan, *, every_chunk_has_experts: bool) -> bool:
    """Whether a backward and a forward can be one step: there has to be an exchange of experts in every chunk.

    Decided for all ranks alike, because they have to agree on the order.
    """
    exchanged = plan.ep > 1 and plan.moe_token_dispatcher_type == "alltoall" and every_chunk_has_experts
    return parallelism.pipeline_parallel_overlap_b_f and exchanged


def schedule(parallelism: Parallelism, plan: ParallelPlan, chunks: int, *, overlap_b_f: bool) -> Iterator[Call]:
    """1F1B where a rank has one chunk and nothing overlaps: interleaved would keep almost twice as many activations.

    GPipe where the file asks for it; neither of the two takes arguments about overlap.
    """
    overlap_p2p = parallelism.pipeline_parallel_overlap_p2p
    interleaved = chunks > 1 or overlap_p2p or overlap_b_f
    keywords: dict[str, Any] = {}
    if interleaved:
        keywords = {
            "overlap_p2p": overlap_p2p,
            "overlap_b_f": overlap_b_f,
            "p2p_transport": parallelism.pipeline_parallel_p2p_transport,
        }
    name = "ScheduleGPipe" if plan.schedule == "gpipe" else "Schedule1F1B"
    yield Call(
        Name(f"{_SCHEDULES}.{'ScheduleInterleaved1F1B' if interleaved else name}"),
        ([Use(f"stage_{chunk}") for chunk in range(chunks)], plan.num_accumulation_steps),
        keywords,
        result="schedule",
        why="" if interleaved else f"{name.removeprefix('Schedule')} takes no arguments about overlap",
    )
