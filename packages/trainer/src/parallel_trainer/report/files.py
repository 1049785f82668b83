"""What a run writes: metrics.jsonl and TensorBoard events step by step; the loss curve drawn from them."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from io import TextIOBase
from pathlib import Path

from attrs import asdict
from tensorboardX import SummaryWriter

from parallel_trainer.checkpoint.run_mark import mark
from parallel_trainer.report.curve import draw_loss_curve
from parallel_trainer.report.lines import METRICS, keep_until
from parallel_trainer.report.record import EvaluationRecord, StepRecord

_SCALARS = ("loss", "mtp_loss", "balance_loss", "lr", "grad_norm", "tokens_per_second")
_EVALUATION_SCALARS = ("eval_loss", "eval_perplexity", "eval_mtp_loss")


class RunFiles:
    """The files of one run in `folder`, which appears with the first step: a run that fails before leaves nothing.

    run:   the mark of the run, if it saves checkpoints and so can go on.
    after: steps trained before. Where the folder has files of the run, what they say of later steps is dropped and the
        rest is kept: these steps are trained again.

    metrics.jsonl holds one JSON object a step, the fields of `StepRecord` that the model has, and one for each
    evaluation, those of `EvaluationRecord`; a number that is not finite is null, and left out of TensorBoard's curves.
    """

    def __init__(self, folder: Path, *, run: str | None = None, after: int = 0) -> None:
        self.folder = folder
        self._run = run
        self._after = after
        self._metrics: TextIOBase | None = None
        self._events: SummaryWriter | None = None

    def step(self, record: StepRecord) -> None:
        self._write(record, _SCALARS)

    def evaluation(self, record: EvaluationRecord) -> None:
        self._write(record, _EVALUATION_SCALARS)

    def _write(self, record: StepRecord | EvaluationRecord, scalars: tuple[str, ...]) -> None:
        if self._metrics is None or self._events is None:
            self.folder.mkdir(parents=True, exist_ok=True)
            if self._run is not None:
                mark(self.folder, self._run)
            kept = keep_until(self.folder / METRICS, self._after)
            self._metrics = (self.folder / METRICS).open("a", encoding="utf-8")
            purge = self._after + 1 if kept else None  # TensorBoard hides this step and later ones of older files
            self._events = SummaryWriter(str(self.folder / "tensorboard"), purge_step=purge)
        values = {name: value for name, value in asdict(record).items() if value is not None}
        for name in (name for name in scalars if math.isfinite(values.get(name, math.nan))):
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
    with (folder / METRICS).open(encoding="utf-8") as file:
        records = [json.loads(line) for line in file if line.endswith("\n")]
    steps = [record for record in records if "loss" in record]
    evaluations = [record for record in records if "eval_loss" in record]
    partial = folder / "loss_curve.png.partial"
    draw_loss_curve(
        _numbers(steps, "step"),
        _numbers(steps, "loss"),
        _numbers(steps, "grad_norm"),
        partial,
        evaluated=(_numbers(evaluations, "step"), _numbers(evaluations, "eval_loss")),
    )
    partial.replace(folder / "loss_curve.png")


def _numbers(records: Iterable[Mapping[str, float | None]], name: str) -> list[float]:
    """A field of each record, NaN for one that was not finite."""
    values = (record[name] for record in records)
    return [math.nan if value is None else value for value in values]


def _json_number(value: float) -> float | None:
    return value if math.isfinite(value) else None
