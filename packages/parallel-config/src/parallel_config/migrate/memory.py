"""Time for memory: recomputed and swapped activations.

Source: the mindformers 2.1.0 wheel, parallel_core/training_graph/transformer/utils.py (`LayerSetting`): recompute true
is every layer; a number for each stage is that many of its layers, dealt out to its chunks in turn; a list for each
chunk gives each its own; in a chunk the first layers count. With swapping, numbers are layers instead.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from parallel_config.migrate.draft import Draft, Kind
from parallel_config.migrate.placement import Placement
from parallel_config.stages import as_texts

_RECOMPUTE = "recompute_config.recompute"
_SELECT = "recompute_config.select_recompute"
_SWAP = "swap_config"


def memory(draft: Draft, placed: Placement) -> None:
    """Carry recomputation and swapping."""
    swaps = draft.switch(f"{_SWAP}.swap", False)
    _recompute(draft, placed, by_layer=swaps)
    if swaps:
        _swap(draft, placed)
    else:
        draft.leave(_SWAP, "swap is not true")


def _recompute(draft: Draft, placed: Placement, *, by_layer: bool) -> None:
    value = draft.get(_RECOMPUTE, False)
    if value is False:
        draft.leave(_RECOMPUTE, "no layer is recomputed here either, if none is named")
    else:
        layers = _listed_layers(value, placed) if by_layer else _first_layers(value, placed)
        if layers is None:
            shapes = "true, false, a number for each stage, or a list of these for each chunk"
            draft.refuse(_RECOMPUTE, f"must be {shapes}", "Mend the old file first.")
            return
        draft.carry(_RECOMPUTE, "recompute.mode", "full" if layers else "None", "of whole layers")
        if layers:
            draft.carry(_RECOMPUTE, "recompute.full_recompute_layer", layers)
    if draft.get(_SELECT, False) is not False:
        why = "names operators of graph mode; here recompute.select_module names modules of a layer"
        draft.leave(_SELECT, why, Kind.COST)


def _listed_layers(value: Any, placed: Placement) -> list[str] | None:
    if value is True:
        return as_texts([(0, placed.num_layers - 1)])
    if isinstance(value, list) and all(isinstance(layer, int) and not isinstance(layer, bool) for layer in value):
        return [str(layer) for layer in value]
    return None


def _first_layers(value: Any, placed: Placement) -> list[str] | None:
    """The recomputed layers as ranges; None for a value of another shape."""
    if value is True:
        return as_texts([(0, placed.num_layers - 1)])
    chunks, stages = max(placed.chunks) + 1, max(placed.stages) + 1
    lengths = {(chunk, stage): last - first + 1 for chunk, stage, (first, last) in placed.virtual_stages()}
    if not isinstance(value, list):
        return None
    if not any(isinstance(item, list) for item in value):
        if len(value) != stages:
            return None
        counts = _dealt_out(value, lengths, chunks)
    elif len(value) == chunks:
        rows = [[row] * stages if isinstance(row, bool) else row for row in value]
        if any(not isinstance(row, list) or len(row) != stages for row in rows):
            return None
        counts = {(chunk, stage): _count(rows[chunk][stage], lengths[chunk, stage]) for chunk, stage in lengths}
    else:
        return None
    if any(count is None for count in counts.values()):
        return None
    ranges = [
        (first, first + count - 1)
        for chunk, stage, (first, _) in placed.virtual_stages()
        if (count := counts[chunk, stage])
    ]
    return as_texts(ranges)


def _count(item: Any, length: int) -> int | None:
    if isinstance(item, bool):
        return length if item else 0
    return min(item, length) if isinstance(item, int) and item >= 0 else None


def _dealt_out(
    value: list[Any], lengths: Mapping[tuple[int, int], int], chunks: int
) -> dict[tuple[int, int], int | None]:
    """A number for each stage, given to its chunks one by one in turn."""
    counts: dict[tuple[int, int], int | None] = {}
    for stage, item in enumerate(value):
        total = _count(item, sum(lengths[chunk, stage] for chunk in range(chunks)))
        given, left = [0] * chunks, total or 0
        while left:
            room = [chunk for chunk in range(chunks) if given[chunk] < lengths[chunk, stage]]
            # As many rounds at once as nobody's room ends in; the last one goes to the first chunks alone.
            rounds = max(1, min(left // len(room), *(lengths[chunk, stage] - given[chunk] for chunk in room)))
            for chunk in room:
                dealt = min(rounds, left)
                given[chunk], left = given[chunk] + dealt, left - dealt
        for chunk in range(chunks):
            counts[chunk, stage] = None if total is None else given[chunk]
    return counts


def _swap(draft: Draft, placed: Placement) -> None:
    if len(placed.ranges) > 1:
        draft.leave(_SWAP, "activations are not swapped in a pipeline", Kind.COST)
        return
    draft.carry(f"{_SWAP}.swap", "swap.enable", True)
    path = f"{_SWAP}.default_prefetch"
    draft.carry(path, "swap.default_prefetch", draft.get(path))
    # A layer is fetched while the one that is `default_prefetch` later runs backward: the last ones cannot be.
    end = placed.num_layers - draft.integer(path, 1)
    for name in ("layer_swap", "op_swap"):
        path = f"{_SWAP}.{name}"
        if draft.has(path):
            _swapped(draft, name, path, end)


def _swapped(draft: Draft, name: str, path: str, end: int) -> None:
    value = draft.get(path)
    places = [f"{path}[{index}]" for index in range(len(value))] if isinstance(value, list) else [path]
    entries, sources, cut = [], [], False
    for place in places:
        layers = _swapped_layers(draft.get(f"{place}.layers"), end)
        if layers is None:
            draft.refuse(path, "must list sections with layers", "Mend the old file first.")
            return
        operator = f"{place}.op_name"
        entries.append({**({"op_name": draft.get(operator)} if draft.has(operator) else {}), "layers": layers})
        sources += [f"{place}.layers", operator]
        cut = cut or layers != _swapped_layers(draft.get(f"{place}.layers"), 2**31)
        draft.leave(f"{place}.backward_prefetch", "swap.default_prefetch is one for all here", Kind.COST)
    how = f"layers up to {end - 1}, for those after it are needed again too soon" if cut else ""
    draft.carry(tuple(sources), f"swap.{name}", entries, how)


def _swapped_layers(value: Any, end: int) -> list[str] | None:
    """Those of the layers that come before `end`; None for what lists none."""
    if value is True:
        return as_texts([(0, end - 1)])
    if isinstance(value, list) and all(isinstance(layer, int) and not isinstance(layer, bool) for layer in value):
        return [str(layer) for layer in value if layer < end]
    return None
