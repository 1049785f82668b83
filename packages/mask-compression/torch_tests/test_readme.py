"""The README's PyTorch example runs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

README = Path(__file__).parents[1] / "README.md"


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile:UserWarning")
def test_flex_attention_example() -> None:
    blocks = re.findall(r"^```python\n(.*?)^```$", README.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    (program,) = (text for text in blocks if "flex_attention" in text)
    names: dict[str, object] = {}
    exec(program, names)
    assert names["out"].shape == (2, 4, 512, 64)  # type: ignore[attr-defined]
