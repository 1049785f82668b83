"""The README's examples print what it says they print."""

from __future__ import annotations

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


@pytest.mark.parametrize("block", [text for text in blocks("console") if text.startswith("$ ")])
def test_commands(block: str, tmp_path: Path) -> None:
    (tmp_path / "layer.py").write_text(blocks("python")[0])
    command, expected = block.removeprefix("$ ").split("\n", 1)
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    done = subprocess.run(
        command.split(), cwd=tmp_path, env=environment, capture_output=True, text=True, check=True, timeout=120
    )
    assert done.stdout == expected
