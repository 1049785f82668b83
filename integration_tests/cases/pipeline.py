"""Pipelines of every schedule, alone and beside one or two other dimensions."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

from cases.case import Case
from cases.choosing import Draw, Meetings
from cases.model import TEXTS, Model

MICRO_BATCHES = {2: (1, 2, 5), 4: (1, 3, 4, 9)}
"""Fewer than the stages, as many, and a number that they do not divide."""
ROWS = {2: {1: 10, 2: 10, 5: 10}, 4: {1: 12, 3: 12, 4: 12, 9: 18}, 8: {1: 16, 7: 14, 8: 16, 17: 17}}
"""Of a global batch, by stages and micro-batches: few, because each takes time, and several in most micro-batches."""
BESIDE_PIPELINE: tuple[dict[str, Any], ...] = (
    {"dp_shard": 2},
    {"dp_replicate": 2},
    {"cp": 2, "method": "ulysses"},
    {"cp": 2, "method": "colossal", "asynchronous": True, "order": "zigzag"},
    {"tp": 2, "loss_parallel": True},
    {"tp": 2},
)
"""What a pipeline of two stages is crossed with on four ranks."""
PAGE_LAYERS = "['0-1, 4-8', '2-3, 9']"


def plans() -> Iterator[Case]:
    """Every number of stages and chunks with few and many micro-batches, then crossed with the other dimensions."""
    pipeline = Pipelines()
    for pp in MICRO_BATCHES:
        for chunks, micro_batches in itertools.product((1, 2, 3), MICRO_BATCHES[pp]):
            yield pipeline(pp, chunks, micro_batches, ROWS[pp][micro_batches])
            if micro_batches != 1:
                yield pipeline(pp, chunks, micro_batches, ROWS[pp][micro_batches], paired=True)
        for micro_batches in MICRO_BATCHES[pp]:
            yield pipeline(pp, 1, micro_batches, ROWS[pp][micro_batches], zero_bubble="zbh1")
            yield pipeline(pp, 2, micro_batches, ROWS[pp][micro_batches], zero_bubble="zbv")
        yield Case(pp=pp, accumulation=4, model=Model(dtype="float32", layers=4, batch=36))
    for number, degrees in enumerate(BESIDE_PIPELINE):
        for chunks, micro_batches in itertools.product((1, 2, 3), MICRO_BATCHES[2]):
            yield pipeline(2, chunks, micro_batches, 20, **degrees)
        yield pipeline(2, 1 + number % 3, 2 if number < 3 else 5, 20, paired=True, **degrees)
        yield pipeline(2, 1, 5, 20, zero_bubble="zbh1", **degrees)
        yield pipeline(2, 2, 5, 20, zero_bubble="zbv", **degrees)
    # Eight ranks share two cores: each of these crosses something that four ranks cannot.
    for chunks, micro_batches in ((1, 1), (2, 7), (3, 8), (1, 17)):
        yield pipeline(8, chunks, micro_batches, ROWS[8][micro_batches])
    yield pipeline(2, 1, 5, 20, dp_shard=2, tp=2)
    yield pipeline(2, 2, 1, 20, dp_replicate=2, cp=2)
    yield pipeline(2, 3, 5, 20, cp=2, tp=2, loss_parallel=True)
    yield pipeline(2, 2, 2, 24, dp_shard=4)
    yield pipeline(4, 1, 9, 36, dp_shard=2, zero_bubble="zbh1")
    yield pipeline(4, 2, 3, 12, tp=2, zero_bubble="zbv")
    # The two examples of the specification (section 4.4).
    for layers, layout in ((8, "auto"), (10, PAGE_LAYERS)):
        yield Case(
            pp=2, chunks=2, tp=4, layout=layout, overlap=True, accumulation=4, model=Model(layers=layers, batch=8)
        )
    for chunks, micro_batches in itertools.product((1, 2, 3), (1, 7, 8, 17)):
        if (chunks, micro_batches) not in ((1, 1), (2, 7), (3, 8), (1, 17)):
            yield pipeline(8, chunks, micro_batches, ROWS[8][micro_batches])
    for pp, micro_batches in ((2, 1), (2, 5), (4, 3), (4, 9)):
        yield pipeline(pp, 1, micro_batches, ROWS[pp][micro_batches], schedule="gpipe")
    for degrees in BESIDE_PIPELINE[:2] + BESIDE_PIPELINE[3:5]:
        yield pipeline(2, 1, 5, 20, schedule="gpipe", **degrees)


class Pipelines:
    """Pipelines that differ in what is not asked for: layouts, transfers, resharding, tied heads meet each other."""

    def __init__(self) -> None:
        self._kinds: dict[object, Meetings] = {}
        self._draw = Draw(3)

    def __call__(self, pp: int, chunks: int, micro_batches: int, batch: int, **fields: Any) -> Case:
        """A pipeline of a global batch; `fields` are the case's others."""
        zero_bubble, paired = fields.get("zero_bubble", "none"), fields.get("paired")
        kind = (pp, zero_bubble != "none", paired, fields.get("schedule"))
        meetings = self._kinds.setdefault(kind, Meetings())
        of_schedule = ("zero_bubble", "paired", "schedule")
        beside = tuple(sorted((name, value) for name, value in fields.items() if name not in of_schedule))
        chosen = meetings(
            {"chunks": chunks, "micro-batches": micro_batches, "beside": beside},
            uneven=(False, True),
            overlap=(False, True),
            reshard=("default", "always"),
            reduction=("sum", "mean"),
            tied=(False, True),
        )
        ranks = (*range(pp), *reversed(range(pp))) if zero_bubble == "zbv" else (*range(pp),) * chunks
        layout, layers = _uneven(ranks) if chosen.pop("uneven") else ("auto", pp * chunks)
        model = Model(
            layers=layers,
            batch=batch,
            text=self._draw("text", *TEXTS) if "cp" in fields else "plain",
            tied=chosen.pop("tied"),
            bias="tp" in fields,
        )
        return Case(pp=pp, chunks=chunks, accumulation=micro_batches, layout=layout, model=model, **chosen, **fields)


def _uneven(ranks: Sequence[int]) -> tuple[str, int]:
    """Layer ranges for virtual stages on these ranks, one layer and two in turns; how many layers in all."""
    sizes = [1 + stage % 2 for stage in range(len(ranks))]
    ends = list(itertools.accumulate(sizes))
    items: dict[int, list[str]] = {rank: [] for rank in sorted(ranks)}
    for rank, end, size in zip(ranks, ends, sizes, strict=True):
        items[rank].append(f"{end - size}-{end - 1}")
    return str([", ".join(pieces) for pieces in items.values()]), ends[-1]
