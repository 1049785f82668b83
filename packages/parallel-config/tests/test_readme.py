"""The README's examples, run in order in one namespace, print what the README says."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path

import parallel_config

README = Path(__file__).parents[1] / "README.md"
BLOCK = re.compile(r"```(python|text)\n(.*?)```", re.DOTALL)


def test_examples_print_what_the_readme_shows() -> None:
    blocks = BLOCK.findall(README.read_text(encoding="utf-8"))
    namespace: dict[str, object] = {}
    assert [kind for kind, _ in blocks] == ["python", "text"] * (len(blocks) // 2)
    for (_, code), (_, expected) in zip(blocks[::2], blocks[1::2], strict=True):
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(code, str(README), "exec"), namespace)
        assert printed.getvalue() == expected


def test_every_public_name_is_in_the_readme() -> None:
    text = README.read_text(encoding="utf-8")
    assert [name for name in parallel_config.__all__ if name not in text] == []
