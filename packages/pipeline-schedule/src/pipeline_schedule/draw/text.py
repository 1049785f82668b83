"""A timeline as text: a Gantt chart for the terminal, and a table of what each rank costs."""

from __future__ import annotations

import math
from fractions import Fraction

from attrs import frozen

from pipeline_schedule.actions import Action, Computation, Kind, Overlap
from pipeline_schedule.draw.bars import LETTERS, NAMES, headline, kinds_used, number, percent
from pipeline_schedule.replay import Time
from pipeline_schedule.simulate import Timeline


def as_text(timeline: Timeline, *, width: int = 110) -> str:
    """The Gantt chart: a row for each rank, time to the right.

    A bar is named by its kind (F forward, B backward, I and W the input and weight halves of a backward), its
    micro-batch and, where ranks hold several chunks, a letter for the chunk. A chart wider than `width` columns goes
    on below. Times that are no multiples of the shortest computation are rounded to columns.

    Raises:
        ValueError: a width below 40.
    """
    chart = _Chart.of(timeline, width)
    rows = [chart.row(rank) for rank in range(timeline.schedule.num_ranks)]
    names = [f"rank {rank}".ljust(chart.margin) for rank in range(len(rows))]
    blocks = []
    for start in range(0, max(map(len, rows)), chart.room):
        parts = (row[start : start + chart.room] for row in rows)
        blocks.append("\n".join((name + part).rstrip() for name, part in zip(names, parts, strict=True)))
    return "\n\n".join(blocks)


def as_report(timeline: Timeline, *, width: int = 110, max_lines: int = 200) -> str:
    """The Gantt chart with a headline, a legend, and each rank's idle share and peak activations.

    A chart of more than `max_lines` lines is left out.

    Raises:
        ValueError: a width below 40.
    """
    lines = _Chart.of(timeline, width).lines
    if lines > max_lines:
        picture = f"(The chart would have {lines:,} lines and is left out; draw it as a picture or a trace.)"
    else:
        picture = f"{as_text(timeline, width=width)}\n\n{_legend(timeline)}"
    table = [f"{'rank':>4} {'idle':>8} {'peak activations':>17}  virtual stages"]
    for rank, (idle, peak) in enumerate(zip(timeline.idle, timeline.peak_activations, strict=True)):
        stages = " ".join(map(str, timeline.schedule.stages[rank]))
        table.append(f"{rank:>4} {percent(float(idle)):>8} {peak:>17}  {stages}")
    return "\n".join([headline(timeline), "", picture, "", *table, "", f"makespan {number(timeline.makespan)}"])


@frozen
class _Chart:
    """How times become columns."""

    timeline: Timeline
    margin: int
    room: int
    columns_per_time: Fraction

    @classmethod
    def of(cls, timeline: Timeline, width: int) -> _Chart:
        if width < 40:
            raise ValueError(f"width = {width} must be at least 40 columns")
        schedule = timeline.schedule
        margin = len(f"rank {schedule.num_ranks - 1}") + 2
        # The shortest computation has room for the longest name and a space.
        times = [Fraction(span.end - span.start) for spans in timeline.computations for span in spans]
        shortest = min((time for time in times if time > 0), default=Fraction(1))
        longest = max(
            len(_label(timeline, Action(Kind.FORWARD, stage, schedule.microbatches - 1)))
            for stage in range(schedule.num_stages)
        )
        return cls(timeline, margin, width - margin, (longest + 1) / shortest)

    @property
    def lines(self) -> int:
        blocks = math.ceil(self.column(self.timeline.makespan) / self.room)
        return blocks * (self.timeline.schedule.num_ranks + 1)

    def column(self, time: Time) -> int:
        return round(Fraction(time) * self.columns_per_time)

    def row(self, rank: int) -> str:
        row = ""
        for step, start, end in self.timeline.computations[rank]:
            length = self.column(end) - self.column(start)
            # The last column of a bar stays empty, so that it does not run into the next one.
            bar = _label(self.timeline, step)[: max(length - 1, 0)].ljust(length - 1, "-")
            row = row.ljust(self.column(start)) + bar.ljust(length)
        return row.rstrip()


def _label(timeline: Timeline, step: Computation) -> str:
    if isinstance(step, Overlap):
        return _label(timeline, step.backward) + _label(timeline, step.forward)
    chunk = timeline.schedule.chunk(step.stage)
    letter = "" if timeline.schedule.num_chunks == 1 else chr(ord("a") + chunk) if chunk < 26 else f"c{chunk}"
    return f"{LETTERS[step.kind]}{step.microbatch}{letter}"


def _legend(timeline: Timeline) -> str:
    kinds = ", ".join(f"{LETTERS[kind]} {NAMES[kind]}" for kind in kinds_used(timeline))
    chunks = ", then the chunk as a letter" if timeline.schedule.num_chunks > 1 else ""
    return f"{kinds}; then the micro-batch{chunks}."
