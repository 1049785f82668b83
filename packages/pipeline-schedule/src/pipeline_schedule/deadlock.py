"""Ranks that wait for each other: finding a shortest circle among those that a replay left stuck."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from attrs import frozen

from pipeline_schedule.actions import Action, Together, holds, partner, transfer_of
from pipeline_schedule.problems import Place, Problem, Waiting
from pipeline_schedule.replay import Replay

Node = int | Action
"""In the graph of waiting: a rank, or a transfer, which is named by its send."""


def find_deadlock(replay: Replay) -> Problem | None:
    """The deadlock in which a replay ended, or None if all ranks finished."""
    stuck = [number for number, rank in enumerate(replay.ranks) if not rank.finished]
    if not stuck:
        return None
    graph = _Graph(replay)
    starts: list[Node] = [*stuck, *(rank.started[0].send for rank in replay.ranks if rank.started)]
    cycle = min(filter(None, map(graph.shortest_cycle, starts)), key=len)
    first = cycle[0].step
    message = "deadlock: " + "; ".join(map(str, cycle))
    return Problem(message, first.rank, first.position, first.step, tuple(cycle))


@frozen
class _Graph:
    """Who waits for whom."""

    replay: Replay

    def shortest_cycle(self, start: Node) -> list[Waiting]:
        """The links of a shortest circle through a node; empty if it is in none."""
        reached: dict[Node, tuple[Node, Place | None]] = {}
        queue: deque[Node] = deque([start])
        while queue and start not in reached:
            node = queue.popleft()
            for awaited, held in self._awaited(node):
                if awaited not in reached:
                    reached[awaited] = (node, held)
                    queue.append(awaited)
        if start not in reached:
            return []
        path = [reached[start]]
        while path[-1][0] != start:
            path.append(reached[path[-1][0]])
        return self._links(path[::-1])

    def _awaited(self, node: Node) -> Iterator[tuple[Node, Place | None]]:
        """The nodes that a node waits for; for a transfer, also which end of it is held up."""
        if isinstance(node, int):
            step = self._current(node).step
            assert isinstance(step, Action | Together)
            for action in step.transfers if isinstance(step, Together) else (step,):
                if (send := transfer_of(action)) not in self.replay.transfers:
                    yield send, None
            return
        for action in (node, partner(node)):
            number = self.replay.schedule.placement[action.stage]
            rank = self.replay.ranks[number]
            first = [started.send for started in rank.first()]
            if all(started.send != node for started in rank.started):
                yield number, self._place(number, action)
            elif node not in first:
                yield from ((send, self._place(number, action)) for send in first)

    def _links(self, path: list[tuple[Node, Place | None]]) -> list[Waiting]:
        """A circle of nodes, each with the end of it that is held up, as one link for each transfer."""
        links = []
        for index, (node, held) in enumerate(path):
            if isinstance(node, int) or held is None:
                continue
            before, held_before = path[index - 1]
            if isinstance(before, int):
                step = self._current(before)
            else:
                assert held_before is not None
                step = self._end_on(node, held_before.rank)
            links.append(Waiting(step, held))
        return links

    def _current(self, number: int) -> Place:
        rank = self.replay.ranks[number]
        return Place(number, rank.position, rank.steps[rank.position])

    def _end_on(self, transfer: Action, number: int) -> Place:
        """Where a rank started its end of a transfer."""
        here = transfer if self.replay.schedule.placement[transfer.stage] == number else partner(transfer)
        return self._place(number, here)

    def _place(self, number: int, action: Action) -> Place:
        program = self.replay.schedule.programs[number]
        return Place(number, next(position for position, step in enumerate(program) if holds(step, action)), action)
