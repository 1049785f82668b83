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
from cases import EOD, PAD, SEQ_LENGTH, VOCAB_SIZE, WORLDS
from parallel_trainer.data.indexed import IndexedWriter
from parallel_trainer.launch.mpiexec import rank_environment

HERE = Path(__file__).parent


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--write-table", action="store_true", help="write what was found into docs/parity.md and README")


@pytest.fixture(scope="session")
def corpora(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """By text the prefix of its corpus of random tokens; documents end with EOD."""
    folder = tmp_path_factory.mktemp("corpora")
    generator = np.random.default_rng(0)

    def write(name: str, lengths: list[int], padded_to: int = 1) -> str:
        with IndexedWriter(folder / name, vocab_size=VOCAB_SIZE) as writer:
            for length in lengths:
                tokens = np.append(generator.integers(2, VOCAB_SIZE, length), EOD)
                padding = -len(tokens) % padded_to
                writer.add_document(np.append(tokens, np.full(padding, PAD, tokens.dtype)))
        return str(folder / name)

    # Samples with very different numbers of EODs; documents many times as long as a sample; documents of which each
    # fills three samples or less with tokens and the rest with padding.
    mixed = [
        int(generator.integers(1, 60) if generator.random() < 0.5 else generator.integers(1, 4)) for _ in range(300)
    ]
    long = [int(length) for length in generator.integers(20, 30, 4) * SEQ_LENGTH]
    short = [int(length) for length in generator.integers(5, 2 * SEQ_LENGTH, 120)]
    plain = write("mixed", mixed)
    _scenarios_corpus(folder / "output" / "python-stdlib", generator)
    return {
        "plain": plain,
        "packed": plain,
        "long": write("long", long),
        "padded": write("padded", short, padded_to=3 * SEQ_LENGTH),
    }


def _scenarios_corpus(prefix: Path, generator: np.random.Generator) -> None:
    """What the files in docs/scenarios read: bytes, and 256 at the end of a document."""
    prefix.parent.mkdir()
    with IndexedWriter(prefix, vocab_size=257) as writer:
        for length in generator.integers(10, 400, 200):
            writer.add_document(np.append(generator.integers(0, 256, length), 256))


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
