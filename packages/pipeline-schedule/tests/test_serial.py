"""Reading a schedule from a dictionary: what is refused, and how it is said."""

from __future__ import annotations

from typing import Any

import pytest
from pipeline_schedule import (
    Action,
    Schedule,
    ScheduleError,
    gpipe,
    interleaved_1f1b,
    overlap_b_f,
    schedule_from_dict,
    schedule_to_dict,
    validate,
)


def test_what_is_written() -> None:
    assert schedule_to_dict(gpipe(1, 1)) == {
        "name": "GPipe",
        "placement": [0],
        "microbatches": 1,
        "overlap_p2p": False,
        "programs": [[["forward", 0, 0], ["backward", 0, 0]]],
    }
    pair = schedule_to_dict(overlap_b_f(interleaved_1f1b(1, 1, 2)))["programs"][0][1]
    assert pair == [["backward", 0, 0], ["forward", 0, 1]]


@pytest.mark.parametrize(
    "step", [["backwards", 0, 0], ["forward", 0], ["forward", "0", 0], "forward", 3, [["forward", 0, 0]], [[], []]]
)
def test_wrong_steps(step: object) -> None:
    data = schedule_to_dict(gpipe(2, 1))
    data["programs"][1][1] = step
    with pytest.raises(ValueError, match=r"step 1 of rank 1 is .*; a step is .* with a kind of forward, backward, "):
        schedule_from_dict(data)


def test_wrong_keys() -> None:
    data: dict[str, Any] = schedule_to_dict(gpipe(1, 1))
    del data["placement"]
    data["place"] = [0]
    with pytest.raises(ValueError, match="has the keys microbatches, name, overlap_p2p, placement, programs, and not "):
        schedule_from_dict(data)


def test_a_kind_written_as_text_is_the_kind() -> None:
    """`Action('forward', 0, 0)`: as data it is the same, and a schedule of such is refused in words."""
    programs = ((Action("forward", 0, 0), Action("backward", 0, 0)),)  # type: ignore[arg-type]
    written = Schedule(name="one", placement=(0,), microbatches=1, programs=programs)
    right = gpipe(1, 1)
    assert schedule_to_dict(written)["programs"] == schedule_to_dict(right)["programs"]
    with pytest.raises(ScheduleError, match=r"must be an Action with a Kind .Kind.FORWARD, not 'forward'."):
        validate(written)
