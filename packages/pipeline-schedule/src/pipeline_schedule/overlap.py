"""Transformations of a schedule that let transfers, or a backward and a forward, go on beside each other."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from attrs import evolve

from pipeline_schedule.actions import (
    FORWARDS,
    RECEIVES,
    SENDS,
    WAIT_FOR,
    Action,
    Computation,
    Kind,
    Overlap,
    Step,
    Together,
    flat,
    is_compute,
)
from pipeline_schedule.communication import add_communication, compute_steps
from pipeline_schedule.schedule import Schedule


def overlap_p2p(schedule: Schedule) -> Schedule:
    """The same schedule with transfers that go on beside the computations.

    Every transfer becomes a start and a wait. A rank's transfers keep their order, so that this works too where a
    device does them one by one. A receive is started right after the transfer before it and awaited right before
    the computation that needs it. A send is started where it was; that of an activation is awaited right before its
    backward, by when it must be over, that of a gradient right before the rank sends its next gradient.

    Raises:
        ValueError: the schedule's transfers already overlap or are posted together, or it has no backwards, which sends
            are awaited before.
    """
    if schedule.overlap_p2p:
        raise ValueError(f"{schedule.name} already has overlap_p2p; use it as it is")
    if all(action.kind in FORWARDS for program in schedule.programs for action in flat(program)):
        raise ValueError(f"{schedule.name} has no backwards, before which sends are awaited; use it as it is")
    _refuse_groups(schedule, "overlap_p2p")
    programs = tuple(tuple(_with_waits(_receives_first(program))) for program in schedule.programs)
    return evolve(schedule, name=f"{schedule.name}, overlap_p2p", programs=programs, overlap_p2p=True)


def _refuse_groups(schedule: Schedule, wanted: str) -> None:
    """Transfers are placed anew, and groups of them would be lost."""
    if any(isinstance(step, Together) for program in schedule.programs for step in program):
        raise ValueError(f"{schedule.name} posts transfers together; use {wanted} first, then post_together")


def _receives_first(program: Iterable[Step]) -> list[Step]:
    """The program with each receive moved up to the transfer before it."""
    moved: list[Step] = []
    computations: list[Step] = []
    for step in program:
        if is_compute(step):
            computations.append(step)
        elif isinstance(step, Action) and step.kind in RECEIVES:
            moved.append(step)
        else:
            moved += [*computations, step]
            computations = []
    return moved + computations


def _with_waits(program: Sequence[Step]) -> Iterator[Step]:
    """The program with a wait for every transfer."""
    transfers = {action for action in flat(program) if not is_compute(action)}
    gradient: Action | None = None
    for step in program:
        if is_compute(step):
            for kind, stage, microbatch in flat([step]):
                for awaited in _AWAITED_BEFORE[kind]:
                    if Action(awaited, stage, microbatch) in transfers:
                        yield Action(WAIT_FOR[awaited], stage, microbatch)
        elif isinstance(step, Action) and step.kind is Kind.SEND_GRADIENT:
            if gradient is not None:
                yield gradient
            gradient = Action(Kind.WAIT_SEND_GRADIENT, step.stage, step.microbatch)
        yield step
    if gradient is not None:
        yield gradient


_AWAITED_BEFORE = {
    Kind.FORWARD: (Kind.RECV_ACTIVATION,),
    Kind.BACKWARD: (Kind.RECV_GRADIENT, Kind.SEND_ACTIVATION),
    Kind.BACKWARD_INPUT: (Kind.RECV_GRADIENT, Kind.SEND_ACTIVATION),
    Kind.BACKWARD_WEIGHT: (),
}


def post_together(schedule: Schedule) -> Schedule:
    """The same schedule with transfers of a rank that follow each other directly posted as one group.

    Between two computations a rank then posts what it sends and what it receives at once, and goes on when all of it
    is over; with `overlap_p2p` it starts them at once. A schedule that cannot deadlock one by one cannot in groups.
    """
    programs = [list(_grouped(program)) for program in schedule.programs]
    return evolve(schedule, name=f"{schedule.name}, posted together", programs=programs)


def _grouped(program: Iterable[Step]) -> Iterator[Step]:
    """The program with neighbouring transfers in groups; one alone stays as it is."""
    held: list[Action] = []
    for step in program:
        actions = list(flat([step])) if not is_compute(step) else []
        if actions and all(action.kind in SENDS or action.kind in RECEIVES for action in actions):
            held += actions
            continue
        yield from _group(held)
        held = []
        yield step
    yield from _group(held)


def _group(transfers: Sequence[Action]) -> Sequence[Step]:
    return [Together(transfers)] if len(transfers) > 1 else transfers


def overlap_b_f(schedule: Schedule) -> Schedule:
    """The same schedule with each backward that a forward follows directly beside that forward.

    What was F1 B1 F2 B2 F3 B3 on a rank becomes F1, B1 beside F2, B2 beside F3, B3. The transfers are placed anew:
    a pair begins when the inputs of both are there. A schedule in which no forward follows a backward is returned
    with its transfers placed anew only. Made for interleaved 1F1B, which runs two more forwards ahead on each rank
    than on the next; in 1F1B, which runs one more, each pair waits for its neighbour's.

    Raises:
        ValueError: pairs would wait for each other in a circle, or the schedule's transfers are posted together.
    """
    _refuse_groups(schedule, "overlap_b_f")
    orders = (_paired(program) for program in compute_steps(schedule.programs))
    programs = add_communication(orders, schedule.placement, schedule.microbatches, in_step=True)
    overlapping = Schedule(f"{schedule.name}, overlap_b_f", schedule.placement, schedule.microbatches, programs)
    return overlap_p2p(overlapping) if schedule.overlap_p2p else overlapping


def _paired(program: Iterable[Computation]) -> Iterator[Computation]:
    """The computations, each backward and the forward right after it in a pair."""
    held: Action | None = None
    for step in program:
        if held is not None:
            if isinstance(step, Action) and step.kind is Kind.FORWARD:
                yield Overlap(held, step)
                held = None
                continue
            yield held
            held = None
        if isinstance(step, Action) and step.kind in (Kind.BACKWARD, Kind.BACKWARD_INPUT):
            held = step
        else:
            yield step
    if held is not None:
        yield held
