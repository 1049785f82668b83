"""Which layers each virtual stage holds: reading `pipeline_parallel_layers_per_stage` and proposing a split.

Virtual stage `k * pp + i` is chunk `k` of physical stage `i` (specification, section 4.4), except in a V: see
`stage_ranks`. Layer ranges are closed and count from 0.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from attrs import frozen

from parallel_config.problems import show

Range = tuple[int, int]

_RANGE = re.compile(r"(\d+)(?:\s*-\s*(\d+))?", re.ASCII)
_DIGITS = 9


class BadRange(ValueError):
    """A text that names no layers; its message is the rule it breaks."""


def parse_range(text: str) -> Range:
    """The first and last layer of "n" or "a-b", which may run downwards. Raises `BadRange`."""
    text = text.strip()
    match = _RANGE.fullmatch(text)
    if match is None:
        raise BadRange(f"must list layers as n or a-b, and '{text}' is neither")
    first, last = match[1], match[2] or match[1]
    if max(len(first.lstrip("0")), len(last.lstrip("0"))) > _DIGITS:
        raise BadRange(f"must list layers of at most {_DIGITS} digits, and no model has as many as {show(text)}")
    return int(first[-_DIGITS:]), int(last[-_DIGITS:])


def stage_ranks(pp: int, chunks: int, zero_bubble: str) -> tuple[int, ...]:
    """The physical stage of each virtual stage: round and round, or with zbv, which has two chunks, down and up again.

    >>> stage_ranks(3, 2, "none"), stage_ranks(3, 2, "zbv")
    ((0, 1, 2, 0, 1, 2), (0, 1, 2, 2, 1, 0))
    """
    return (*range(pp), *reversed(range(pp))) if zero_bubble == "zbv" else tuple(range(pp)) * chunks


def even_ranges(num_layers: int, parts: int) -> tuple[Range, ...] | None:
    """`num_layers` cut into `parts` consecutive closed ranges of nearly equal length; None if too short.

    Where it does not divide, the longer ranges stand in the middle: the first and the last stage also hold
    the embedding and the head.
    """
    if num_layers < parts:
        return None
    base, longer = divmod(num_layers, parts)
    first_longer = (parts - longer) // 2
    ranges, start = [], 0
    for part in range(parts):
        length = base + (first_longer <= part < first_longer + longer)
        ranges.append((start, start + length - 1))
        start += length
    return tuple(ranges)


def as_texts(ranges: Sequence[Range]) -> list[str]:
    """Each range as the file writes it."""
    return [str(first) if first == last else f"{first}-{last}" for first, last in ranges]


def as_items(ranges: Sequence[Range], ranks: Sequence[int]) -> list[str]:
    """The ranges of the virtual stages, which are on these physical stages, as the file lists them: a text for each."""
    items: list[list[str]] = [[] for _ in range(max(ranks) + 1)]
    for rank, text in zip(ranks, as_texts(ranges), strict=True):
        items[rank].append(text)
    return [", ".join(texts) for texts in items]


@frozen
class BadItem(Exception):
    """An item that is no list of ranges: its index, and the rule it breaks."""

    index: int
    rule: str


def parse_ranges(item: str, index: int) -> list[Range]:
    """The ranges that one item lists, however many. Raises `BadItem`."""
    pieces = [piece.strip() for piece in item.split(",")]
    ranges = []
    for piece in pieces:
        try:
            first, last = parse_range(piece)
        except BadRange as bad:
            raise BadItem(index, str(bad)) from None
        if first > last:
            raise BadItem(index, f"must list ranges upwards, and {piece} runs from {first} down to {last}")
        ranges.append((first, last))
    return ranges


def parse_item(item: str, index: int, interleave_num: int) -> list[Range]:
    """The ranges of one physical stage, one for each chunk. Raises `BadItem`."""
    ranges = parse_ranges(item, index)
    if len(ranges) != interleave_num:
        raise BadItem(
            index,
            f"must list {interleave_num} range{'s' * (interleave_num > 1)}, one for each chunk"
            f" (pipeline_parallel_interleave_num {interleave_num}), and lists {len(ranges)}",
        )
    return ranges


def in_virtual_order(by_stage: Sequence[Sequence[Range]], ranks: Sequence[int]) -> tuple[Range, ...]:
    """Ranges by physical stage and chunk, put into the order of the virtual stages, which are on these stages."""
    chunks = [iter(ranges) for ranges in by_stage]
    return tuple(next(chunks[rank]) for rank in ranks)


def joined(ranges: Sequence[Range], num_layers: int) -> tuple[Range, ...] | None:
    """The ranges with their ends kept and their starts moved, so that they cover `num_layers` layers.

    None where the ends do not ascend.
    """
    ends = [last for _, last in ranges[:-1]] + [num_layers - 1]
    starts = [0, *(end + 1 for end in ends[:-1])]
    moved = tuple(zip(starts, ends, strict=True))
    return moved if all(first <= last for first, last in moved) else None


def coverage_faults(ranges: Sequence[Range], num_layers: int | None) -> list[str]:
    """What keeps ranges in virtual order from covering layers 0 to num_layers - 1 once each, upwards."""
    faults, expected = [], 0
    for stage, (first, last) in enumerate(ranges):
        if first > expected:
            gap = _layers(expected, first - 1)
            faults.append(f"{gap} missing before virtual stage {stage}, which starts at {first}")
        elif first < expected:
            repeated = _layers(first, min(last, expected - 1))
            faults.append(f"{repeated} already placed before virtual stage {stage}, which starts at {first}")
        expected = max(expected, last + 1)
    if num_layers is not None and expected < num_layers:
        faults.append(f"{_layers(expected, num_layers - 1)} missing at the end")
    if num_layers is not None and expected > num_layers:
        faults.append(f"{_layers(num_layers, expected - 1)} beyond the last layer {num_layers - 1}")
    return faults


def _layers(first: int, last: int) -> str:
    return f"layer {first} is" if first == last else f"layers {first}-{last} are"
