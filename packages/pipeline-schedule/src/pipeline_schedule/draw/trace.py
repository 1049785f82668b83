"""A timeline as a trace file for Perfetto (https://ui.perfetto.dev) and Chrome's chrome://tracing.

The format is Chrome's "Trace Event Format" in its JSON object form.
"""

from __future__ import annotations

from typing import Any

from pipeline_schedule.actions import Kind
from pipeline_schedule.draw.bars import bars, headline, moves
from pipeline_schedule.simulate import Timeline


def as_trace(timeline: Timeline, *, microseconds_per_unit: float = 1000.0) -> dict[str, Any]:
    """The timeline as a dictionary for `json.dump`.

    Each rank is a process with two threads: 0 its computations, 1 the transfers that it sends. An arrow leads from
    each transfer to the computation that uses it. Of a backward and a forward that overlap, the forward is on thread 2.

    Args:
        timeline: what to show.
        microseconds_per_unit: how many microseconds of the trace one unit of the costs is.

    Raises:
        ValueError: `microseconds_per_unit` is not above 0.
    """
    if not microseconds_per_unit > 0:
        raise ValueError(f"microseconds_per_unit = {microseconds_per_unit} must be above 0")

    def event(name: str, phase: str, rank: int, thread: int, **more: object) -> dict[str, Any]:
        return {"name": name, "ph": phase, "pid": rank, "tid": thread, **more}

    def at(time: Any) -> float:
        return float(time) * microseconds_per_unit

    events = []
    for rank in range(timeline.schedule.num_ranks):
        events.append(event("process_name", "M", rank, 0, args={"name": f"rank {rank}"}))
        for thread, name in enumerate(("compute", "send", "forward beside backward")):
            events.append(event("thread_name", "M", rank, thread, args={"name": name}))
    for bar in bars(timeline):
        thread = 2 if bar.beside is not None and bar.action.kind is Kind.FORWARD else 0
        span = {"ts": at(bar.start), "dur": at(bar.end) - at(bar.start), "cat": bar.action.kind.value}
        arguments = {"stage": bar.action.stage, "chunk": bar.chunk, "microbatch": bar.action.microbatch}
        events.append(event(str(bar.action), "X", bar.rank, thread, **span, args=arguments))
    for number, move in enumerate(moves(timeline)):
        span = {"ts": at(move.start), "dur": at(move.end) - at(move.start), "cat": move.send.kind.value}
        arguments = {"microbatch": move.send.microbatch, "receiver": move.receiver}
        events.append(event(str(move.send), "X", move.sender, 1, **span, args=arguments))
        arrow = {"cat": "transfer", "id": number}
        events.append(event("transfer", "s", move.sender, 1, ts=at(move.start), **arrow))
        events.append(event("transfer", "f", move.receiver, 0, ts=at(move.end), bp="e", **arrow))
    return {"displayTimeUnit": "ms", "otherData": {"title": headline(timeline)}, "traceEvents": events}
