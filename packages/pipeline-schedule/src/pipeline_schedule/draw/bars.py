"""What the drawings have in common: a bar for each computation, its name and its colour."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from pipeline_schedule.actions import Action, Kind, Overlap, partner
from pipeline_schedule.replay import Time
from pipeline_schedule.simulate import Timeline

LETTERS = {Kind.FORWARD: "F", Kind.BACKWARD: "B", Kind.BACKWARD_INPUT: "I", Kind.BACKWARD_WEIGHT: "W"}
NAMES = {
    Kind.FORWARD: "forward",
    Kind.BACKWARD: "backward",
    Kind.BACKWARD_INPUT: "input half of a backward",
    Kind.BACKWARD_WEIGHT: "weight half",
}
_COLORS = {
    Kind.FORWARD: (0x4C, 0x8B, 0xD6),
    Kind.BACKWARD: (0x4F, 0xA8, 0x6B),
    Kind.BACKWARD_INPUT: (0x3F, 0xB0, 0xA8),
    Kind.BACKWARD_WEIGHT: (0xE0, 0x9A, 0x3E),
}


class Bar(NamedTuple):
    """A computation in a drawing."""

    rank: int
    start: Time
    end: Time
    action: Action
    chunk: int
    beside: Action | None
    """What runs beside it."""


def bars(timeline: Timeline) -> Iterator[Bar]:
    """The computations of all ranks; two that overlap have a bar each, with the same times."""
    chunks = {stage: chunk for held in timeline.schedule.stages for chunk, stage in enumerate(held)}
    for rank, spans in enumerate(timeline.computations):
        for step, start, end in spans:
            if isinstance(step, Overlap):
                backward, forward = step
                yield Bar(rank, start, end, backward, chunks[backward.stage], forward)
                yield Bar(rank, start, end, forward, chunks[forward.stage], backward)
            else:
                yield Bar(rank, start, end, step, chunks[step.stage], None)


class Move(NamedTuple):
    """A transfer in a drawing."""

    send: Action
    sender: int
    receiver: int
    start: Time
    end: Time


def moves(timeline: Timeline) -> Iterator[Move]:
    """The transfers of all ranks."""
    placement = timeline.schedule.placement
    for send, start, end in timeline.transfers:
        assert isinstance(send, Action)
        yield Move(send, placement[send.stage], placement[partner(send).stage], start, end)


def color(kind: Kind, chunk: int, num_chunks: int) -> str:
    """`#rrggbb`: a hue for each kind, lighter from the first chunk to the last."""
    light = 0.6 * chunk / max(num_chunks - 1, 1)
    return "#" + "".join(f"{round(value + (255 - value) * light):02x}" for value in _COLORS[kind])


def kinds_used(timeline: Timeline) -> list[Kind]:
    """The kinds of computations that a timeline has, in the order of `Kind`."""
    used = {bar.action.kind for bar in bars(timeline)}
    return [kind for kind in Kind if kind in used]


def headline(timeline: Timeline) -> str:
    """The schedule and its sizes in one line."""
    schedule = timeline.schedule
    chunks = f" x {schedule.num_chunks} chunks" if schedule.num_chunks > 1 else ""
    ranks, microbatches = schedule.num_ranks, schedule.microbatches
    return (
        f"{schedule.name}: {ranks} rank{'s' * (ranks > 1)}{chunks}, {microbatches} micro-batch"
        f"{'es' * (microbatches > 1)}"
    )


def percent(share: float) -> str:
    """A share as a percentage with one decimal."""
    return f"{100 * share:.1f} %"


def number(value: Time) -> str:
    """A time in a drawing."""
    return str(value) if isinstance(value, int) else f"{float(value):g}"
