"""The loss curve as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure


def draw_loss_curve(
    steps: Sequence[float],
    losses: Sequence[float],
    grad_norms: Sequence[float],
    path: Path,
    *,
    evaluated: tuple[Sequence[float], Sequence[float]] = ((), ()),
) -> None:
    """Loss by step with the gradient norm below it, written to `path` as PNG; NaN leaves a gap.

    evaluated: the steps after which held-out samples were evaluated, and their loss.
    """
    figure = Figure(figsize=(8, 6), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    loss, norm = figure.subplots(2, 1, sharex=True, height_ratios=(2, 1))
    loss.plot(steps, losses, color="tab:blue", marker="." if len(steps) < 40 else None, label="training")
    if evaluated[0]:
        loss.plot(*evaluated, color="tab:green", marker="o", label="held out")
        loss.legend()
    loss.set_ylabel("loss (nats per token)")
    norm.plot(steps, grad_norms, color="tab:orange", linewidth=1)
    norm.set_ylabel("gradient norm")
    norm.set_xlabel("step")
    for axes in (loss, norm):
        axes.grid(alpha=0.3)
    figure.savefig(path, format="png")
