"""Which run a folder belongs to: a random text, in its folder of checkpoints and in that of its reports alike."""

from __future__ import annotations

from pathlib import Path
from uuid import uuid4

MARK = ".run"


def mark_of(folder: Path) -> str | None:
    """The mark of the run that a folder belongs to; None for a folder without one."""
    try:
        return (folder / MARK).read_text(encoding="ascii", errors="replace").strip() or None
    except OSError:
        return None


def mark(folder: Path, run: str | None = None) -> str:
    """Give a folder the mark `run`; left out, keep that which it has, or make one up. Returns it."""
    found = mark_of(folder)
    if found is not None and run in (None, found):
        return found
    run = run or uuid4().hex
    (folder / MARK).write_text(f"{run}\n", encoding="ascii")
    return run
