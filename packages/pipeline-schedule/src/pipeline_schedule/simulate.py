"""How long a schedule takes: given the time of each computation and transfer, when everything happens."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction

from attrs import field, frozen

from pipeline_schedule.actions import Action, Computation, Kind, Overlap
from pipeline_schedule.check import validate
from pipeline_schedule.replay import Replay, Span, Time
from pipeline_schedule.schedule import Schedule

Times = Time | Sequence[Time]
"""One time for all virtual stages, or one for each."""


@frozen
class Costs:
    """The times of a schedule's actions, in any unit.

    Each of the first three is one number for all virtual stages or a sequence with one for each. Ints and Fractions
    are computed with exactly.

    Attributes:
        forward: the forward of one micro-batch through a virtual stage.
        backward_input: the half of its backward that computes the gradient of the input.
        backward_weight: the half that computes the gradients of the weights; a whole backward takes the sum.
        communication: one transfer between two virtual stages on different ranks; a sequence has one number for each
            boundary, that between stages s and s + 1 at position s.
        hidden: the share from 0 to 1 of the shorter of the two that is saved where a backward and a forward overlap.
            0: they take as long as one after the other.

    Raises:
        ValueError: a time that is negative or not finite, or `hidden` outside 0 to 1.
        TypeError: something that is not a number.
    """

    forward: Times = field(default=1)
    backward_input: Times = field(default=1)
    backward_weight: Times = field(default=1)
    communication: Times = field(default=0)
    hidden: Time = field(default=0)

    def __attrs_post_init__(self) -> None:
        for name in ("forward", "backward_input", "backward_weight", "communication", "hidden"):
            times = getattr(self, name)
            for time in times if isinstance(times, Sequence) else (times,):
                _check_time(name, time)
        if self.hidden > 1:
            raise ValueError(f"hidden = {self.hidden} must be a share from 0 to 1 of the shorter computation")


def _check_time(name: str, time: object) -> None:
    if isinstance(time, bool) or not isinstance(time, int | float | Fraction):
        raise TypeError(f"{name}: {time!r} must be an int, a float or a Fraction")
    if not math.isfinite(time) or time < 0:
        raise ValueError(f"{name}: {time} must be a time of at least 0, and finite")


@frozen
class Timeline:
    """When each step of a schedule happens, in the unit of the costs.

    Attributes:
        schedule: what was simulated.
        computations: for each rank, its computing steps in order.
        transfers: all transfers, named by their sends, in the order of their ends.
        makespan: from the start of the first step to the end of the last.
        idle: for each rank, the share of the makespan in which it does not compute: the bubble fraction.
        peak_activations: for each rank, the largest number of live activations; see `peak_activations`.
    """

    schedule: Schedule = field(repr=False)
    computations: tuple[tuple[Span, ...], ...] = field(repr=False)
    transfers: tuple[Span, ...] = field(repr=False)
    makespan: Time
    idle: tuple[Fraction, ...]
    peak_activations: tuple[int, ...]


def simulate(schedule: Schedule, costs: Costs | None = None) -> Timeline:
    """Run a schedule against the clock.

    A rank does its steps in order. A transfer begins when both ends have come to it and the transfers that either
    rank started before are over; those that a rank posted together go on beside each other. Without `overlap_p2p`
    both ranks stay with it until it is over; with it they go on and stay at its wait.

    Args:
        schedule: the schedule; it is validated first.
        costs: the times; by default 1 for a forward, 2 for a backward (1 for each half), 0 for a transfer.

    Raises:
        ScheduleError: the schedule is not valid.
        ValueError: a sequence of times that does not have one for each virtual stage, or boundary.
    """
    peaks = validate(schedule)
    clock = _Clock(schedule, Costs() if costs is None else costs)
    replay = Replay(schedule, clock.compute_time, clock.transfer_time)
    replay.run()
    makespan = max(max(rank.clock, rank.last_end) for rank in replay.ranks)
    busy = [sum(Fraction(span.end - span.start) for span in rank.computations) for rank in replay.ranks]
    return Timeline(
        schedule=schedule,
        computations=tuple(tuple(rank.computations) for rank in replay.ranks),
        transfers=tuple(sorted(replay.transfers.values(), key=lambda span: span.end)),
        makespan=makespan,
        idle=tuple(1 - Fraction(time) / Fraction(makespan) if makespan else Fraction(0) for time in busy),
        peak_activations=peaks,
    )


class _Clock:
    """The time of each step."""

    def __init__(self, schedule: Schedule, costs: Costs) -> None:
        stages = schedule.num_stages
        forward = _for_each(costs.forward, stages, "forward", "virtual stages")
        input_half = _for_each(costs.backward_input, stages, "backward_input", "virtual stages")
        weight_half = _for_each(costs.backward_weight, stages, "backward_weight", "virtual stages")
        self.boundaries = _for_each(costs.communication, stages - 1, "communication", "boundaries between stages")
        self.hidden = costs.hidden
        self.times: dict[Kind, Sequence[Time]] = {
            Kind.FORWARD: forward,
            Kind.BACKWARD: [one + other for one, other in zip(input_half, weight_half, strict=True)],
            Kind.BACKWARD_INPUT: input_half,
            Kind.BACKWARD_WEIGHT: weight_half,
        }

    def compute_time(self, step: Computation) -> Time:
        if isinstance(step, Overlap):
            backward, forward = self.compute_time(step.backward), self.compute_time(step.forward)
            return backward + forward - self.hidden * min(backward, forward)
        return self.times[step.kind][step.stage]

    def transfer_time(self, send: Action) -> Time:
        return self.boundaries[send.stage if send.kind is Kind.SEND_ACTIVATION else send.stage - 1]


def _for_each(times: Times, number: int, name: str, what: str) -> Sequence[Time]:
    if not isinstance(times, Sequence):
        return (times,) * number
    if len(times) != number:
        raise ValueError(
            f"{name} has {len(times)} times, but the schedule has {number} {what}: give one number for all or {number}"
        )
    return times
