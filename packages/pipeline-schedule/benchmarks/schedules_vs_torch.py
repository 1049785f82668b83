"""How long schedules with their transfers take to make, against torch.distributed.pipelining; and to check.

    pip install ./packages/pipeline-schedule torch
    python packages/pipeline-schedule/benchmarks/schedules_vs_torch.py

PyTorch makes a schedule where its class is called, of stages; ours stand in for them and hold no module. Both put
transfers between the computations of all ranks. Processor time, the shortest of five, in turns.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

from pipeline_schedule import generate, validate
from torch.distributed.pipelining.schedules import ScheduleInterleaved1F1B, ScheduleZBVZeroBubble
from torch.distributed.pipelining.stage import _PipelineStageBase

CASES = [
    (ScheduleInterleaved1F1B, "interleaved", 8, 2, 64),
    (ScheduleInterleaved1F1B, "interleaved", 16, 4, 128),
    (ScheduleZBVZeroBubble, "zbv", 16, 2, 128),
]
REPEATS = 5


class StandIn(_PipelineStageBase):
    """A stage of rank 0 without a module: as much of one as a schedule asks for when it is made."""

    def __init__(self, stage: int, ranks: int, stages: int) -> None:
        self.stage_index, self.group_size, self.num_stages = stage, ranks, stages
        self.group_rank = 0
        self.has_backward = True
        self.group = self.submod = self.stage_index_to_group_rank = None
        self.device = "cpu"

    def _create_grad_recv_info(self, *arguments: object) -> None: ...
    def _prepare_forward_infra(self, *arguments: object) -> None: ...
    def _prepare_backward_infra(self, *arguments: object) -> None: ...


def shortest(*functions: Callable[[], object]) -> list[float]:
    """Milliseconds of processor time of each function, the shortest of some runs in turns."""
    best = [float("inf")] * len(functions)
    for _ in range(REPEATS):
        for number, function in enumerate(functions):
            start = time.process_time()
            function()
            best[number] = min(best[number], 1000 * (time.process_time() - start))
    return best


def main() -> None:
    """Print a line for each schedule."""
    for peer, name, ranks, chunks, microbatches in CASES:
        schedule = generate(name, ranks, microbatches, chunks)
        stages = [StandIn(stage, ranks, schedule.num_stages) for stage in schedule.stages[0]]
        made, checked, theirs = shortest(
            partial(generate, name, ranks, microbatches, chunks),
            partial(validate, schedule),
            partial(peer, stages, microbatches),
        )
        print(
            f"{name} {ranks} x {chunks} x {microbatches}, {sum(map(len, schedule.programs)):,} actions: "
            f"made in {made:.1f} ms, checked in {checked:.1f} ms; PyTorch makes it in {theirs:.0f} ms, "
            f"{theirs / made:.1f} times as long"
        )
    (made,) = shortest(partial(generate, "interleaved", 64, 1024, 4))
    print(f"interleaved 64 x 4 x 1024: made in {made:.0f} ms")


if __name__ == "__main__":
    main()
