"""Launches of many tasks: they print how far they are, whatever pytest captures, and end if they are stuck."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import launching
import psutil
import pytest
from launching import launch

HERE = Path(__file__).parent

PROGRAM = f"""
import sys, time
from pathlib import Path
sys.path.insert(0, {str(HERE)!r})
from launching import Tasks, tasks_of
tasks = Tasks(tasks_of(Path(sys.argv[1]), 1), 3, writes=True)
for name in ("first", "second", "third"):
    time.sleep(0.5)
    tasks.done(name)
    END
"""


@pytest.fixture
def program(tmp_path: Path) -> Callable[[str], Path]:
    """A program that does three tasks, with a line after each."""

    def written(end: str) -> Path:
        path = tmp_path / "three_tasks.py"
        path.write_text(PROGRAM.replace("END", end), encoding="utf-8")
        return path

    return written


def test_progress_is_shown_and_which_tasks_took_longest(
    program: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launching, "SHOWN_EVERY_SECONDS", 0.2)
    shown: list[str] = []
    launch(program("pass"), 1, tmp_path, cwd=tmp_path, show=shown.append)
    *progress, last = shown
    assert all(
        re.fullmatch(r"three_tasks.py on 1 ranks: (0 of \?|\d of 3) tasks in \d+ s.*", line) for line in progress
    )
    assert any("1 of 3 tasks" in line and line.endswith(", last first") for line in progress)
    assert re.fullmatch(r"three_tasks.py on 1 ranks: 3 tasks in \d+ s, longest: (\w+ \d+ s(, |$)){3}", last)


@pytest.mark.parametrize(
    ("end", "said"),
    [
        ("sys.exit('no more memory')", "ended with 1:\n[^$]*no more memory"),
        ("print('what it said', flush=True); time.sleep(1000)", "finished no task for 3 s:\n[^$]*what it said"),
    ],
    ids=["fails", "stuck"],
)
def test_a_launch_that_fails_or_is_stuck_ends_with_what_it_printed(
    program: Callable[[str], Path], tmp_path: Path, end: str, said: str
) -> None:
    path = program(end)
    with pytest.raises(RuntimeError, match=said):
        launch(path, 1, tmp_path, cwd=tmp_path, show=print, stuck=3)
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
