"""Every schedule by its name."""

from __future__ import annotations

from collections.abc import Callable

from pipeline_schedule.classic import gpipe, interleaved_1f1b, one_f_one_b
from pipeline_schedule.schedule import Schedule
from pipeline_schedule.sizes import check_sizes
from pipeline_schedule.zero_bubble import zb_h1, zb_v

_FIXED: dict[str, tuple[Callable[[int, int], Schedule], int]] = {
    "gpipe": (gpipe, 1),
    "1f1b": (one_f_one_b, 1),
    "zbh1": (zb_h1, 1),
    "zbv": (zb_v, 2),
}
"""The schedules whose number of chunks on each rank is fixed: how they are made, and that number."""

SCHEDULE_NAMES = ("gpipe", "1f1b", "interleaved", "zbh1", "zbv")
"""What `generate` can make."""


def generate(name: str | None, stages: int, microbatches: int, chunks: int | None = None) -> Schedule:
    """A schedule by its name.

    Args:
        name: one of `SCHEDULE_NAMES`; None takes 1f1b for one chunk and interleaved for more.
        stages: pipeline stages, one for each rank.
        microbatches: micro-batches of a step.
        chunks: model chunks on each rank; None takes what the schedule has, and 1 for interleaved.

    Raises:
        ValueError: an unknown name, a number below 1, or chunks that the schedule does not have.
        TypeError: a number that is not an int.
    """
    if chunks is not None:
        check_sizes(chunks=chunks)
    if name is None:
        name = "1f1b" if chunks in (None, 1) else "interleaved"
    if name == "interleaved":
        return interleaved_1f1b(stages, 1 if chunks is None else chunks, microbatches)
    if name not in _FIXED:
        raise ValueError(f"there is no schedule {name!r}: choose one of {', '.join(SCHEDULE_NAMES)}")
    make, has = _FIXED[name]
    if chunks not in (None, has):
        raise ValueError(
            f"chunks = {chunks} does not fit the schedule {name}, which has {has} on each rank: leave chunks out, or "
            "choose interleaved, which takes any number"
        )
    return make(stages, microbatches)
