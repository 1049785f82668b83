"""A schedule without backwards: for evaluation, and wherever else a pipeline only computes outputs."""

from __future__ import annotations

from collections.abc import Sequence

from pipeline_schedule.actions import Action, Kind, new_action
from pipeline_schedule.communication import add_communication
from pipeline_schedule.schedule import Placement, Schedule
from pipeline_schedule.sizes import check_sizes


def forward_only(placement: Sequence[int], microbatches: int) -> Schedule:
    """Every micro-batch passes every virtual stage forward, for any placement of the stages on ranks.

    In each turn a rank computes the last of its stages for which an input is there: what has come furthest leaves
    first. Where all stages take equally long this takes v·m + p - 1 turns for v chunks on each of p ranks in a loop,
    if p divides m, and 2 m + 2 (p - 1) in a V.

    Args:
        placement: the rank of each virtual stage, as `loop_placement` and `vee_placement` make it; each rank from 0
            to the largest holds one or more.
        microbatches: micro-batches m that pass.

    Raises:
        ValueError: a number of micro-batches below 1, no stage, or a rank without one.
        TypeError: a number that is not an int.
    """
    check_sizes(microbatches=microbatches)
    stages: Placement = tuple(placement)
    if set(stages) != set(range(len(set(stages)))) or not stages:
        raise ValueError(
            f"placement {stages} must give a rank for each virtual stage, and every rank from 0 to the largest a "
            "stage: use, for example, loop_placement(4, 2)"
        )
    orders = _last_stage_first(stages, microbatches)
    return Schedule("Forward only", stages, microbatches, add_communication(orders, stages, microbatches))


def _last_stage_first(placement: Placement, microbatches: int) -> list[list[Action]]:
    """The forwards of each rank in order: in every turn the last of its stages that has an input."""
    held: list[list[int]] = [[] for _ in set(placement)]
    for stage, rank in enumerate(placement):
        held[rank].insert(0, stage)
    arrived = [microbatches, *(0 for _ in placement[1:])]
    done = [0] * len(placement)
    orders: list[list[Action]] = [[] for _ in held]
    while done[-1] < microbatches:
        ready = ((stage for stage in stages if done[stage] < arrived[stage]) for stages in held)
        turn = [stage for stage in (next(of_rank, None) for of_rank in ready) if stage is not None]
        for stage in turn:
            orders[placement[stage]].append(new_action((Kind.FORWARD, stage, done[stage])))
            done[stage] += 1
        for stage in turn:
            if stage + 1 < len(placement):
                arrived[stage + 1] += 1
    return orders
