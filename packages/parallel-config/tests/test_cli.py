"""The command: exit status, table, JSON, messages, and how quickly it answers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from parallel_config.cli import main


@pytest.fixture
def good(tmp_path: Path) -> Path:
    path = tmp_path / "good.yaml"
    path.write_text("parallelism:\n  tensor_parallel: 2\n")
    return path


@pytest.fixture
def bad(tmp_path: Path) -> Path:
    path = tmp_path / "bad.yaml"
    path.write_text("parallelism:\n  tensor_parallel: 3\n  expert_paralel: 2\n")
    return path


def test_a_good_file_shows_its_plan(good: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", str(good), "--world-size", "8"]) == 0
    lines = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert (lines["tp"], lines["dp_shard"], lines["sequence_parallel"]) == ("2", "4", "true")


def test_json_has_the_names_of_the_plan(good: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", str(good), "--world-size", "8", "--json"]) == 0
    values = json.loads(capsys.readouterr().out)
    assert values["data_parallel"] == 4
    assert values["fsdp_enabled"] is True
    assert values["stage_layers"] == []


def test_explanations_on_request(good: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", str(good), "--world-size", "8", "--explain"]) == 0
    assert "dp_shard 4 ← world_size 8 // (tp 2 · cp 1 · pp 1)" in capsys.readouterr().out
    assert main(["check", str(good), "--world-size", "8", "--explain", "--json"]) == 0
    assert "dp_shard 4 ←" in "".join(json.loads(capsys.readouterr().out)["explanations"])


def test_a_bad_file_shows_place_and_repair(bad: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", str(bad), "--world-size", "8"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert f"{bad}:2:20: parallelism.tensor_parallel 3" in captured.err
    assert "Did you mean expert_parallel?" in captured.err
    assert "     2 |   tensor_parallel: 3\n                            ^\n" in captured.err
    assert "1. " in captured.err


def test_json_of_a_bad_file(bad: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", str(bad), "--world-size", "8", "--json"]) == 2
    report = json.loads(capsys.readouterr().out)
    assert list(report) == ["problems"]
    first = report["problems"][0]
    assert (first["path"], first["value"], first["line"]) == ("parallelism.tensor_parallel", 3, 2)
    assert main(["check", str(bad), "--world-size", "8", "--json", "--explain"]) == 2
    assert json.loads(capsys.readouterr().out)["repairs"]


def test_json_stays_json_where_the_value_is_no_number(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "nan.yaml"
    path.write_text("training: {max_norm: .nan}\n")
    assert main(["check", str(path), "--world-size", "1", "--json"]) == 2
    output = capsys.readouterr().out
    assert json.loads(output, parse_constant=pytest.fail)["problems"][0]["value"] == "NaN"


def test_a_missing_file_is_one_message(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", str(tmp_path / "none.yaml"), "--world-size", "8"]) == 2
    error = capsys.readouterr().err
    assert len(error.strip().splitlines()) == 1
    assert "cannot be read: No such file or directory" in error


@pytest.mark.parametrize("size", ["0", "-4"])
def test_a_world_of_no_ranks(good: Path, size: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", str(good), f"--world-size={size}"]) == 2
    assert "world_size" in capsys.readouterr().err


def test_a_world_size_that_is_no_number_exits_with_2(good: Path) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["check", str(good), "--world-size", "many"])
    assert caught.value.code == 2


def test_warnings_go_to_the_error_stream(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "w.yaml"
    path.write_text("parallelism: {pipeline_parallel_schedule: gpipe}\n")
    assert main(["check", str(path), "--world-size", "2", "--json"]) == 0
    captured = capsys.readouterr()
    assert "warning: Accepted, but without effect" in captured.err
    assert json.loads(captured.out)["world_size"] == 2


def test_as_a_process_it_imports_little(good: Path) -> None:
    code = (
        "import sys, parallel_config.cli as cli; status = cli.main(sys.argv[1:]);"
        "roots = {name.partition('.')[0] for name in sys.modules} - sys.stdlib_module_names;"
        "print(*roots, file=sys.stderr); sys.exit(status)"
    )
    command = [sys.executable, "-c", code, "check", str(good), "--world-size", "8"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0
    roots = done.stderr.split()
    dependencies = {"attr", "attrs", "cattr", "cattrs", "yaml", "typing_extensions", "cython_runtime"}
    public = {root for root in roots if not root.startswith("_")}
    assert public <= dependencies | {"parallel_config"}


def test_a_reader_that_stops_early_gets_no_traceback(good: Path) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    command = [Path(sys.executable).with_name("parallel-config"), "check", good, "--world-size", "8", "--explain"]
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, check=False)
    os.close(writer)
    assert done.returncode != 0
    assert done.stderr == ""
