"""Running a schedule's steps without computing: when each begins and ends, or where the ranks get stuck.

Each rank does its steps in order. Its transfers are done one after another, in the order in which they were started,
each together with its other end on the other rank; those that it posted together are done beside each other. Where
`overlap_p2p` is false, a rank stays at a transfer, or at a group of them, until it is over; otherwise it goes on, and
stays at the wait.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from fractions import Fraction
from typing import NamedTuple

from attrs import Factory, define

from pipeline_schedule.actions import (
    SENDS,
    WAITS,
    Action,
    Computation,
    Step,
    flat,
    is_compute,
    partner,
    transfer_of,
)
from pipeline_schedule.schedule import Schedule

Time = int | float | Fraction


class Span(NamedTuple):
    """A step and its time. A transfer, named by its send, begins when both of its ends are ready for it."""

    step: Computation
    start: Time
    end: Time


class Started(NamedTuple):
    """A rank's end of a transfer that is not over."""

    send: Action
    """The transfer, named by its send."""
    other: int
    """The rank at the other end."""
    start: Time
    position: int
    """The step that started it; those of one step are a group."""


@define
class RankState:
    """How far a rank has come."""

    steps: tuple[Step, ...]
    position: int = 0
    """The step that the rank is at; the number of steps if it has done all."""
    clock: Time = 0
    started: deque[Started] = Factory(deque)
    """Transfers that were started and are not over, in order."""
    awaited: tuple[Action, ...] | None = None
    """The transfers that the rank stays for, named by their sends."""
    last_end: Time = 0
    """When the last transfer that is over was over."""
    free: Time = 0
    """When all transfers of the step before those that are under way were over."""
    computations: list[Span] = Factory(list)

    @property
    def finished(self) -> bool:
        """Whether the rank has done all its steps."""
        return self.position == len(self.steps)

    def first(self) -> Iterator[Started]:
        """The transfers that may be done now: the first that was started, and those posted together with it."""
        for started in self.started:
            if started.position != self.started[0].position:
                return
            yield started

    def over(self, started: Started, end: Time) -> None:
        """A transfer is over."""
        self.last_end = max(self.last_end, end)
        self.started.remove(started)
        if not self.started or self.started[0].position != started.position:
            self.free = self.last_end


@define
class Replay:
    """What a replay has come to.

    Attributes:
        schedule: what is replayed; it has no problem that `validate` finds, except that it may deadlock.
        compute_time: how long a computing step takes.
        transfer_time: how long the transfer of a send takes.
        ranks: how far each rank has come.
        transfers: the transfers that are over, in order; each is named by its send.
    """

    schedule: Schedule
    compute_time: Callable[[Computation], Time]
    transfer_time: Callable[[Action], Time]
    ranks: list[RankState] = Factory(list)
    transfers: dict[Action, Span] = Factory(dict)
    _awake: deque[int] = Factory(deque)

    def run(self) -> None:
        """Let every rank go as far as it comes; one that is not `finished` after that is in a deadlock."""
        self.ranks = [RankState(steps) for steps in self.schedule.programs]
        self._awake.extend(range(len(self.ranks)))
        while self._awake:
            self._advance(self._awake.popleft())

    def _advance(self, number: int) -> None:
        """Let a rank go on until it must stay for another one."""
        rank = self.ranks[number]
        steps = rank.steps
        while rank.position < len(steps):
            step = steps[rank.position]
            if is_compute(step):
                start = rank.clock
                rank.clock = start + self.compute_time(step)
                rank.computations.append(Span(step, start, rank.clock))
            else:
                if rank.awaited is None:
                    rank.awaited = self._begin(number, rank, step)
                end = rank.clock
                for send in rank.awaited:
                    span = self.transfers.get(send)
                    if span is None:
                        return
                    if span.end > end:
                        end = span.end
                rank.clock = end
                rank.awaited = None
            rank.position += 1

    def _begin(self, number: int, rank: RankState, step: Step) -> tuple[Action, ...]:
        """Start transfers, if the step is not a wait; those that the rank must stay for."""
        if isinstance(step, Action) and step.kind in WAITS:
            return (transfer_of(step),)
        sends = []
        for action in (step,) if isinstance(step, Action) else flat([step]):
            other = partner(action)
            send = action if action.kind in SENDS else other
            rank.started.append(Started(send, self.schedule.placement[other.stage], rank.clock, rank.position))
            sends.append(send)
        self._transfer(number)
        return () if self.schedule.overlap_p2p else tuple(sends)

    def _transfer(self, number: int) -> None:
        """Do the transfers that stand first on both of their ranks, beginning with this one's."""
        changed = [number]
        while changed:
            rank = self.ranks[changed[-1]]
            both = self._both_ends(rank)
            if both is None:
                changed.pop()
                continue
            mine, theirs = both
            other = self.ranks[mine.other]
            start = max(mine.start, theirs.start, rank.free, other.free)
            end = start + self.transfer_time(mine.send)
            self.transfers[mine.send] = Span(mine.send, start, end)
            rank.over(mine, end)
            other.over(theirs, end)
            self._awake.append(mine.other)
            if changed[-1] != number:
                self._awake.append(changed[-1])
            changed.append(mine.other)

    def _both_ends(self, rank: RankState) -> tuple[Started, Started] | None:
        """Both ends of a transfer that may be done now on this rank and on the other."""
        for mine in rank.first():
            for theirs in self.ranks[mine.other].first():
                if theirs.send == mine.send:
                    return mine, theirs
        return None
