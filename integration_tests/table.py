"""The plans that are trained and compared: each in docs/parity.md, counted in the README; and what one run measured.

    python integration_tests/table.py                   write both pages, from the cases alone
    pytest integration_tests --measured measured.md     also write down what this machine measured

A page claims what every machine must find: which plans, and the tolerances. What a run measured depends on the machine,
so it is shown with its name and the date, and nothing is held against it.
"""

from __future__ import annotations

import platform
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from datetime import date
from pathlib import Path
from typing import Any

from cases import CASES, TOLERANCE, Case

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "parity.md"
README = ROOT / "README.md"
MARKED = re.compile(r"(<!-- parity:begin -->\n).*?(<!-- parity:end -->)", re.DOTALL)
MEASURED = {"losses": "losses", "grad_norms": "gradient norms", "weights": "weights"}

Reports = dict[int, dict[str, Any]]

DIMENSIONS: dict[str, Callable[[Case], bool]] = {
    "the batch alone: data parallelism, FSDP, HSDP": lambda case: case.cp == case.tp == case.pp == 1 and not _moe(case),
    "sequences: context parallelism": lambda case: case.cp > 1,
    "matrices: tensor and sequence parallelism": lambda case: case.tp > 1,
    "layers: pipeline parallelism": lambda case: case.pp > 1,
    "experts": lambda case: _moe(case),
}


def _moe(case: Case) -> bool:
    return case.model.architecture != "qwen3"


def page() -> str:
    """docs/parity.md: every plan."""
    lines = [
        "# Plans trained and compared with one rank",
        "",
        "`nox -s integration` trains each plan below. It fails where a number of any step is further from one rank",
        "than this, relative to the number itself:",
        "",
        *_table(
            ["computed in", "losses", "gradient norms", "weights", "tokens of each expert"], map(_allowed, TOLERANCE)
        ),
        "",
        "Weights are not compared in float32: where a gradient is rounding alone, Adam moves its weight by a whole",
        "learning rate all the same.",
        "",
        "A run prints the largest differences that it measured. `nox -s integration -- --measured FILE` writes those",
        "of each plan to a file, with the machine and the date. `python integration_tests/table.py` writes this page.",
    ]
    for dtype in TOLERANCE:
        counts = Counter((c.dimensions, str(c.world), c.degrees) for c in CASES if c.model.dtype == dtype)
        rows = [(*plan, str(runs)) for plan, runs in sorted(counts.items(), reverse=True)]
        lines += ["", f"## In {dtype}", "", *_table(["dimensions", "ranks", "plan", "runs"], rows)]
    return "\n".join(lines) + "\n"


def _allowed(dtype: str) -> list[str]:
    numbers = TOLERANCE[dtype]
    return [
        dtype,
        *(f"{numbers[name]:.0e}".replace("e-0", "e-") if name in numbers else "not compared" for name in MEASURED),
        "equal",
    ]


def short() -> str:
    """The README's table: how many plans split what."""
    rows = []
    for what, has in DIMENSIONS.items():
        dtypes = Counter(case.model.dtype for case in CASES if has(case))
        rows.append([what, *(str(dtypes[dtype]) for dtype in TOLERANCE)])
    rows.append(["plans in all", *(str(sum(c.model.dtype == dtype for c in CASES)) for dtype in TOLERANCE)])
    return "\n".join(_table(["what is split over ranks", *(f"plans in {dtype}" for dtype in TOLERANCE)], rows)) + "\n"


def readme() -> str:
    """The README with its table as it must be."""
    return MARKED.sub(lambda match: match[1] + short() + match[2], README.read_text(encoding="utf-8"))


def largest(reports: Reports) -> Iterator[str]:
    """A line for each type: the largest differences that this run measured."""
    for dtype, allowed in TOLERANCE.items():
        runs = [found for case, found in _measured(reports) if case.model.dtype == dtype]
        shown = [f"{MEASURED[name]} {max(run[name] for run in runs):.1e}" for name in MEASURED if name in allowed]
        yield f"{dtype}, {len(runs)} plans: {', '.join(shown)}"


def measured(reports: Reports) -> str:
    """A page with what this run measured: the machine, the date and the differences of each plan."""
    rows = []
    for case, found in _measured(reports):
        shown = [f"{found[name]:.1e}" if name in TOLERANCE[case.model.dtype] else "" for name in MEASURED]
        rows.append([case.model.dtype, str(case.world), case.name, *shown])
    head = ["computed in", "ranks", "plan", *MEASURED.values()]
    title = f"# Largest relative differences from one rank, measured on {machine()}, {date.today().isoformat()}"
    return "\n".join([title, "", *_table(head, rows)]) + "\n"


def _measured(reports: Reports) -> list[tuple[Case, dict[str, Any]]]:
    return [(case, reports[case.world]["cases"][case.name]) for case in CASES if case.world in reports]


def machine() -> str:
    """The processor's name, and the operating system."""
    information = Path("/proc/cpuinfo")
    names = re.findall(r"(?m)^model name\s*: (.*)$", information.read_text()) if information.exists() else []
    return f"{names[0] if names else platform.machine()} ({len(names)} cores), {platform.platform()}"


def _table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> list[str]:
    head = list(head)
    return [_line(head), f"|{'---|' * len(head)}", *map(_line, rows)]


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def main() -> None:
    """Write both pages."""
    PAGE.write_text(page(), encoding="utf-8")
    README.write_text(readme(), encoding="utf-8")


if __name__ == "__main__":
    main()
