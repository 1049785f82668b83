"""What can be wrong with a schedule, as data."""

from __future__ import annotations

from attrs import frozen

from pipeline_schedule.actions import Step


@frozen
class Place:
    """A step in a rank's program: the rank, the position from 0, and the step."""

    rank: int
    position: int
    step: Step

    def __str__(self) -> str:
        return f"{self.step} (rank {self.rank}, step {self.position})"


@frozen
class Waiting:
    """One link in a circle of waiting: a step that cannot be done before another one, on the same or another rank."""

    step: Place
    awaited: Place

    def __str__(self) -> str:
        return f"{self.step} waits for {self.awaited}"


@frozen
class Problem:
    """One thing that is wrong.

    Attributes:
        message: the rule that is broken, with the actions, ranks and positions in it.
        rank: the rank whose program is wrong; None if the placement is.
        position: the position in that program of the step at fault; None where a step is missing.
        step: the step at fault, or the one that is missing.
        cycle: for a deadlock, a shortest circle of waiting steps; each waits for one that comes after the next.
    """

    message: str
    rank: int | None = None
    position: int | None = None
    step: Step | None = None
    cycle: tuple[Waiting, ...] = ()

    def __str__(self) -> str:
        return self.message


class ScheduleError(ValueError):
    """A schedule that cannot be run. `problems` holds everything that was found wrong with it."""

    def __init__(self, problems: tuple[Problem, ...]) -> None:
        super().__init__(problems)
        self.problems = problems

    def __str__(self) -> str:
        shown = [problem.message for problem in self.problems[:_SHOWN]]
        if len(self.problems) > _SHOWN:
            shown.append(f"and {len(self.problems) - _SHOWN} more problems")
        return "\n".join(shown)


_SHOWN = 10
