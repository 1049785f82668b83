"""Launches: each world size once for the whole test run, all its cases inside."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import table
from cases import WORLDS
from corpora import write_corpora
from launching import launch

HERE = Path(__file__).parent
REPORTS = pytest.StashKey[dict[int, dict[str, Any]]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--measured", type=Path, metavar="FILE", help="write the differences that this machine measures, and its name"
    )


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The first test that needs a launch waits for it as long as it moves on: `launching.py` ends one that is stuck."""
    for item in items:
        if {"reports", "hyperparallel"} & set(getattr(item, "fixturenames", ())):
            item.add_marker(pytest.mark.timeout(0), append=False)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """What was measured, on the terminal and in the file that was asked for."""
    reports = config.stash.get(REPORTS, {})
    if set(reports) != set(WORLDS):
        return
    terminalreporter.section(f"Largest relative differences from one rank, measured on {table.machine()}")
    for line in table.largest(reports):
        terminalreporter.write_line(line)
    if path := config.getoption("--measured"):
        path.write_text(table.measured(reports), encoding="utf-8")
        terminalreporter.write_line(f"Those of each plan are in {path}")


@pytest.fixture(scope="session")
def show(pytestconfig: pytest.Config) -> Callable[[str], None]:
    """Write a line on the terminal, whatever pytest captures."""
    plugins = pytestconfig.pluginmanager
    terminal, capturing = plugins.getplugin("terminalreporter"), plugins.getplugin("capturemanager")

    def written(line: str) -> None:
        with capturing.global_and_fixture_disabled():
            terminal.ensure_newline()
            terminal.write_line(line)
            terminal.flush()

    return written


@pytest.fixture(scope="session")
def corpora(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """By text the prefix of its corpus."""
    return write_corpora(tmp_path_factory.mktemp("corpora"))


@pytest.fixture(scope="session")
def corpus(corpora: dict[str, str]) -> str:
    """The corpus of documents of 1 to 60 tokens."""
    return corpora["plain"]


@pytest.fixture(scope="session")
def reports(
    corpora: dict[str, str],
    show: Callable[[str], None],
    tmp_path_factory: pytest.TempPathFactory,
    pytestconfig: pytest.Config,
) -> dict[int, dict[str, Any]]:
    """By world size what `ranks.py` found."""
    folder = tmp_path_factory.mktemp("reports")
    (folder / "corpora.json").write_text(json.dumps(corpora), encoding="utf-8")
    found = pytestconfig.stash.setdefault(REPORTS, {})
    for world in WORLDS:
        launch(HERE / "ranks.py", world, folder, cwd=Path(corpora["plain"]).parent, show=show)
        found[world] = json.loads((folder / f"world-{world}.json").read_text(encoding="utf-8"))
    return found
