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


def test_python_session() -> None:
    session = "\n".join(blocks("pycon"))
    runner = doctest.DocTestRunner()
    runner.run(doctest.DocTestParser().get_doctest(session, {}, "README", str(README), 0))
    assert runner.tries > 10
    assert runner.failures == 0


@pytest.mark.parametrize("block", [text for text in blocks("console") if text.startswith("$ ")])
def test_commands(block: str, tmp_path: Path) -> None:
    (program,) = blocks("python")
    (tmp_path / "train.py").write_text(program)
    command, expected = block.removeprefix("$ ").split("\n", 1)
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        command.split(), cwd=tmp_path, env=os.environ | {"PATH": path}, capture_output=True, text=True, check=True
    )
    assert done.stdout == expected
