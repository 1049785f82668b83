"""A timeline as a picture: the Gantt chart of a pipeline as SVG text."""

from __future__ import annotations

from collections.abc import Iterator
from xml.sax.saxutils import escape

from attrs import frozen

from pipeline_schedule.actions import Kind
from pipeline_schedule.draw.bars import NAMES, Bar, bars, color, headline, kinds_used, moves, number, percent
from pipeline_schedule.replay import Time
from pipeline_schedule.simulate import Timeline

_ROW = 34
_BAR = 28
_LEFT = 64
_RIGHT = 170
_TOP = 76
_CHART_WIDTH = (480, 1600)
_SHORTEST = 22
_ARROWS_SHOWN = 2000
_STYLE = (
    "text{font-family:system-ui,'Segoe UI',Helvetica,Arial,sans-serif;fill:#1f2933}"
    ".title{font-size:20px;font-weight:600}.sub{font-size:13px;fill:#52606d}"
    ".rank{font-size:13px;text-anchor:end}.bar{font-size:11px;text-anchor:middle;fill:#ffffff}"
    ".dark{fill:#1f2933}.key{font-size:12px}.grid{stroke:#e4e7eb}"
    ".arrow{stroke:#7b8794;stroke-width:1;fill:none;opacity:.7}"
)


def as_svg(timeline: Timeline) -> str:
    """The Gantt chart as an SVG document: a row for each rank, a bar for each computation, named by its micro-batch.

    The hue is the kind of computation, lighter for later chunks. Of a backward and a forward that overlap each has
    half of the height. Transfers that take time are lines from rank to rank, unless there are more than 2,000. At the
    right stand each rank's idle share and peak activations.
    """
    picture = _Picture.of(timeline)
    width, height = picture.width, picture.height
    title = escape(headline(timeline))
    facts = f"makespan {number(timeline.makespan)}; idle {percent(float(sum(timeline.idle) / len(timeline.idle)))}"
    size = f'width="{width}" height="{height}" viewBox="0 0 {width} {height}"'
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">',
            f"<title>{title}</title>",
            f"<style>{_STYLE}</style>",
            f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
            f'<text class="title" x="20" y="32">{title}</text>',
            f'<text class="sub" x="20" y="54">{facts} on average</text>',
            *picture.rows(),
            *map(picture.bar, bars(timeline)),
            *picture.arrows(),
            *picture.key(),
            "</svg>\n",
        ]
    )


@frozen
class _Picture:
    """How times and ranks become coordinates."""

    timeline: Timeline
    chart_width: float

    @classmethod
    def of(cls, timeline: Timeline) -> _Picture:
        """A chart in which the shortest computation has room for its name, if that is not too wide."""
        durations = [float(bar.end - bar.start) for bar in bars(timeline) if bar.end > bar.start]
        low, high = _CHART_WIDTH
        wanted = _SHORTEST * float(timeline.makespan) / min(durations, default=1.0)
        return cls(timeline, min(max(wanted, low), high))

    @property
    def width(self) -> int:
        return round(_LEFT + self.chart_width + _RIGHT)

    @property
    def height(self) -> int:
        return _TOP + self.timeline.schedule.num_ranks * _ROW + 56

    def x(self, time: Time) -> float:
        return _LEFT + self.chart_width * float(time) / (float(self.timeline.makespan) or 1.0)

    def rows(self) -> Iterator[str]:
        for rank, (idle, peak) in enumerate(zip(self.timeline.idle, self.timeline.peak_activations, strict=True)):
            y = _TOP + rank * _ROW
            middle = y + _BAR / 2 + 4
            right = _LEFT + self.chart_width
            yield f'<line class="grid" x1="{_LEFT}" y1="{y + _ROW - 3}" x2="{right:g}" y2="{y + _ROW - 3}"/>'
            yield f'<text class="rank" x="{_LEFT - 10}" y="{middle:g}">rank {rank}</text>'
            fact = f"{percent(float(idle))} idle, peak {peak}"
            yield f'<text class="sub" x="{right + 12:g}" y="{middle:g}">{fact}</text>'

    def bar(self, bar: Bar) -> str:
        y, height = float(_TOP + bar.rank * _ROW), float(_BAR)
        if bar.beside is not None:
            height /= 2
            y += height * (bar.action.kind is Kind.FORWARD)
        x, width = self.x(bar.start), self.x(bar.end) - self.x(bar.start)
        fill = color(bar.action.kind, bar.chunk, self.timeline.schedule.num_chunks)
        size = f'width="{max(width - 0.8, 0.2):.2f}" height="{height - 0.8:g}"'
        title = f"<title>{bar.action}, {number(bar.start)} to {number(bar.end)}</title>"
        parts = [f'<rect x="{x:.2f}" y="{y:g}" {size} rx="2" fill="{fill}">{title}</rect>']
        name = str(bar.action.microbatch)
        if width >= 7 * len(name) + 3:
            dark = " dark" if bar.chunk else ""
            middle = y + height / 2 + 4
            parts.append(f'<text class="bar{dark}" x="{x + width / 2:.2f}" y="{middle:g}">{name}</text>')
        return "".join(parts)

    def arrows(self) -> Iterator[str]:
        shown = [move for move in moves(self.timeline) if move.end > move.start]
        if len(shown) > _ARROWS_SHOWN:
            return
        for move in shown:
            ends = ((move.start, move.sender), (move.end, move.receiver))
            points = " ".join(f"{self.x(time):.2f},{_TOP + rank * _ROW + _BAR / 2:g}" for time, rank in ends)
            yield f'<polyline class="arrow" points="{points}"><title>{move.send}</title></polyline>'

    def key(self) -> Iterator[str]:
        y = self.height - 30
        x = float(_LEFT)
        for kind in kinds_used(self.timeline):
            text = NAMES[kind]
            yield f'<rect x="{x:g}" y="{y}" width="14" height="14" rx="3" fill="{color(kind, 0, 1)}"/>'
            yield f'<text class="key" x="{x + 20:g}" y="{y + 12}">{escape(text)}</text>'
            x += 40 + 7 * len(text)
        if self.timeline.schedule.num_chunks > 1:
            yield f'<text class="key sub" x="{x:g}" y="{y + 12}">lighter: later chunks</text>'
