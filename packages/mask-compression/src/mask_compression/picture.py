"""The tiles of a mask as a picture, coloured by context-parallel rank, beside the work of each (extra `plot`)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from mask_compression.describe import Drawing
from mask_compression.tiles import FULL, PARTIAL

_STRENGTH = {PARTIAL: 0.45, FULL: 1.0}


def save(drawing: Drawing, *paths: Path) -> None:
    """Write the picture into files of the formats that their names end with (`.png`, `.svg`).

    Raises ValueError where Matplotlib is not installed or does not know the format, and OSError where a file cannot be
    written.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise ValueError(
            "pictures need Matplotlib, which is not installed: pip install 'mask-compression[plot]'"
        ) from None
    figure: Any = Figure(figsize=(9 if drawing.cp > 1 else 6.4, 6), layout="constrained")
    FigureCanvasAgg(figure)
    if drawing.cp > 1:
        square, bars = figure.subplots(1, 2, width_ratios=(3, 1))
        _draw_work(drawing, bars)
    else:
        square = figure.subplots()
    _draw_tiles(drawing, square)
    for path in paths:
        figure.savefig(path, dpi=150)


def _draw_tiles(drawing: Drawing, axes: Any) -> None:
    size = drawing.mask.seq_length
    pixels = np.ones((*drawing.grid.shape, 3))
    colors = np.array([_color(rank) for rank in range(drawing.cp)])[drawing.tile_ranks][:, None]
    for kind, strength in _STRENGTH.items():
        pixels = np.where((drawing.grid == kind)[..., None], 1 - strength * (1 - colors), pixels)
    x = np.minimum(np.arange(drawing.grid.shape[1] + 1) * drawing.tile, size)
    axes.pcolormesh(x, np.append(drawing.positions, size), pixels, rasterized=True)  # an SVG with a path a tile is huge
    for end in drawing.mask.row_ends(drawing.row)[:-1].tolist()[:200]:
        axes.axvline(end, color="#9aa5b1", linewidth=0.5)
        axes.axhline(end, color="#9aa5b1", linewidth=0.5)
    documents = len(drawing.mask.row_ends(drawing.row))
    axes.set(
        xlim=(0, size),
        ylim=(size, 0),
        xlabel="key",
        ylabel="query",
        title=f"Row {drawing.row}: {size:,} tokens, {documents:,} document{'s' * (documents > 1)}\n"
        f"tiles of {drawing.tile} x {drawing.tile}; pale ones are partial",
    )
    axes.set_aspect("equal")


def _draw_work(drawing: Drawing, axes: Any) -> None:
    ranks = np.arange(drawing.cp)
    axes.barh(ranks, drawing.work / drawing.work.mean(), color=[_color(rank) for rank in ranks])
    axes.axvline(1, color="#1f2933", linewidth=1, linestyle="--")
    axes.set(
        yticks=ranks if drawing.cp <= 16 else [0, drawing.cp - 1],
        ylabel="context-parallel rank",
        xlabel="visible pairs / mean",
        title=f"{drawing.order}\nslowest / mean = {drawing.imbalance:.3f}",
    )
    axes.invert_yaxis()


def _color(rank: int) -> tuple[float, float, float]:
    palette = ("4477aa", "ee6677", "228833", "ccbb44", "66ccee", "aa3377", "dd7733", "7a7a7a")
    code = palette[rank % len(palette)]
    red, green, blue = (int(code[at : at + 2], 16) / 255 for at in (0, 2, 4))
    return red, green, blue
