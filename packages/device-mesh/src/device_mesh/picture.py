"""A mesh as a picture: one grid of ranks for each axis, coloured by group, as SVG text."""

from __future__ import annotations

from collections.abc import Iterator
from xml.sax.saxutils import escape

from attrs import frozen

from device_mesh.describe import group_text
from device_mesh.mesh import Axis, ParallelMesh

_CELL = 36
_MARGIN = 28
_HEADER = 84
_GRID_TOP = 48
_LEGEND = 210
_LEGEND_LINES = 6
_LEGEND_TOP = 50
_LEGEND_LINE = 20
_COLUMNS = 8
_RANKS_SHOWN = 128
_COLORS = (
    *("#8ecae6", "#ffb703", "#a3d9a5", "#f4978e", "#cdb4db", "#f9dc5c", "#90a8ed", "#d4a373"),
    *("#80cfc0", "#e5989b", "#b8d86b", "#f6a6d6", "#b0b8c4", "#ff9f5a", "#6fb1fc", "#c9ada7"),
)
_SHADES = ("1", "0.55", "0.3")
_STYLE = (
    "text{font-family:system-ui,'Segoe UI',Helvetica,Arial,sans-serif;fill:#1f2933}"
    ".title{font-size:20px;font-weight:600}.sub{font-size:13px;fill:#52606d}"
    ".axis{font-size:16px;font-weight:600}.rank{font-size:12px;text-anchor:middle}"
    ".key{font-size:12px}.node{fill:none;stroke:#9aa5b1;stroke-dasharray:4 3}"
    ".mark{fill:none;stroke:#1f2933;stroke-width:2.5}"
)


