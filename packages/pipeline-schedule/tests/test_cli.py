"""The command: charts, files, JSON, and one line with exit code 2 for whatever is wrong."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from pipeline_schedule import schedule_from_dict, validate, zb_v
from pipeline_schedule.cli import main


def show(capsys: pytest.CaptureFixture[str], *arguments: object, code: int = 0) -> str:
    """What the command prints: on stdout if it succeeds, on stderr if it must not."""
    assert main(["show", *map(str, arguments)]) == code
    printed = capsys.readouterr()
    if code:
        assert printed.out == ""
        return printed.err
    assert printed.err == ""
    return printed.out


def test_chart(capsys: pytest.CaptureFixture[str]) -> None:
    text = show(capsys, "--stages", 4, "--chunks", 2, "--microbatches", 8)
    assert text.startswith("Interleaved 1F1B: 4 ranks x 2 chunks, 8 micro-batches\n\nrank 0  F0a F1a")
    assert "   0   15.8 %                11  0 4\n" in text
    assert text.endswith("\nmakespan 57\n")


@pytest.mark.parametrize(
    ("arguments", "title"),
    [
        ([], "1F1B: 4 ranks, 5 micro-batches"),
        (["--schedule", "gpipe"], "GPipe: 4 ranks, 5 micro-batches"),
        (["--schedule", "interleaved"], "Interleaved 1F1B: 4 ranks, 5 micro-batches"),
        (["--schedule", "zbh1"], "ZB-H1: 4 ranks, 5 micro-batches"),
        (["--schedule", "zbv"], "ZB-V: 4 ranks x 2 chunks, 5 micro-batches"),
        (["--overlap-p2p", "--overlap-b-f"], "1F1B, overlap_b_f, overlap_p2p: 4 ranks, 5 micro-batches"),
        (["--together"], "1F1B, posted together: 4 ranks, 5 micro-batches"),
    ],
)
def test_schedules(arguments: list[str], title: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert show(capsys, "--stages", 4, "--microbatches", 5, *arguments).splitlines()[0] == title


def test_times(capsys: pytest.CaptureFixture[str]) -> None:
    times = ["--forward", "0.5", "--backward-input", "1/3", "--backward-weight", "1/6", "--communication", "2"]
    text = show(capsys, "--stages", 2, "--microbatches", 1, "--schedule", "gpipe", *times)
    assert text.endswith("makespan 6\n")


def test_json(capsys: pytest.CaptureFixture[str]) -> None:
    shown = json.loads(show(capsys, "--stages", 2, "--microbatches", 3, "--schedule", "zbv", "--json"))
    schedule = schedule_from_dict(shown["schedule"])
    assert schedule == zb_v(2, 3)
    assert shown["makespan"] == 19
    assert shown["peak_activations"] == list(validate(schedule)) == [4, 4]
    assert shown["idle"] == [pytest.approx(1 / 19)] * 2


def test_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    svg, trace = tmp_path / "out.svg", tmp_path / "trace.json"
    show(capsys, "--stages", 3, "--microbatches", 4, "--svg", svg, "--trace", trace)
    assert svg.read_text().startswith("<svg ")
    assert json.loads(trace.read_text())["traceEvents"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.svg", "trace.json"]


def test_png(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib", reason="pip install 'pipeline-schedule[plot]' to test PNG drawings")
    show(capsys, "--stages", 2, "--microbatches", 2, "--png", tmp_path / "out.png")
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")


def test_png_without_matplotlib(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    monkeypatch.setitem(sys.modules, "matplotlib.backends.backend_agg", None)
    error = show(capsys, "--stages", 2, "--microbatches", 2, "--png", tmp_path / "out.png", code=2)
    assert error == (
        "pipeline-schedule: a PNG is drawn with matplotlib: pip install 'pipeline-schedule[plot]'\n"
    )  # fmt: skip
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--stages", "0", "--microbatches", "8"],
            "stages = 0 must be at least 1: it is the number of pipeline",
        ),
        (["--stages", "4", "--microbatches", "0"], "microbatches = 0 must be at least 1: it is the number of micro-"),
        (["--stages", "4", "--microbatches", "8", "--chunks", "-1"], "chunks = -1 must be at least 1"),
        (
            ["--stages", "4", "--microbatches", "8", "--schedule", "zbv", "--chunks", "3"],
            "chunks = 3 does not fit the schedule zbv, which has 2 on each rank: leave chunks out, or choose",
        ),
        (
            ["--stages", "4", "--microbatches", "8", "--schedule", "dualpipe"],
            "there is no schedule 'dualpipe': choose one of gpipe, 1f1b, interleaved, zbh1, zbv",
        ),
        (["--stages", "4", "--microbatches", "8", "--forward", "-1"], "forward: -1 must be a time of at least 0"),
        (["--stages", "4", "--microbatches", "8", "--width", "5"], "width = 5 must be at least 40 columns"),
        (["--stages", "4", "--microbatches", "8", "--svg", "no/such/folder.svg"], "No such file or directory"),
    ],
)
def test_bad_values(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    error = show(capsys, *arguments, code=2)
    assert error.startswith("pipeline-schedule: ")
    assert message in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "pipeline-schedule: the following arguments are required: COMMAND"),
        (["show"], "pipeline-schedule show: the following arguments are required: --stages, --microbatches"),
        (["show", "--stages", "x"], "pipeline-schedule show: argument --stages: invalid int value: 'x'"),
        (
            ["show", "--stages", "2", "--microbatches", "2", "--forward", "1/0"],
            "pipeline-schedule show: argument --forward: '1/0' is no time: write it as 2, 0.25 or 1/3",
        ),
    ],
)
def test_bad_arguments(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_info:
        main(arguments)
    assert exit_info.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith(message)
    assert error.count("\n") == 1


def test_as_an_installed_program() -> None:
    program = Path(sys.executable).with_name("pipeline-schedule")
    done = subprocess.run(
        [program, "show", "--stages", "2", "--microbatches", "2"], capture_output=True, text=True, check=True
    )
    assert done.stdout.startswith("1F1B: 2 ranks, 2 micro-batches\n")


def test_pub2_path_01_files_in_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As shells leave it after `--svg=`."""
    monkeypatch.setenv("HOME", str(tmp_path))
    assert main(["show", "--stages", "2", "--microbatches", "2", "--svg=~/chart.svg"]) == 0
    assert (tmp_path / "chart.svg").exists()
    with pytest.raises(SystemExit):
        main(["show", "--stages", "2", "--microbatches", "2", "--svg=~no-such-user/chart.svg"])
