"""Which layers each pipeline stage holds: pipeline_stage, pp_interleave_num and offset, as lists of layers.

Source: the mindformers 2.1.0 wheel, parallel_core/training_graph/transformer/utils.py (`LayerSetting`): stage j of
chunk i holds num_layers // (stages · chunks) + offset[i][j] layers, and offsets add up to the remainder; and
`zero_bubble_v`, whose second chunk runs up the stages again.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

from attrs import frozen

from parallel_config.migrate.degrees import Degrees
from parallel_config.migrate.draft import Draft, Kind
from parallel_config.stages import Range, as_items, stage_ranks

_PIPELINE = "parallel.pipeline_config"
_OFFSET = "model.model_config.offset"
_CHUNKS = "model.model_config.pp_interleave_num"
_PLAIN = ("1f1b", "gpipe", "zero_bubble_v")
_ONE_STAGE = "pipeline_stage is 1"


@frozen
class Placement:
    """The layers of each virtual stage, closed ranges, and its chunk and physical stage."""

    ranges: tuple[Range, ...]
    chunks: tuple[int, ...]
    stages: tuple[int, ...]

    @property
    def num_layers(self) -> int:
        """Layers in all."""
        return self.ranges[-1][1] + 1

    def virtual_stages(self) -> Iterator[tuple[int, int, Range]]:
        """Chunk, physical stage and layers of each."""
        return zip(self.chunks, self.stages, self.ranges, strict=True)


def placement(draft: Draft, found: Degrees, num_layers: int) -> Placement | None:
    """Carry the pipeline; returns where the layers are, None where the file is refused for that."""
    pp = found.pp
    if found.split:
        draft.carry("parallel_config.pipeline_stage", "parallelism.pipeline_parallel", pp)
    scheduler = _scheduler(draft, pp)
    chunks = _chunks(draft, pp)
    zero_bubble = "zbv" if scheduler == "zero_bubble_v" else "none"
    if pp == 1:
        draft.leave(_OFFSET, _ONE_STAGE)
        return Placement(((0, num_layers - 1),), (0,), (0,))
    if zero_bubble == "zbv" and chunks != 2:
        draft.refuse(f"{_PIPELINE}.pipeline_scheduler", "zero_bubble_v needs pp_interleave_num 2", "Mend the old file.")
        zero_bubble = "none"
    counts = _counts(draft, pp, chunks, num_layers)
    if not counts:
        return None
    ranks = stage_ranks(pp, chunks, zero_bubble)
    order = [(number // pp, rank) for number, rank in enumerate(ranks)]
    ends = [-1]
    for chunk, stage in order:
        ends.append(ends[-1] + counts[chunk][stage])
    ranges = tuple((before + 1, end) for before, end in itertools.pairwise(ends))
    if zero_bubble == "zbv":
        draft.carry(f"{_PIPELINE}.pipeline_scheduler", "parallelism.pipeline_parallel_zero_bubble", "zbv")
    even = len({end - first for first, end in ranges}) == 1
    layers: Any = "auto" if even else as_items(ranges, ranks)
    how = f"{num_layers} layers over {pp} stages" + (f" · {chunks} chunks" if chunks > 1 else "")
    draft.carry(_OFFSET, "parallelism.pipeline_parallel_layers_per_stage", layers, how)
    return Placement(ranges, tuple(chunk for chunk, _ in order), ranks)


def _scheduler(draft: Draft, pp: int) -> str:
    """The schedule's name; one that does not exist here is left behind: 1F1B, interleaved or not, computes the same."""
    path = f"{_PIPELINE}.pipeline_scheduler"
    name = draft.get(path, "1f1b")
    if pp == 1:
        draft.leave(path, _ONE_STAGE)
    elif name == "1f1b":
        draft.leave(path, "it is what pipelines do here")
    elif name == "gpipe":
        draft.carry(path, "parallelism.pipeline_parallel_schedule", "gpipe")
    elif name not in _PLAIN:
        why = f"the schedule {name} does not exist here: 1F1B, interleaved with several chunks, trains the same"
        draft.leave(path, why, Kind.COST)
    return str(name)


def _chunks(draft: Draft, pp: int) -> int:
    switch = f"{_PIPELINE}.pipeline_interleave"
    written = draft.integer(_CHUNKS, 1)
    if pp == 1:
        for path in (switch, _CHUNKS):
            draft.leave(path, _ONE_STAGE)
        return 1
    if not draft.switch(switch, False):
        draft.leave(switch, "there is one chunk on each stage")
        draft.leave(_CHUNKS, "pipeline_interleave is not true, and pp_interleave_num has no effect without it")
        return 1
    draft.carry((_CHUNKS, switch), "parallelism.pipeline_parallel_interleave_num", written)
    return written


def _counts(draft: Draft, pp: int, chunks: int, num_layers: int) -> list[list[int]]:
    """Layers by chunk and stage; empty where the file is refused for them."""
    base, rest = divmod(num_layers, pp * chunks)
    if base < 1:
        rule = f"has {pp} stages · {chunks} chunks, more than num_layers {num_layers}"
        draft.refuse("parallel_config.pipeline_stage", rule, "Here each stage has at least one layer.")
        return []
    grid = _grid(draft.get(_OFFSET, 0), pp, chunks)
    what = f"num_layers {num_layers} over {pp} stages · {chunks} chunks"
    if grid is None:
        shapes = f"a number, a list of {pp}, or {chunks} lists of {pp}"
        draft.refuse(_OFFSET, f"must be {shapes} for {what}", "Mend the old file first.")
    elif sum(map(sum, grid)) != rest:
        rule = f"must add up to {rest} for {what}, {base} each, and adds up to {sum(map(sum, grid))}"
        draft.refuse(_OFFSET, rule, "Mend the old file first.")
    elif any(base + extra < 1 for row in grid for extra in row):
        draft.refuse(_OFFSET, f"leaves a stage without layers ({what})", "Here each stage has at least one layer.")
    else:
        return [[base + extra for extra in row] for row in grid]
    return []


def _grid(offset: Any, pp: int, chunks: int) -> list[list[int]] | None:
    """The offset for each chunk and stage; None for another shape."""
    if _is_integer(offset):
        return [[offset] * pp for _ in range(chunks)]
    if not isinstance(offset, list):
        return None
    rows = [offset] * chunks if all(map(_is_integer, offset)) else offset
    fits = len(rows) == chunks and all(
        isinstance(row, list) and len(row) == pp and all(map(_is_integer, row)) for row in rows
    )
    return [list(row) for row in rows] if fits else None


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
