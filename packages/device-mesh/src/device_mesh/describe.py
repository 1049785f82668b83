"""A mesh in words: as a table for people, and as plain values for JSON."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from device_mesh.mesh import Axis, ParallelMesh

_RANKS_SHOWN = 6
_GROUPS_WIDTH = 60


def as_dict(mesh: ParallelMesh, *, rank: int | None = None) -> dict[str, Any]:
    """The mesh as JSON-ready values.

    Keys: `world_size`, `ranks_per_node` (or None), `views` (name to axes), `axes` (name to `size`, `stride`,
    `within_node` (None without ranks_per_node), and `groups`, a list of rank lists). With `rank`, `rank` is
    added: its `rank`, `coordinate`, `shard_index`, and `groups` (axis to rank list); the axes' own `groups`
    are then left out.
    """
    axes: dict[str, dict[str, Any]] = {}
    for name in mesh.axes:
        axis = mesh.axis(name)
        within = None if mesh.ranks_per_node is None else mesh.within_node(name)
        axes[name] = {"size": axis.size, "stride": axis.stride, "within_node": within}
        if rank is None:
            axes[name]["groups"] = mesh.groups(name).tolist()
    described: dict[str, Any] = {
        "world_size": mesh.world_size,
        "ranks_per_node": mesh.ranks_per_node,
        "views": {name: list(axes) for name, axes in mesh.views.items()},
        "axes": axes,
    }
    if rank is not None:
        described["rank"] = {
            "rank": rank,
            "coordinate": mesh.coordinate(rank),
            "shard_index": mesh.shard_index(rank),
            "groups": {name: list(mesh.group(name, rank)) for name in mesh.axes},
        }
    return described


def as_text(mesh: ParallelMesh, *, rank: int | None = None) -> str:
    """The mesh as tables of at most a screen's width; long groups and many groups are shortened with "…".

    With `rank`, that rank's coordinates and groups instead of all groups.
    """
    nodes = ""
    if mesh.ranks_per_node is not None:
        nodes = f" on {_count(-(-mesh.world_size // mesh.ranks_per_node), 'node')} of {mesh.ranks_per_node}"
    views = [
        [view, " x ".join(f"{name} {mesh.size(name)}" for name in names)]
        for view, names in mesh.views.items()
        if len(names) > 1
    ]
    blocks = [f"{_count(mesh.world_size, 'rank')}{nodes}", _table(["view", "axes, slowest first"], views)]
    blocks.append(_groups(mesh) if rank is None else _one_rank(mesh, rank))
    return "\n\n".join(blocks)


def group_text(ranks: Sequence[int]) -> str:
    """`[0 2 4 6]`; a long group by its first ranks and its last."""
    shown = [str(rank) for rank in ranks]
    if len(ranks) > _RANKS_SHOWN:
        shown = [*(str(rank) for rank in ranks[:3]), "…", str(ranks[-1])]
    return f"[{' '.join(shown)}]"


def _groups(mesh: ParallelMesh) -> str:
    rows = []
    for name in mesh.axes:
        axis = mesh.axis(name)
        number = mesh.world_size // axis.size
        rows.append([name, str(axis.size), str(number), *_within(mesh, name), _row_of_groups(axis, number)])
    return _table(["axis", "size", "groups", *_within_header(mesh), "ranks"], rows)


def _row_of_groups(axis: Axis, number: int) -> str:
    last = group_text(axis.group(number - 1))
    text = ""
    for group in range(number - 1):
        longer = f"{text}{group_text(axis.group(group))} "
        if text and len(longer) + len(last) > _GROUPS_WIDTH:
            return f"{text}… {last}"
        text = longer
    return text + last


def _one_rank(mesh: ParallelMesh, rank: int) -> str:
    coordinate = mesh.coordinate(rank)
    node = "" if mesh.ranks_per_node is None else f" on node {rank // mesh.ranks_per_node}"
    rows = [
        [
            name,
            f"{coordinate[name]} of {mesh.size(name)}",
            *_within(mesh, name),
            group_text(mesh.group(name, rank)),
        ]
        for name in mesh.axes
    ]
    reads = f"rank {rank}{node} reads shard {mesh.shard_index(rank)} of {mesh.size('batch')} of the data"
    return f"{reads}\n\n" + _table(["axis", "index", *_within_header(mesh), "group"], rows)


def _within_header(mesh: ParallelMesh) -> list[str]:
    return [] if mesh.ranks_per_node is None else ["within a node"]


def _within(mesh: ParallelMesh, name: str) -> list[str]:
    if mesh.ranks_per_node is None:
        return []
    return ["yes" if mesh.within_node(name) else "no"]


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}" + ("" if number == 1 else "s")


def _table(header: list[str], rows: list[list[str]]) -> str:
    lines = [header, *rows]
    widths = [max(len(line[column]) for line in lines) for column in range(len(header))]
    numeric = [all(line[column].isdigit() for line in rows) for column in range(len(header))]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if right else cell.ljust(width)
            for cell, width, right in zip(line, widths, numeric, strict=True)
        ).rstrip()
        for line in lines
    )
