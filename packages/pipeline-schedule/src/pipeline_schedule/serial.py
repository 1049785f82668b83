"""Schedules as plain dictionaries and lists, for JSON."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from pipeline_schedule.actions import Action, Kind, Overlap, Step, Together
from pipeline_schedule.schedule import Schedule


def schedule_to_dict(schedule: Schedule) -> dict[str, Any]:
    """A schedule as dictionaries, lists, strings and numbers, from which `schedule_from_dict` makes it again.

    Each step is `[kind, virtual stage, micro-batch]`; an overlapping pair is a list of two such steps, the backward
    first. Transfers that are posted together are `{"together": [step, ...]}`.
    """
    return {
        "name": schedule.name,
        "placement": list(schedule.placement),
        "microbatches": schedule.microbatches,
        "overlap_p2p": schedule.overlap_p2p,
        "programs": [[_step_to_list(step) for step in program] for program in schedule.programs],
    }


def schedule_from_dict(data: Mapping[str, Any]) -> Schedule:
    """The schedule that a dictionary describes. It is not validated.

    Raises:
        ValueError: a key is missing or unknown, or a step is not what `schedule_to_dict` makes of one.
    """
    keys = {"name", "placement", "microbatches", "overlap_p2p", "programs"}
    if set(data) != keys:
        raise ValueError(f"a schedule has the keys {', '.join(sorted(keys))}, and not {', '.join(sorted(data))}")
    programs = [
        [_step_from_list(step, f"step {position} of rank {rank}") for position, step in enumerate(program)]
        for rank, program in enumerate(data["programs"])
    ]
    return Schedule(data["name"], data["placement"], data["microbatches"], programs, data["overlap_p2p"])


def _step_to_list(step: Step) -> Any:
    if isinstance(step, Together):
        return {"together": [_step_to_list(transfer) for transfer in step.transfers]}
    if isinstance(step, Overlap):
        return [_step_to_list(step.backward), _step_to_list(step.forward)]
    return [str(step.kind), step.stage, step.microbatch]


def _step_from_list(step: Any, where: str) -> Step:
    if isinstance(step, Mapping):
        match dict(step):
            case {"together": list() as steps, **others} if not others:
                read = [_step_from_list(transfer, where) for transfer in steps]
                transfers = [transfer for transfer in read if isinstance(transfer, Action)]
                if len(transfers) == len(read):
                    return Together(transfers)
    elif isinstance(step, Iterable) and not isinstance(step, str):
        match list(step):
            case [str(kind), int(stage), int(microbatch)] if kind in list(Kind):
                return Action(Kind(kind), stage, microbatch)
            case [list() as backward, list() as forward]:
                first, second = _step_from_list(backward, where), _step_from_list(forward, where)
                if isinstance(first, Action) and isinstance(second, Action):
                    return Overlap(first, second)
    raise ValueError(
        f"{where} is {step!r}; a step is [kind, virtual stage, micro-batch] with a kind of {', '.join(Kind)}, a "
        'list of two such steps, or {"together": [step, ...]}'
    )
