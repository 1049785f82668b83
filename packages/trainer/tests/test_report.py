"""What a run shows and leaves behind."""

from __future__ import annotations

import json
import math
import struct
from pathlib import Path

import numpy as np
import pytest
from attrs import evolve
from parallel_config.schema import MoeMonitor
from parallel_trainer.errors import UserError
from parallel_trainer.parallel.routing_record import ExpertLoads
from parallel_trainer.report.console import Console
from parallel_trainer.report.experts import ExpertFiles, watched_layers
from parallel_trainer.report.files import RunFiles, draw_curve_of
from parallel_trainer.report.record import EvaluationRecord, StepRecord
from tensorboardX import SummaryWriter
from tensorboardX.proto.event_pb2 import Event, SessionLog


def record(step: int, loss: float = 2.0, *, updated: bool = True, **losses: float) -> StepRecord:
    return StepRecord(
        step=step,
        loss=loss,
        lr=1e-3,
        grad_norm=0.5,
        tokens_per_second=12_345.6,
        seconds=0.25,
        valid_tokens=100,
        consumed_samples=8 * step,
        updated=updated,
        **losses,
    )


def test_files_appear_with_the_first_step(tmp_path: Path) -> None:
    folder = tmp_path / "deep" / "run"
    files = RunFiles(folder)
    files.close()
    assert not folder.exists()
    files = RunFiles(folder)
    files.step(record(1))
    first = json.loads((folder / "metrics.jsonl").read_text())  # readable while the run goes on
    assert first["loss"] == 2.0
    assert "mtp_loss" not in first
    files.step(record(2, float("nan"), updated=False))
    files.close()
    draw_curve_of(folder)
    second = json.loads((folder / "metrics.jsonl").read_text().splitlines()[1])
    assert second["loss"] is None
    assert second["updated"] is False
    assert second["consumed_samples"] == 16
    assert (folder / "loss_curve.png").read_bytes().startswith(b"\x89PNG\r\n")
    assert list((folder / "tensorboard").iterdir())


def test_a_step_is_one_line_with_its_numbers(capsys: pytest.CaptureFixture[str], monkeypatch) -> None:
    monkeypatch.delenv("PARALLEL_TRAIN_TERMINAL", raising=False)
    console = Console(20)
    console.step(record(3))
    console.step(record(4, float("inf"), updated=False))
    console.close()
    first, second, third = capsys.readouterr().out.splitlines()
    for part in ("step  3/20", "loss  2.000000", "lr 1.000e-03", "grad_norm   0.50000", "12,346 tokens/s", "0.250 s"):
        assert part in first
    assert "skipped" not in first
    assert second.endswith("skipped: not finite")
    assert third == "Skipped were 1 of 2 steps: they changed nothing."


def test_a_step_without_a_valid_token_is_shown_as_such_and_null_in_the_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PARALLEL_TRAIN_TERMINAL", raising=False)
    nothing = {"loss": math.nan, "grad_norm": math.nan, "mtp_loss": math.nan, "balance_loss": math.nan}
    step = evolve(record(2, updated=False), valid_tokens=0, **nothing)
    drawn: list[tuple[str, float]] = []
    monkeypatch.setattr(SummaryWriter, "add_scalar", lambda _, name, value, step: drawn.append((name, value)))
    console, files = Console(20), RunFiles(tmp_path)
    for report in (console, files):
        report.step(step)
        report.close()
    assert capsys.readouterr().out.splitlines()[0].endswith("skipped: no valid token")
    metrics = json.loads((tmp_path / "metrics.jsonl").read_text())
    assert {name: metrics[name] for name in (*nothing, "valid_tokens", "updated", "lr")} == {
        **dict.fromkeys(nothing),
        "valid_tokens": 0,
        "updated": False,
        "lr": 1e-3,
    }
    assert drawn == [("lr", 1e-3), ("tokens_per_second", 12_345.6)]


def test_losses_that_a_model_has_beside_the_first_are_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    step = record(1, mtp_loss=2.5, balance_loss=0.03125)
    console, files = Console(1), RunFiles(tmp_path / "run")
    for report in (console, files):
        report.step(step)
        report.close()
    assert "mtp 2.500000  balance 0.031250" in capsys.readouterr().out
    metrics = json.loads((tmp_path / "run" / "metrics.jsonl").read_text())
    assert (metrics["mtp_loss"], metrics["balance_loss"]) == (2.5, 0.03125)


def test_evaluations_are_lines_of_their_own_and_points_in_the_curve(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch
) -> None:
    monkeypatch.delenv("PARALLEL_TRAIN_TERMINAL", raising=False)
    console, files = Console(20), RunFiles(tmp_path)
    for report in (console, files):
        report.step(record(7))
        report.evaluation(EvaluationRecord(7, 1.5, 4.4817, 1200, 9000, 0.25, eval_mtp_loss=2.5))
        report.step(record(8))
        report.evaluation(EvaluationRecord(8, 800.0, float("inf"), 1200, 9000, 0.25))
        report.close()
    lines = capsys.readouterr().out.splitlines()
    assert lines[1] == "eval  7/20  loss  1.500000  perplexity 4.4817  1,200 samples  0.250 s  mtp 2.500000"
    records = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert ["loss" in each for each in records] == [True, False, True, False]
    assert records[1] == {
        "step": 7, "eval_loss": 1.5, "eval_perplexity": 4.4817, "eval_samples": 1200, "eval_valid_tokens": 9000,
        "eval_seconds": 0.25, "eval_mtp_loss": 2.5,
    }  # fmt: skip
    assert records[3]["eval_perplexity"] is None
    drawn: list[object] = []
    monkeypatch.setattr("matplotlib.axes.Axes.plot", lambda axes, *numbers, **style: drawn.append(numbers))
    monkeypatch.setattr("matplotlib.axes.Axes.legend", lambda axes: None)
    draw_curve_of(tmp_path)
    assert drawn[:2] == [([7, 8], [2.0, 2.0]), ([7, 8], [1.5, 800.0])]


