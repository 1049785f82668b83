"""`device-mesh show`: what a user sees, in words, as JSON, as a picture, and when the file is wrong."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
from device_mesh.cli import main

CONFIG = """\
parallelism:
  pipeline_parallel: 2
  pipeline_parallel_layers_per_stage: ["0-1", "2-3"]
  context_parallel: 2
  tensor_parallel: 2
  expert_parallel: 4
"""
SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text(CONFIG)
    return path


def show(capsys: pytest.CaptureFixture[str], *arguments: object, code: int = 0) -> str:
    """What the command prints: on stdout if it succeeds, on stderr if it must not."""
    assert main(["show", *map(str, arguments)]) == code
    printed = capsys.readouterr()
    if code:
        assert printed.out == ""
        return printed.err
    return printed.out


def test_table_of_all_axes(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = show(capsys, config, "--world-size", 16, "--ranks-per-node", 8).splitlines()
    assert lines[0] == "16 ranks on 2 nodes of 8"
    rows = {line.split()[0]: line.split()[1:] for line in lines if line}
    assert " ".join(rows["sparse"]) == "pp 2 x dp_replicate 1 x efsdp 2 x ep 4"
    assert " ".join(rows["pp"]).startswith("2 8 no [0 8] [1 9]")
    assert " ".join(rows["fsdp"]) == "4 4 yes [0 2 4 6] [1 3 5 7] [8 10 12 14] [9 11 13 15]"
    assert " ".join(rows["world"]) == "16 1 no [0 1 2 … 15]"


def test_one_rank(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = show(capsys, config, "--world-size", 16, "--rank", 13)
    assert "rank 13 reads shard 1 of 2 of the data" in text
    assert re.search(r"^fsdp +2 of 4 +\[9 11 13 15\]$", text, re.MULTILINE)
    assert re.search(r"^ep +1 of 4 +\[12 13 14 15\]$", text, re.MULTILINE)


def test_large_worlds_fit_the_screen(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = show(capsys, config, "--world-size", 131_072, "--ranks-per-node", 8)
    assert text.startswith("131,072 ranks on 16,384 nodes of 8\n")
    assert max(map(len, text.splitlines())) <= 110
    assert len(text.splitlines()) < 30


def test_json(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shown = json.loads(show(capsys, config, "--world-size", 16, "--ranks-per-node", 8, "--json"))
    assert (shown["world_size"], shown["ranks_per_node"]) == (16, 8)
    assert shown["views"]["dense"] == ["pp", "dp_replicate", "fsdp", "tp"]
    assert shown["axes"]["ep"] == {
        "size": 4,
        "stride": 1,
        "within_node": True,
        "groups": [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11], [12, 13, 14, 15]],
    }
    assert shown["axes"]["pp"]["within_node"] is False


def test_json_of_one_rank(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shown = json.loads(show(capsys, config, "--world-size", 16, "--rank", 13, "--json"))
    assert "groups" not in shown["axes"]["ep"]
    assert shown["axes"]["ep"]["within_node"] is None
    assert shown["rank"]["rank"] == 13
    assert shown["rank"]["coordinate"]["pp"] == 1
    assert shown["rank"]["shard_index"] == 1
    assert shown["rank"]["groups"]["tp"] == [12, 13]


def picture(path: Path) -> ElementTree.Element:
    return ElementTree.parse(path).getroot()


def texts(element: ElementTree.Element, kind: str) -> list[str]:
    return [node.text or "" for node in element.iter(f"{SVG}text") if node.get("class") == kind]


def test_picture_has_a_panel_for_each_axis(config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "mesh.svg"
    show(capsys, config, "--world-size", 16, "--ranks-per-node", 8, "--rank", 3, "--svg", out)
    drawn = picture(out)
    assert texts(drawn, "axis") == ["pp", "dp_shard = batch = efsdp", "cp", "tp", "fsdp = loss", "ep"]
    panels = [group for group in drawn if group.tag == f"{SVG}g"]
    fsdp = panels[4]
    assert texts(fsdp, "rank") == [str(rank) for rank in range(16)]
    cells = [cell for cell in fsdp.iter(f"{SVG}rect") if cell.get("rx") == "5"]
    colors = [cell.get("fill") for cell in cells]
    groups = [[rank for rank in range(16) if colors[rank] == color] for color in dict.fromkeys(colors)]
    assert groups == [[0, 2, 4, 6], [1, 3, 5, 7], [8, 10, 12, 14], [9, 11, 13, 15]]
    assert texts(fsdp, "key") == ["0 2 4 6", "1 3 5 7", "8 10 12 14", "9 11 13 15"]
    marks = [mark for mark in fsdp.iter(f"{SVG}rect") if mark.get("class") == "mark"]
    outlined = {(int(mark.get("x", "")) // 36, int(mark.get("y", "")) // 36) for mark in marks}
    assert outlined == {(1, 0), (3, 0), (5, 0), (7, 0)}
    assert len([node for node in fsdp.iter(f"{SVG}rect") if node.get("class") == "node"]) == 2


@pytest.mark.parametrize("world_size", [8, 4096])
def test_nothing_is_drawn_outside_the_picture(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], world_size: int
) -> None:
    out = tmp_path / "mesh.svg"
    show(capsys, config, "--world-size", world_size, "--svg", out)
    drawn = picture(out)
    width, height = int(drawn.get("width", "")), int(drawn.get("height", ""))
    for panel in (group for group in drawn if group.tag == f"{SVG}g"):
        x, y = map(int, re.findall(r"\d+", panel.get("transform", "")))
        for node in panel.iter():
            if node.get("x") is not None:
                assert x + float(node.get("x", "")) + float(node.get("width", "0")) <= width
                assert y + float(node.get("y", "")) + float(node.get("height", "0")) <= height
    assert len(texts(drawn, "rank")) == len(texts(drawn, "axis")) * min(world_size, 128)


def test_picture_of_one_rank(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "one.yaml").write_text("parallelism:\n  tensor_parallel: 1\n")
    show(capsys, tmp_path / "one.yaml", "--world-size", 1, "--svg", tmp_path / "one.svg")
    assert texts(picture(tmp_path / "one.svg"), "axis") == ["world"]


def test_wrong_files_leave_nothing_behind(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "bad.yaml").write_text("parallelism:\n  tensor_parallel: 3\n  expert_parallel: 5\n")
    out = tmp_path / "bad.svg"
    message = show(capsys, tmp_path / "bad.yaml", "--world-size", 8, "--svg", out, code=2)
    assert "bad.yaml:2:" in message
    assert "tensor_parallel 3" in message
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bad.yaml"]


def test_problems_as_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "bad.yaml").write_text("parallelism:\n  tensor_parallel: 3\n")
    assert main(["show", str(tmp_path / "bad.yaml"), "--world-size", "8", "--json"]) == 2
    (problem,) = json.loads(capsys.readouterr().out)["problems"]
    assert (problem["path"], problem["value"], problem["line"]) == ("parallelism.tensor_parallel", 3, 2)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--rank", "16"], "rank 16 is outside the mesh: ranks go from 0 to 15"),
        (["--rank", "-1"], "rank -1 is outside the mesh"),
        (["--ranks-per-node", "0"], "ranks_per_node = 0 must be at least 1"),
        (["--svg", "no/such/folder/mesh.svg"], "no/such/folder/mesh.svg"),
    ],
)
def test_wrong_arguments(config: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str) -> None:
    assert message in show(capsys, config, "--world-size", 16, *arguments, code=2)


def test_missing_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "absent.yaml" in show(capsys, tmp_path / "absent.yaml", "--world-size", 8, code=2)


def test_warnings_of_the_file_go_to_stderr(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "run.yaml").write_text("parallelism:\n  pipeline_parallel_microbatch_size: 4\n")
    assert main(["show", str(tmp_path / "run.yaml"), "--world-size", "4", "--json"]) == 0
    printed = capsys.readouterr()
    assert json.loads(printed.out)["world_size"] == 4
    assert re.match(r"warning: .*pipeline_parallel_microbatch_size", printed.err)


def test_installed_command(config: Path) -> None:
    command = Path(sys.executable).with_name("device-mesh")
    done = subprocess.run([command, "show", config, "--world-size", "8"], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("8 ranks\n")
    assert done.stderr == ""


def test_pub2_path_01_files_in_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As shells leave it after `--svg=`."""
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "run.yaml").write_text("parallelism: {tensor_parallel: 2}")
    assert main(["show", "~/run.yaml", "--world-size", "2", "--svg=~/mesh.svg"]) == 0
    assert (tmp_path / "mesh.svg").exists()
