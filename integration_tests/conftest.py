"""Launches: each world size once for the whole test run, all its cases inside."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cases import SEQ_LENGTH, VOCAB_SIZE, WORLDS
from parallel_trainer.data.indexed import IndexedWriter
from parallel_trainer.launch.mpiexec import rank_environment

HERE = Path(__file__).parent


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--write-table", action="store_true", help="write what was found into docs/parity.md and README")


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    """300 documents of 1 to 60 random tokens, each ended by token 0: samples have very different numbers of EODs."""
    prefix = tmp_path_factory.mktemp("corpus") / "random"
    generator = np.random.default_rng(0)
    with IndexedWriter(prefix, vocab_size=VOCAB_SIZE) as writer:
        for _ in range(300):
            length = int(generator.integers(1, 60) if generator.random() < 0.5 else generator.integers(1, 4))
            writer.add_document(np.append(generator.integers(1, VOCAB_SIZE, length), 0))
    assert SEQ_LENGTH < 60
    return str(prefix)


@pytest.fixture(scope="session")
def reports(corpus: str, tmp_path_factory: pytest.TempPathFactory) -> dict[int, dict[str, Any]]:
    """By world size what `ranks.py` found."""
    folder = tmp_path_factory.mktemp("reports")
    found = {}
    for world in WORLDS:
        command = [str(Path(sys.executable).parent / "mpiexec"), "-n", str(world), sys.executable]
        environment = rank_environment(world, os.environ) | {"DEVICE_MESH_DEBUG": "1"}
        job = subprocess.run(
            [*command, str(HERE / "ranks.py"), corpus, str(folder)],
            env=environment,
            capture_output=True,
            text=True,
            timeout=1500,
        )
        assert job.returncode == 0, f"{world} ranks ended with {job.returncode}:\n{job.stdout}\n{job.stderr}"
        found[world] = json.loads((folder / f"world-{world}.json").read_text(encoding="utf-8"))
    return found
