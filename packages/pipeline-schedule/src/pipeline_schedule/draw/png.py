"""A timeline as a PNG picture, drawn with matplotlib (the extra `plot`)."""

from __future__ import annotations

from os import PathLike
from typing import Any

from pipeline_schedule.actions import Kind
from pipeline_schedule.draw.bars import NAMES, bars, color, headline, kinds_used, moves, number, percent
from pipeline_schedule.simulate import Timeline


def save_png(timeline: Timeline, path: str | PathLike[str], *, dots_per_inch: int = 150) -> None:
    """Write the Gantt chart into a PNG file: a row for each rank, a bar for each computation.

    Colours are those of the SVG drawing. No window is opened and no display needed.

    Raises:
        ImportError: matplotlib is not installed.
        OSError: the file cannot be written.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
        from matplotlib.patches import Patch
    except ImportError as error:
        raise ImportError("a PNG is drawn with matplotlib: pip install 'pipeline-schedule[plot]'") from error

    ranks, chunks = timeline.schedule.num_ranks, timeline.schedule.num_chunks
    figure = Figure(figsize=(13, 1.6 + 0.36 * ranks), layout="constrained")
    FigureCanvasAgg(figure)
    axes: Any = figure.add_subplot()
    _draw_bars(axes, timeline)
    for move in moves(timeline):
        if move.end > move.start:
            ends = [float(move.start), float(move.end)], [move.sender, move.receiver]
            axes.plot(*ends, color="#7b8794", linewidth=0.7, alpha=0.7)
    axes.set_yticks(
        range(ranks), [f"rank {rank} ({percent(float(idle))} idle)" for rank, idle in enumerate(timeline.idle)]
    )
    axes.set_ylim(ranks - 0.4, -0.6)
    axes.set_xlim(0, float(timeline.makespan) or 1)
    axes.set_xlabel(f"time (makespan {number(timeline.makespan)})")
    axes.set_title(headline(timeline), loc="left")
    axes.spines[["top", "right"]].set_visible(False)
    patches = [Patch(color=color(kind, 0, chunks), label=NAMES[kind]) for kind in kinds_used(timeline)]
    figure.legend(handles=patches, loc="outside lower left", ncols=len(patches), frameon=False)
    figure.savefig(path, dpi=dots_per_inch, format="png")


def _draw_bars(axes: Any, timeline: Timeline) -> None:
    chunks = timeline.schedule.num_chunks
    # One artist for all bars of a colour in a row: thousands of single ones take minutes.
    rows: dict[tuple[float, float, str], list[tuple[float, float]]] = {}
    for bar in bars(timeline):
        height = 0.8 if bar.beside is None else 0.4
        top = bar.rank - 0.4 + (height if bar.beside is not None and bar.action.kind is Kind.FORWARD else 0)
        start, length = float(bar.start), float(bar.end - bar.start)
        rows.setdefault((top, height, color(bar.action.kind, bar.chunk, chunks)), []).append((start, length))
        if length * 80 > float(timeline.makespan):
            ink = "white" if bar.chunk == 0 else "#1f2933"
            place = {"ha": "center", "va": "center", "fontsize": 7, "color": ink}
            axes.text(start + length / 2, top + height / 2, str(bar.action.microbatch), **place)
    for (top, height, fill), spans in rows.items():
        axes.broken_barh(spans, (top, height), facecolors=fill, edgecolors="white", linewidth=0.5)
