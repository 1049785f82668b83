"""The README's examples that need only NumPy run, and print what it says they print."""

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
COMMANDS = [text for language, text in BLOCKS if language == "console" and text.startswith("$ ")]
PROGRAMS = [text for language, text in BLOCKS if language == "python" and "import numpy" in text]


def test_python_sessions() -> None:
    session = "\n".join(text for language, text in BLOCKS if language == "pycon")
    runner = doctest.DocTestRunner()
    runner.run(doctest.DocTestParser().get_doctest(session, {}, "README", str(README), 0))
    assert runner.tries > 10
    assert runner.failures == 0


@pytest.mark.parametrize("program", PROGRAMS)
def test_programs(program: str) -> None:
    names: dict[str, object] = {}
    exec(program, names)
    assert names["out"].shape == (2, 512, 8, 64)  # type: ignore[attr-defined]


@pytest.mark.parametrize("block", COMMANDS)
def test_commands(block: str) -> None:
    command, expected = block.removeprefix("$ ").split("\n", 1)
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        command.split(), env=os.environ | {"PATH": path}, capture_output=True, text=True, encoding="utf-8", check=True
    )
    assert done.stdout == expected


def test_there_is_something_to_test() -> None:
    assert (len(COMMANDS), len(PROGRAMS)) == (1, 1)
