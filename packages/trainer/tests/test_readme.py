"""The README's program prints what it says it prints."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

README = Path(__file__).parents[1] / "README.md"


def test_program(tmp_path: Path) -> None:
    text = README.read_text(encoding="utf-8")
    ((program, expected),) = re.findall(r"^```python\n(.*?)^```\n+^```text\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        env=os.environ | {"GLOG_v": "3"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == expected
