"""Launches of many tasks: they print how far they are, whatever pytest captures, and end if they are stuck."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import launching
import psutil
import pytest
from launching import Tasks, launch, tasks_of

HERE = Path(__file__).parent

PROGRAM = """
import json, sys, time
from pathlib import Path
folder = Path(sys.argv[1])
with (folder / "tasks-1.jsonl").open("w") as notes:
    for line in (3, ["first", 0.5], ["second", 2.5], ["third", 1.5]):
        print(json.dumps(line), file=notes, flush=True)
        if line == ["first", 0.5]:
            MEANWHILE
END
"""


@pytest.fixture
def program(tmp_path: Path) -> Callable[..., Path]:
    """A program that notes three tasks as `Tasks` does; something may come after the first of them, or at the end."""

    def written(*, meanwhile: str = "pass", end: str = "") -> Path:
        path = tmp_path / "three_tasks.py"
        path.write_text(PROGRAM.replace("MEANWHILE", meanwhile).replace("END", end), encoding="utf-8")
        return path

    return written


def test_progress_is_shown_and_which_tasks_took_longest(
    program: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The program goes on when the first task has been shown."""
    monkeypatch.setattr(launching, "SHOWN_EVERY_SECONDS", 0.2)
    shown: list[str] = []

    def show(line: str) -> None:
        shown.append(line)
        if "1 of 3" in line:
            (tmp_path / "seen").touch()

    waits = "while not (folder / 'seen').exists(): time.sleep(0.05)"
    launch(program(meanwhile=waits), 1, tmp_path, cwd=tmp_path, show=show)
    *progress, last = shown
    line = r"three_tasks.py on 1 ranks: (0 of (\?|3)|1 of 3|3 of 3) tasks in \d+ s(, last (first|third))?"
    assert all(re.fullmatch(line, each) for each in progress)
    assert any("1 of 3" in each and each.endswith(", last first") for each in progress)
    end = r"three_tasks.py on 1 ranks: 3 tasks in \d+ s, longest: second 2 s, third 2 s, first 0 s"
    assert re.fullmatch(end, last)


def test_what_is_noted_is_what_is_read(tmp_path: Path) -> None:
    path = tasks_of(tmp_path, 2)
    tasks = Tasks(path, 7, writes=True)
    other = Tasks(path, 7, writes=False)  # not rank 0
    tasks.done("a plan")
    other.done("a plan")
    first, second = path.read_text(encoding="utf-8").splitlines()
    assert json.loads(first) == 7
    assert json.loads(second)[0] == "a plan"


@pytest.mark.parametrize(
    ("end", "options", "said"),
    [
        ("sys.exit('no more memory')", {}, "ended with 1:\n[^$]*no more memory"),
        (
            "print('what it said', flush=True); time.sleep(1000)",
            {"stuck": 20.0},
            "finished no task for 20 s:\n[^$]*what it said",
        ),
    ],
    ids=["fails", "stuck"],
)
def test_a_launch_that_fails_or_is_stuck_ends_with_what_it_printed(
    program: Callable[..., Path], tmp_path: Path, end: str, options: dict[str, float], said: str
) -> None:
    path = program(end=end)
    with pytest.raises(RuntimeError, match=said):
        launch(path, 1, tmp_path, cwd=tmp_path, show=print, **options)
    assert [p for p in psutil.process_iter(["cmdline"]) if str(path) in (p.info["cmdline"] or ())] == []


def test_lines_reach_the_terminal_although_pytest_captures(tmp_path: Path) -> None:
    """In a test run of its own, whose only test passes; without -s."""
    (tmp_path / "test_shown.py").write_text(
        "import pytest\n@pytest.fixture\ndef slow(show): show('4 of 9 tasks')\ndef test_it(slow): print('captured')\n"
    )
    command = [sys.executable, "-m", "pytest", "-q", "-p", "conftest", str(tmp_path / "test_shown.py")]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])])
    }
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "4 of 9 tasks\n" in done.stdout
    assert "captured" not in done.stdout
