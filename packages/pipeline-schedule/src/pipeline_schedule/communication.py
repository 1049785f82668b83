"""Putting sends and receives between computations, so that no order of arrival can block the ranks.

One global clock runs all ranks at once. In each turn, ranks whose inputs are there compute one step; then the values
that other ranks need are transferred, one after the other. A rank's program is what it sees of this one global order.
Such programs cannot deadlock, even where every send waits for its receive: of everything not yet done, the first in
the global order can always be done.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from pipeline_schedule.actions import Action, Computation, Kind, Overlap, Step, is_compute, new_action
from pipeline_schedule.collector import collector_paused
from pipeline_schedule.schedule import Placement


def compute_steps(programs: Iterable[Iterable[Step]]) -> Iterator[Iterator[Computation]]:
    """The programs without sends, receives and waits."""
    return (filter(is_compute, program) for program in programs)


def add_communication(
    orders: Iterable[Iterable[Computation]], placement: Placement, microbatches: int, *, in_step: bool = False
) -> tuple[tuple[Step, ...], ...]:
    """Each rank's program: its computations in the given order, and the sends and receives they need.

    Args:
        orders: the computations of each rank.
        placement: the rank of each virtual stage.
        microbatches: how many micro-batches there are.
        in_step: let the ranks compute forwards together and backwards together, in turns. In an order made for that,
            such as interleaved 1F1B, ranks then never wait for each other's blocking transfers, however long a
            forward and a backward take; without it they do, unless both take equally long.

    Raises:
        ValueError: no rank can go on, because computations wait for each other in a circle or for one that is
            missing.
    """
    with collector_paused():
        clock = _Clock(orders, placement, microbatches)
        last_kind = 0
        while any(clock.left):
            ready = clock.ready_steps()
            if in_step:
                last_kind = next((kind for kind in _after(last_kind) if ready[kind]), last_kind)
                ready = [ready[last_kind]]
            if not any(ready):
                raise ValueError(_stuck(clock.left))
            clock.turn([entry for entries in ready for entry in entries])
        return tuple(map(tuple, clock.programs))


def _after(kind: int) -> tuple[int, ...]:
    """The positions in what `ready_steps` returns, those after `kind` first."""
    return tuple((kind + i) % 3 for i in (1, 2, 3))


class _Way(NamedTuple):
    """Where the values of a stage go: to which stage, what has arrived there, and the programs of both ends."""

    stage: int
    arrived: set[int]
    send: Kind
    receive: Kind
    sender: list[Step]
    receiver: list[Step]


# Members of an Enum class are slow to look up, and these are needed for each of a million actions.
_FORWARD, _BACKWARD_WEIGHT = Kind.FORWARD, Kind.BACKWARD_WEIGHT


class _Clock:
    """What has been computed and transferred up to now."""

    def __init__(self, orders: Iterable[Iterable[Computation]], placement: Placement, microbatches: int) -> None:
        self.left = [list(order)[::-1] for order in orders]
        self.programs: list[list[Step]] = [[] for _ in self.left]
        # Even ranks send before odd ones: 0 to 1 beside 2 to 3, then 1 to 2 beside 3 to 4, and not one by one.
        self.ranks = [*range(0, len(self.left), 2), *range(1, len(self.left), 2)]
        # The micro-batches whose input of a stage, or gradient of its output, is on the stage's rank. The first
        # stage's inputs come from the data, the last one's gradients from the loss.
        every = set(range(microbatches))
        self.activations = [every, *(set[int]() for _ in placement[1:])]
        self.gradients = [*(set[int]() for _ in placement[1:]), every]
        self.onward = self._ways(placement, Kind.SEND_ACTIVATION, Kind.RECV_ACTIVATION, self.activations, 1)
        self.back = self._ways(placement, Kind.SEND_GRADIENT, Kind.RECV_GRADIENT, self.gradients, -1)

    def _ways(
        self, placement: Placement, send: Kind, receive: Kind, arrived: Sequence[set[int]], step: int
    ) -> list[_Way | None]:
        """For each stage the way of what it makes to the stage that is `step` further."""
        ways: list[_Way | None] = []
        for stage, rank in enumerate(placement):
            target = stage + step
            if 0 <= target < len(placement):
                receiver = self.programs[placement[target]]
                ways.append(_Way(target, arrived[target], send, receive, self.programs[rank], receiver))
            else:
                ways.append(None)
        return ways

    def ready_steps(self) -> list[list[tuple[int, Computation]]]:
        """The ranks whose next step has its inputs, and that step: forwards, overlapping pairs, backwards."""
        forwards: list[tuple[int, Computation]] = []
        overlaps: list[tuple[int, Computation]] = []
        backwards: list[tuple[int, Computation]] = []
        activations, gradients, left = self.activations, self.gradients, self.left
        for rank in self.ranks:
            if not left[rank]:
                continue
            step = left[rank][-1]
            if isinstance(step, Overlap):
                (_, stage, microbatch), (_, forward_stage, forward_microbatch) = step
                if microbatch in gradients[stage] and forward_microbatch in activations[forward_stage]:
                    overlaps.append((rank, step))
                continue
            kind, stage, microbatch = step
            if kind is _FORWARD:
                if microbatch in activations[stage]:
                    forwards.append((rank, step))
            elif kind is _BACKWARD_WEIGHT or microbatch in gradients[stage]:
                backwards.append((rank, step))
        return [forwards, overlaps, backwards]

    def turn(self, steps: Sequence[tuple[int, Computation]]) -> None:
        """Do steps on their ranks, all of them before any value that they make is transferred."""
        for rank, step in steps:
            self.programs[rank].append(step)
            self.left[rank].pop()
        for _, step in steps:
            if isinstance(step, Overlap):
                self._deliver(step.backward)
                self._deliver(step.forward)
            else:
                self._deliver(step)

    def _deliver(self, action: Action) -> None:
        """Bring the value that an action has made to where it is needed."""
        kind, stage, microbatch = action
        if kind is _FORWARD:
            way = self.onward[stage]
        elif kind is _BACKWARD_WEIGHT:
            return
        else:
            way = self.back[stage]
        if way is None:
            return
        way.arrived.add(microbatch)
        if way.sender is not way.receiver:
            way.sender.append(new_action((way.send, stage, microbatch)))
            way.receiver.append(new_action((way.receive, way.stage, microbatch)))


def _stuck(left: Sequence[Sequence[Computation]]) -> str:
    ranks = "; ".join(f"rank {rank} at {steps[-1]}" for rank, steps in enumerate(left) if steps)
    return (
        f"these computations cannot be done in this order: every rank waits for a value of another one ({ranks}); "
        "each input must be computed on some rank, and not after what it leads to"
    )
