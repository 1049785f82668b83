"""The table of plans and differences: what the ranks found, kept in docs/parity.md and shown in the README."""

from __future__ import annotations

import math
import re
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
Key = tuple[str, int, int, int]
"""dtype, ranks, dp_replicate, dp_shard."""


def _row_key(case: Case) -> Key:
    return (case.dtype, case.world, case.dp_replicate, case.dp_shard)


def rows(reports: Reports) -> dict[Key, tuple[int, dict[str, float]]]:
    """By dtype and plan: how many runs, and the largest relative difference of each kind."""
    found = {}
    for key, cases in groupby(sorted(CASES, key=_row_key), key=_row_key):
        measured = [reports[case.world]["cases"][case.name] for case in cases]
        found[key] = (len(measured), {name: max(run[name] for run in measured) for name in COLUMNS})
    return found


def bound(difference: float) -> str:
    """A power of ten that a difference stays well below, on other machines too: `1e-13` for 4e-15."""
    return f"1e{math.ceil(math.log10(max(difference, 1e-16))) + 1:d}"


def render(reports: Reports) -> str:
    """The table as Markdown."""
    lines = [
        "| computed in | ranks | dp_replicate x dp_shard | runs | loss differs by less | gradient norm | weights |",
        "|---|---|---|---|---|---|---|",
    ]
    for (dtype, world, replicate, shard), (runs, largest) in sorted(rows(reports).items(), reverse=True):
        cells = [bound(largest[name]) for name in COLUMNS]
        if dtype == "float32":
            cells[-1] = NOT_JUDGED
        lines.append(f"| {dtype} | {world} | {replicate} x {shard} | {runs} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def claims(page: Path) -> dict[Key, tuple[int, dict[str, float]]]:
    """What the table on a page says: by dtype and plan the number of runs and the bounds."""
    found = {}
    pattern = r"^\| (float\d\d) \| (\d+) \| (\d+) x (\d+) \| (\d+) \| (\S+) \| (\S+) \| (.+) \|$"
    for dtype, world, replicate, shard, runs, *bounds in re.findall(pattern, page.read_text(encoding="utf-8"), re.M):
        numbers = {name: float(bound) for name, bound in zip(COLUMNS, bounds, strict=True) if bound != NOT_JUDGED}
        found[dtype, int(world), int(replicate), int(shard)] = (int(runs), numbers)
    return found


def write(reports: Reports) -> None:
    """Put the table into docs/parity.md and the README."""
    table = render(reports)
    PAGE.write_text(
        "# Plans trained and compared with one rank\n\n"
        "Written by `nox -s integration -- --write-table`; every run of the tests holds it against what was found.\n"
        "Bounds on the largest relative difference over 5 steps.\n\n" + table,
        encoding="utf-8",
    )
    text = README.read_text(encoding="utf-8")
    README.write_text(MARKED.sub(lambda match: match[1] + table + match[2], text), encoding="utf-8")