def test_a_person_who_watches_sees_a_bar(capsys: pytest.CaptureFixture[str], monkeypatch) -> None:
    monkeypatch.setenv("PARALLEL_TRAIN_TERMINAL", "1")
    console = Console(2)
    console.step(record(1))
    console.step(record(2, 1.5))
    console.close()
    shown = capsys.readouterr()
    assert "step 1/2" in shown.out
    assert "100%" in shown.err
    assert "loss 1.5000" in shown.err


LAYERS = ("model.layers.1", "model.layers.2", "model.layers.4")


@pytest.mark.parametrize(
    ("monitor", "chosen"),
    [
        (MoeMonitor(), ()),
        (MoeMonitor(save_tokens_per_expert_interval=1), LAYERS),
        (MoeMonitor(save_tokens_per_expert_interval=1, target_layers=("1-2", "4")), LAYERS),
        (MoeMonitor(save_tokens_per_expert_interval=1, target_layers=("2",)), LAYERS[1:2]),
    ],
)
def test_watched_layers_are_those_of_the_file(monitor: MoeMonitor, chosen: tuple[str, ...]) -> None:
    assert watched_layers(monitor, LAYERS) == chosen


@pytest.mark.parametrize(
    ("text", "named"),
    [("3", "model.layers.3, which has no experts"), ("a-b", "'a-b'"), ("-1", "'-1'"), ("4-2", "'4-2'")],
)
def test_layer_that_cannot_be_watched_is_refused(text: str, named: str) -> None:
    with pytest.raises(UserError, match=named) as caught:
        watched_layers(MoeMonitor(save_tokens_per_expert_interval=1, target_layers=(text,)), LAYERS)
    assert "1, 2, 4" in str(caught.value) or "write for example" in str(caught.value)


def test_loads_of_experts_are_kept_every_few_steps_and_drawn(tmp_path: Path) -> None:
    files = ExpertFiles(tmp_path, LAYERS[:2], interval=2)
    for step in (1, 2, 3):
        files.step(step, ExpertLoads(LAYERS, np.arange(12).reshape(3, 4) * step, 0.0))
    files.close()
    lines = [json.loads(line) for line in (tmp_path / "tokens_per_expert.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 3]
    assert lines[1]["tokens_per_expert"] == {LAYERS[0]: [0, 3, 6, 9], LAYERS[1]: [12, 15, 18, 21]}
    pictures = sorted(tmp_path.glob("*.png"))
    assert [picture.name for picture in pictures] == [f"expert_load_{layer}.png" for layer in LAYERS[:2]]
    assert all(picture.read_bytes().startswith(b"\x89PNG\r\n") for picture in pictures)


def events(folder: Path) -> list[Event]:
    """The records of TensorBoard files: a length and its checksum before each, a checksum after it."""
    found = []
    for path in sorted(folder.iterdir()):
        data = path.read_bytes()
        while data:
            (length,) = struct.unpack("<Q", data[:8])
            found.append(Event.FromString(data[12 : 12 + length]))
            data = data[16 + length :]
    return found


def test_a_run_that_goes_on_replaces_steps_that_it_trains_again(tmp_path: Path) -> None:
    first = RunFiles(tmp_path, run="ab")
    for step in (1, 2, 3):
        first.step(record(step))
    first.evaluation(EvaluationRecord(2, 1.5, 4.4817, 1200, 9000, 0.25))
    first.close()
    assert (tmp_path / ".run").read_text() == "ab\n"
    second = RunFiles(tmp_path, run="ab", after=2)
    second.step(record(3, 1.0))
    second.close()
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [(line["step"], line.get("loss", line.get("eval_loss"))) for line in lines] == [
        (1, 2.0), (2, 2.0), (2, 1.5), (3, 1.0),
    ]  # fmt: skip
    # TensorBoard hides what older files have of steps from that of a session's start on.
    starts = [event.step for event in events(tmp_path / "tensorboard") if event.session_log.status == SessionLog.START]
    assert starts == [3]


def test_loads_of_experts_go_on_too(tmp_path: Path) -> None:
    def files(steps: range, after: int) -> None:
        found = ExpertFiles(tmp_path, LAYERS[:2], interval=1, after=after)
        for step in steps:
            found.step(step, ExpertLoads(LAYERS, np.full((len(LAYERS), 3), step), 0.0))
        found.close()

    files(range(1, 4), after=0)
    files(range(3, 5), after=2)
    lines = [json.loads(line) for line in (tmp_path / "tokens_per_expert.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
