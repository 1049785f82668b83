"""The loss curve as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from parallel_trainer.report.record import StepRecord


def draw_loss_curve(records: Sequence[StepRecord], path: Path) -> None:
    """Loss by step with the gradient norm below it, written to `path` as PNG."""
    steps = [record.step for record in records]
    figure = Figure(figsize=(8, 6), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    loss, norm = figure.subplots(2, 1, sharex=True, height_ratios=(2, 1))
    loss.plot(steps, [record.loss for record in records], color="tab:blue", marker="." if len(steps) < 40 else None)
    loss.set_ylabel("loss (nats per token)")
    norm.plot(steps, [record.grad_norm for record in records], color="tab:orange", linewidth=1)
    norm.set_ylabel("gradient norm")
    norm.set_xlabel("step")
    for axes in (loss, norm):
        axes.grid(alpha=0.3)
    figure.savefig(path)
