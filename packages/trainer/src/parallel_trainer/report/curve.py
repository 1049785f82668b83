"""The loss curve as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure


def draw_loss_curve(steps: Sequence[int], losses: Sequence[float], grad_norms: Sequence[float], path: Path) -> None:
    """Loss by step with the gradient norm below it, written to `path` as PNG; NaN leaves a gap."""
    figure = Figure(figsize=(8, 6), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    loss, norm = figure.subplots(2, 1, sharex=True, height_ratios=(2, 1))
    loss.plot(steps, losses, color="tab:blue", marker="." if len(steps) < 40 else None)
    loss.set_ylabel("loss (nats per token)")
    norm.plot(steps, grad_norms, color="tab:orange", linewidth=1)
    norm.set_ylabel("gradient norm")
    norm.set_xlabel("step")
    for axes in (loss, norm):
        axes.grid(alpha=0.3)
    figure.savefig(path, format="png")
