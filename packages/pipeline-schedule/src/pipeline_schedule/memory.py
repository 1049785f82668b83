"""How many activations each rank keeps at most."""

from __future__ import annotations

from pipeline_schedule.actions import Kind, flat
from pipeline_schedule.schedule import Schedule


def peak_activations(schedule: Schedule) -> tuple[int, ...]:
    """The largest number of live activations on each rank, one activation being one micro-batch in one virtual stage.

    It is live from its forward to the end of its backward or, where that is split, of its weights' half. Of a
    backward and a forward that overlap both are live. The count follows from the order alone, whatever the times.
    """
    peaks = []
    for program in schedule.programs:
        live = peak = 0
        for kind, _, _ in flat(program):
            if kind is Kind.FORWARD:
                live += 1
                if live > peak:
                    peak = live
            elif kind is Kind.BACKWARD or kind is Kind.BACKWARD_WEIGHT:
                live -= 1
        peaks.append(peak)
    return tuple(peaks)
