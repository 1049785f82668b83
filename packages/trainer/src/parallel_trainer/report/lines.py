"""Files of one JSON object a line, each of a step: what a run writes, and a run that goes on keeps."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

METRICS = "metrics.jsonl"


def last_step(output: Path) -> int:
    """The last step of which an output has metrics; 0 where it has none."""
    return max((record["step"] for record in _records(output / METRICS)), default=0)


def keep_until(path: Path, step: int) -> list[dict[str, Any]]:
    """Cut a file of one JSON object a line down to those of steps up to `step`, and return them.

    A line that was cut off is dropped; where there is no file, there are none.
    """
    kept = [record for record in _records(path) if record["step"] <= step]
    if path.exists():
        partial = path.with_name(f"{path.name}.partial")
        partial.write_text("".join(json.dumps(record, allow_nan=False) + "\n" for record in kept), encoding="utf-8")
        partial.replace(path)
    return kept


def _records(path: Path) -> Iterator[dict[str, Any]]:
    if not path.exists():
        return
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if isinstance(record, dict) and isinstance(record.get("step"), int):
            yield record
