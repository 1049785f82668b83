"""Launches: each world size once for the whole test run, all its cases inside."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from cases import WORLDS
from corpora import write_corpora
from parallel_trainer.launch.mpiexec import rank_environment

HERE = Path(__file__).parent


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--write-table", action="store_true", help="write what was found into docs/parity.md and README")


@pytest.fixture(scope="session")
def corpora(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """By text the prefix of its corpus."""
    return write_corpora(tmp_path_factory.mktemp("corpora"))


@pytest.fixture(scope="session")
def corpus(corpora: dict[str, str]) -> str:
    """The corpus of documents of 1 to 60 tokens."""
    return corpora["plain"]


@pytest.fixture(scope="session")
def reports(corpora: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> dict[int, dict[str, Any]]:
    """By world size what `ranks.py` found."""
    folder = tmp_path_factory.mktemp("reports")
    (folder / "corpora.json").write_text(json.dumps(corpora), encoding="utf-8")
    found = {}
    for world in WORLDS:
        command = [str(Path(sys.executable).parent / "mpiexec"), "-n", str(world), sys.executable]
        environment = rank_environment(world, os.environ) | {"DEVICE_MESH_DEBUG": "0"}
        job = subprocess.run(
            [*command, str(HERE / "ranks.py"), str(folder)],
            cwd=Path(corpora["plain"]).parent,
            env=environment,
            capture_output=True,
            text=True,
            timeout=1500,
        )
        assert job.returncode == 0, f"{world} ranks ended with {job.returncode}:\n{job.stdout}\n{job.stderr}"
        found[world] = json.loads((folder / f"world-{world}.json").read_text(encoding="utf-8"))
    return found