def as_svg(mesh: ParallelMesh, *, rank: int = 0) -> str:
    """The mesh as an SVG document.

    Each axis with more than one rank gets a panel; axes with the same groups share one. Cells of one colour
    are one group, and the group of `rank` is outlined. Dashed frames are nodes. Of a large world the first
    128 ranks are drawn. Raises ValueError for a rank outside the world.
    """
    mesh.coordinate(rank)
    panels = _panels(mesh)
    shown = min(mesh.world_size, _RANKS_SHOWN)
    columns = _columns(mesh)
    rows = -(-shown // columns)
    panel_width = columns * _CELL + _LEGEND + _MARGIN
    groups = max(mesh.world_size // panel.axis.size for panel in panels)
    legend_height = min(groups, _LEGEND_LINES + 1) * _LEGEND_LINE
    panel_height = _GRID_TOP + max(rows * _CELL, legend_height) + 36
    across = 1 if len(panels) == 1 else 2
    width = max(across * panel_width + _MARGIN, 560)
    height = _HEADER + -(-len(panels) // across) * panel_height
    body = []
    for number, panel in enumerate(panels):
        x = _MARGIN + number % across * panel_width
        y = _HEADER + number // across * panel_height
        body.append(f'<g transform="translate({x} {y})">')
        body.extend(_draw(mesh, panel, rank=rank, columns=columns, shown=shown))
        body.append("</g>")
    size = f'width="{width}" height="{height}" viewBox="0 0 {width} {height}"'
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">',
            f"<title>{escape(_headline(mesh))}</title>",
            f"<style>{_STYLE}</style>",
            f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
            f'<text class="title" x="{_MARGIN}" y="38">{escape(_headline(mesh))}</text>',
            f'<text class="sub" x="{_MARGIN}" y="60">{escape(_caption(mesh, rank, shown))}</text>',
            *body,
            "</svg>\n",
        ]
    )


@frozen
class _Panel:
    names: tuple[str, ...]
    axis: Axis


def _panels(mesh: ParallelMesh) -> list[_Panel]:
    names: dict[Axis, list[str]] = {}
    for name in mesh.axes:
        if name != "world" and mesh.size(name) > 1:
            names.setdefault(mesh.axis(name), []).append(name)
    if not names:
        names[mesh.axis("world")] = ["world"]
    return [_Panel(tuple(group), axis) for axis, group in names.items()]


def _columns(mesh: ParallelMesh) -> int:
    """Ranks in a row of the grid: such that rows end where nodes, or else blocks of an axis, end."""
    node = mesh.ranks_per_node
    if node is not None and node < mesh.world_size:
        return max(width for width in range(1, 2 * _COLUMNS + 1) if node % width == 0)
    spans = [mesh.axis(name).span for name in mesh.views["base"]]
    return max((span for span in spans if 2 <= span <= _COLUMNS), default=min(_COLUMNS, mesh.world_size))


def _draw(mesh: ParallelMesh, panel: _Panel, *, rank: int, columns: int, shown: int) -> Iterator[str]:
    axis = panel.axis
    number = mesh.world_size // axis.size
    facts = f"{number:,} group{'s' * (number > 1)} of {axis.size:,}"
    if mesh.ranks_per_node is not None:
        facts += ", within a node" if mesh.within_node(panel.names[0]) else ", across nodes"
    yield f'<text class="axis" x="0" y="16">{escape(" = ".join(panel.names))}</text>'
    yield f'<text class="sub" x="0" y="36">{escape(facts)}</text>'
    yield f'<g transform="translate(0 {_GRID_TOP})">'
    for cell in range(shown):
        x, y = _corner(cell, columns)
        yield _square(x + 2, y + 2, _CELL - 4, f'rx="5" {_fill(axis.group_number(cell))}')
        yield f'<text class="rank" x="{x + _CELL / 2:g}" y="{y + _CELL / 2 + 4:g}">{cell}</text>'
    yield from _nodes(mesh, columns, shown)
    outlined = axis.group_number(rank)
    for member in axis.group(outlined):
        if member < shown:
            x, y = _corner(member, columns)
            yield _square(x + 3, y + 3, _CELL - 6, 'rx="4" class="mark"')
    yield "</g>"
    yield from _legend(axis, number, x=columns * _CELL + 18, outlined=outlined)


def _nodes(mesh: ParallelMesh, columns: int, shown: int) -> Iterator[str]:
    node = mesh.ranks_per_node
    if node is None or node >= mesh.world_size:
        return
    height = node // columns * _CELL
    for start in range(0, shown, node):
        last = min(shown - start, node)
        y = start // columns * _CELL
        rows = min(height, -(-last // columns) * _CELL)
        yield f'<rect class="node" x="0" y="{y}" width="{columns * _CELL}" height="{rows}" rx="7"/>'


def _legend(axis: Axis, number: int, *, x: int, outlined: int) -> Iterator[str]:
    lines = list(range(min(number, _LEGEND_LINES)))
    if outlined not in lines:
        lines[-1] = outlined
    for place, group in enumerate(lines):
        y = _LEGEND_TOP + place * _LEGEND_LINE
        mark = ' stroke="#1f2933" stroke-width="2"' if group == outlined else ""
        yield _square(x, y, 14, f'rx="3" {_fill(group)}{mark}')
        yield f'<text class="key" x="{x + 22}" y="{y + 12}">{escape(_key(axis.group(group)))}</text>'
    if number > len(lines):
        y = _LEGEND_TOP + len(lines) * _LEGEND_LINE
        yield f'<text class="key sub" x="{x + 22}" y="{y + 12}">and {number - len(lines):,} more</text>'


def _fill(group: int) -> str:
    shade, color = divmod(group, len(_COLORS))
    return f'fill="{_COLORS[color]}" fill-opacity="{_SHADES[shade % len(_SHADES)]}"'


def _corner(rank: int, columns: int) -> tuple[int, int]:
    return rank % columns * _CELL, rank // columns * _CELL


def _square(x: int, y: int, side: int, attributes: str) -> str:
    return f'<rect x="{x}" y="{y}" width="{side}" height="{side}" {attributes}/>'


def _key(ranks: range) -> str:
    return group_text(ranks).strip("[]")


def _headline(mesh: ParallelMesh) -> str:
    degrees = " x ".join(f"{name} {mesh.size(name)}" for name in mesh.views["base"] if mesh.size(name) > 1)
    return f"{mesh.world_size:,} rank{'s' * (mesh.world_size > 1)}" + (f": {degrees}" if degrees else "")


def _caption(mesh: ParallelMesh, rank: int, shown: int) -> str:
    parts = [f"One colour is one group; the group of rank {rank} is outlined."]
    if mesh.ranks_per_node is not None and mesh.ranks_per_node < mesh.world_size:
        parts.append(f"A dashed frame is a node of {mesh.ranks_per_node} ranks.")
    if shown < mesh.world_size:
        distinct = len(_COLORS) * len(_SHADES)
        parts.append(f"The first {shown} ranks are drawn; colours repeat after {distinct} groups.")
    return " ".join(parts)
