"""The README's examples print what it says they print."""

from __future__ import annotations

import doctest
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

README = Path(__file__).parents[1] / "README.md"
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```$", README.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


def blocks(kind: str) -> list[str]:
    return [text for language, text in BLOCKS if language == kind]


def test_python_session(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    runner = doctest.DocTestRunner()
    runner.run(doctest.DocTestParser().get_doctest("\n".join(blocks("pycon")), {}, "README", str(README), 0))
    assert runner.tries > 10
    assert runner.failures == 0
    assert (tmp_path / "load.png").stat().st_size > 10_000


@pytest.mark.parametrize("block", [text for text in blocks("console") if text.startswith("$ ")])
def test_commands(block: str, tmp_path: Path) -> None:
    (tmp_path / "layer.py").write_text(blocks("python")[0])
    command, expected = block.removeprefix("$ ").split("\n", 1)
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    done = subprocess.run(
        command.split(), cwd=tmp_path, env=environment, capture_output=True, text=True, check=True, timeout=120
    )
    assert done.stdout == expected
