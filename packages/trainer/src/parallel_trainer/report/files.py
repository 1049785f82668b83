"""What a run writes: metrics.jsonl and TensorBoard events step by step; the loss curve drawn from them."""

from __future__ import annotations

import json
import math
from io import TextIOBase
from pathlib import Path

from attrs import asdict
from tensorboardX import SummaryWriter

from parallel_trainer.report.curve import draw_loss_curve
from parallel_trainer.report.record import StepRecord

_SCALARS = ("loss", "mtp_loss", "balance_loss", "lr", "grad_norm", "tokens_per_second")


class RunFiles:
    """The files of one run in `folder`, which appears with the first step: a run that fails before leaves nothing.

    metrics.jsonl holds one JSON object a step, the fields of `StepRecord` that the model has; a number that is not
    finite is null.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._metrics: TextIOBase | None = None
        self._events: SummaryWriter | None = None

    def step(self, record: StepRecord) -> None:
        if self._metrics is None or self._events is None:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._metrics = (self.folder / "metrics.jsonl").open("w", encoding="utf-8")
            self._events = SummaryWriter(str(self.folder / "tensorboard"))
        values = {name: value for name, value in asdict(record).items() if value is not None}
        for name in (name for name in _SCALARS if name in values):
            self._events.add_scalar(name, values[name], record.step)
        self._events.flush()
        values = {name: _json_number(value) for name, value in values.items()}
        self._metrics.write(json.dumps(values, allow_nan=False) + "\n")
        self._metrics.flush()

    def close(self) -> None:
        """Close the files."""
        if self._metrics is not None and self._events is not None:
            self._metrics.close()
            self._events.close()


def draw_curve_of(folder: Path) -> None:
    """Draw `loss_curve.png` from the `metrics.jsonl` of a run, whether it came to its end or not."""
    with (folder / "metrics.jsonl").open(encoding="utf-8") as file:
        steps = [json.loads(line) for line in file if line.endswith("\n")]
    partial = folder / "loss_curve.png.partial"
    draw_loss_curve(
        [step["step"] for step in steps],
        [math.nan if step["loss"] is None else step["loss"] for step in steps],
        [math.nan if step["grad_norm"] is None else step["grad_norm"] for step in steps],
        partial,
    )
    partial.replace(folder / "loss_curve.png")


def _json_number(value: float) -> float | None:
    return value if math.isfinite(value) else None
