"""Running a schedule's steps without computing: when each begins and ends, or where the ranks get stuck.

Each rank does its steps in order. Its transfers are done one after another, in the order in which they were started,
each together with its other end on the other rank. Where `overlap_p2p` is false, a rank stays at a send or a receive
until it is over; otherwise it goes on, and stays at the wait.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from fractions import Fraction
from typing import NamedTuple

from attrs import Factory, define

from pipeline_schedule.actions import COMPUTE, SENDS, WAITS, Action, Overlap, Step, partner, transfer_of
from pipeline_schedule.schedule import Schedule

Time = int | float | Fraction


class Span(NamedTuple):
    """A step and its time. A transfer, named by its send, begins when both of its ends are ready for it."""

    step: Step
    start: Time
    end: Time


class Started(NamedTuple):
    """A rank's end of a transfer that is not over."""

    send: Action
    """The transfer, named by its send."""
    other: int
    """The rank at the other end."""
    start: Time


@define
class RankState:
    """How far a rank has come."""

    steps: tuple[Step, ...]
    position: int = 0
    """The step that the rank is at; the number of steps if it has done all."""
    clock: Time = 0
    started: deque[Started] = Factory(deque)
    """Transfers that were started and are not over, in order."""
    awaited: Action | None = None
    """The transfer that the rank stays for, named by its send."""
    last_end: Time = 0
    """When the last transfer that is over was over."""
    computations: list[Span] = Factory(list)

    @property
    def finished(self) -> bool:
        """Whether the rank has done all its steps."""
        return self.position == len(self.steps)


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
    compute_time: Callable[[Step], Time]
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
            if isinstance(step, Overlap) or step.kind in COMPUTE:
                start = rank.clock
                rank.clock = start + self.compute_time(step)
                rank.computations.append(Span(step, start, rank.clock))
            else:
                if rank.awaited is None:
                    rank.awaited = self._begin(number, rank, step)
                if rank.awaited is not None:
                    span = self.transfers.get(rank.awaited)
                    if span is None:
                        return
                    if span.end > rank.clock:
                        rank.clock = span.end
                    rank.awaited = None
            rank.position += 1

    def _begin(self, number: int, rank: RankState, action: Action) -> Action | None:
        """Start a transfer, if the action is not a wait; the transfer that the rank must stay for."""
        if action.kind in WAITS:
            return transfer_of(action)
        other = partner(action)
        send = action if action.kind in SENDS else other
        rank.started.append(Started(send, self.schedule.placement[other.stage], rank.clock))
        self._transfer(number)
        return None if self.schedule.overlap_p2p else send

    def _transfer(self, number: int) -> None:
        """Do the transfers that stand first on both of their ranks, beginning with this one's."""
        changed = [number]
        while changed:
            rank = self.ranks[changed[-1]]
            mine = rank.started[0] if rank.started else None
            if mine is None or not (theirs := self.ranks[mine.other].started) or theirs[0].send != mine.send:
                changed.pop()
                continue
            other = self.ranks[mine.other]
            start = max(mine.start, theirs[0].start, rank.last_end, other.last_end)
            rank.last_end = other.last_end = end = start + self.transfer_time(mine.send)
            self.transfers[mine.send] = Span(mine.send, start, end)
            rank.started.popleft()
            theirs.popleft()
            self._awake.append(mine.other)
            if changed[-1] != number:
                self._awake.append(changed[-1])
            changed.append(mine.other)
