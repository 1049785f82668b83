"""The tables of plans and differences: every plan in docs/parity.md, one row for each kind of plan in the README."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from itertools import groupby
from pathlib import Path
from typing import Any

from cases import CASES, Case

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "parity.md"
README = ROOT / "README.md"
MARKED = re.compile(r"(<!-- parity:begin -->\n).*?(<!-- parity:end -->)", re.DOTALL)
COLUMNS = ("losses", "grad_norms", "weights")
NOT_JUDGED = "not judged"

Reports = dict[int, dict[str, Any]]
Key = tuple[str, ...]
Rows = dict[Key, tuple[int, dict[str, float]]]
"""By what the first columns say: how many runs, and the largest relative difference (or its bound) of each kind."""


def _plan(case: Case) -> Key:
    return case.model.dtype, case.dimensions, str(case.world), case.degrees


def _kind(case: Case) -> Key:
    return case.model.dtype, case.dimensions.replace(f"{case.method} context", "context")


TABLES: Mapping[Path, tuple[Callable[[Case], Key], tuple[str, ...]]] = {
    PAGE: (_plan, ("computed in", "dimensions", "ranks", "plan")),
    README: (_kind, ("computed in", "dimensions")),
}


def rows(reports: Reports, page: Path) -> Rows:
    """What a page's table has to say."""
    key, _ = TABLES[page]
    found = {}
    for name, cases in groupby(sorted(CASES, key=key), key=key):
        measured = [reports[case.world]["cases"][case.name] for case in cases]
        found[name] = (len(measured), {column: max(run[column] for run in measured) for column in COLUMNS})
    return found


def bound(difference: float) -> str:
    """A power of ten that a difference stays well below, on other machines too: `1e-13` for 4e-15."""
    return f"1e{math.ceil(math.log10(max(difference, 1e-16))) + 1:d}"


def render(reports: Reports, page: Path) -> str:
    """The table as Markdown."""
    head = [*TABLES[page][1], "runs", "loss differs by less", "gradient norm", "weights"]
    lines = [_line(head), _line(["---"] * len(head)).replace(" ", "")]
    for key, (runs, largest) in sorted(rows(reports, page).items(), reverse=True):
        cells = [bound(largest[name]) for name in COLUMNS]
        if key[0] == "float32":
            cells[-1] = NOT_JUDGED
        lines.append(_line([*key, str(runs), *cells]))
    return "\n".join(lines) + "\n"


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def claims(page: Path) -> Rows:
    """What the table on a page says."""
    found = {}
    for line in page.read_text(encoding="utf-8").splitlines():
        if line.startswith("| float"):
            *key, runs, loss, norm, weights = line.strip("| ").split(" | ")
            bounds = dict(zip(COLUMNS, (loss, norm, weights), strict=True))
            numbers = {name: float(text) for name, text in bounds.items() if text != NOT_JUDGED}
            found[tuple(key)] = (int(runs), numbers)
    return found


def write(reports: Reports) -> None:
    """Put the tables into docs/parity.md and the README."""
    PAGE.write_text(
        "# Plans trained and compared with one rank\n\n"
        "Written by `nox -s integration -- --write-table`; every run of the tests holds it against what was found.\n"
        "Bounds on the largest relative difference over all steps.\n\n" + render(reports, PAGE),
        encoding="utf-8",
    )
    text = README.read_text(encoding="utf-8")
    README.write_text(MARKED.sub(lambda match: match[1] + render(reports, README) + match[2], text), encoding="utf-8")
