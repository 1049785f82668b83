"""PUB2-CLI-01: every command's output and messages on a terminal, in a pipe or in a log that is not UTF-8."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from pathlib import Path

import device_mesh.cli
import mask_compression.cli
import parallel_config.cli
import parallel_trainer.cli
import pipeline_schedule.cli
import pytest
from small_runs import corpus, write

pytestmark = pytest.mark.timeout(600)
BIN = Path(sys.executable).parent

SHOWN = {
    "check": ("parallel-config", "check", "run.yaml", "--world-size", "2", "--explain"),
    "fields": ("parallel-config", "fields"),
    "field": ("parallel-config", "fields", "parallelism"),
    "page of fields": ("parallel-config", "fields", "--markdown"),
    "migrate": ("parallel-config", "migrate", "old.yaml"),
    "mesh": ("device-mesh", "show", "run.yaml", "--world-size", "2"),
    "mask": ("mask-compression", "show", "--lengths", "5,7,4", "--cp", "2"),
    "schedule": ("pipeline-schedule", "show", "--stages", "2", "--microbatches", "4"),
    "plan": ("parallel-train", "plan", "run.yaml", "--world-size", "2"),
    "calls": ("parallel-train", "plan", "calls.yaml", "--world-size", "2", "--engine", "hyperparallel"),
    "data": ("parallel-train", "data", "show", "corpus"),
    "build": ("parallel-train", "data", "build", "--input", "words-≥.txt", "--output", "words-×"),
    "checkpoint": ("parallel-train", "checkpoint", "show", "ck-≤"),
    **{
        f"help of {' '.join(command)}": (*command, "--help")
        for command in (
            *(("parallel-config", name) for name in ("check", "fields", "migrate")),
            ("device-mesh", "show"),
            ("mask-compression", "show"),
            ("pipeline-schedule", "show"),
            *(("parallel-train", name) for name in ("run", "evaluate", "verify", "plan")),
            *(("parallel-train", "data", name) for name in ("build", "show")),
            *(
                ("parallel-train", "checkpoint", name)
                for name in ("show", "verify", "reshard", "export-hf", "import-hf")
            ),
        )
    },
}
REFUSED = {
    "degrees": ("parallel-config", "check", "wrong.yaml", "--world-size", "3"),
    "mesh": ("device-mesh", "show", "wrong.yaml", "--world-size", "3"),
    "mask": ("mask-compression", "show", "--lengths", "×"),
    "schedule": ("pipeline-schedule", "show", "--stages", "2", "--microbatches", "4", "--schedule", "≥"),
    "run": ("parallel-train", "run", "wrong.yaml", "--nproc", "2"),
    "data": ("parallel-train", "data", "show", "no-such-≤-corpus"),
    "rank": ("parallel-train", "plan", "run.yaml", "--world-size", "2", "--rank", "7"),
}
MAINS = {
    "parallel-config": parallel_config.cli.main,
    "device-mesh": device_mesh.cli.main,
    "mask-compression": mask_compression.cli.main,
    "pipeline-schedule": pipeline_schedule.cli.main,
    "parallel-train": parallel_trainer.cli.main,
}
OLD = Path(__file__).parents[1] / "packages/parallel-config/tests/data/graph_mode/qwen3.yaml"
ENCODINGS = ("ascii", "latin-1")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("terminals")
    corpus(folder / "corpus")
    checkpoint = "{save_path: ck-≤, save_interleaved_steps: 1}"
    write(folder / "run.yaml", steps=1, checkpoint=checkpoint)
    write(folder / "calls.yaml", steps=1, checkpoint="{enable_save: false}", more="parallelism: {tensor_parallel: 2}\n")
    (folder / "old.yaml").write_text(OLD.read_text(encoding="utf-8"), encoding="utf-8")
    (folder / "wrong.yaml").write_text("parallelism: {tensor_parallel: 2, context_parallel: 0}\n")
    (folder / "words-≥.txt").write_text("word ≥ word", encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def saved(place: Path) -> Path:
    """A run in an ascii log: its ranks print too."""
    code, stdout, stderr = in_a_process(place, ("parallel-train", "run", "run.yaml", "--output", "out-…"), "ascii")
    assert code == 0, stderr
    assert "Metrics, TensorBoard events and the loss curve are in out-..." in stdout
    return place


def in_a_process(place: Path, command: tuple[str, ...], encoding: str) -> tuple[int, str, str]:
    """Exit code, stdout and stderr, which must be text in the encoding; ascii goes to pipes, others to files."""
    environment = os.environ | {"PYTHONIOENCODING": encoding, "LC_ALL": "C"}
    environment |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    with (place / "stdout").open("w+b") as out, (place / "stderr").open("w+b") as err:
        pipe = subprocess.PIPE if encoding == "ascii" else None
        done = subprocess.run(
            [str(BIN / command[0]), *command[1:]], cwd=place, env=environment, stdout=pipe or out, stderr=pipe or err,
            check=False, timeout=240,
        )  # fmt: skip
    stdout, stderr = (place / "stdout").read_bytes(), (place / "stderr").read_bytes()
    if pipe:
        stdout, stderr = done.stdout, done.stderr
    return done.returncode, stdout.decode(encoding), stderr.decode(encoding)


def here(command: tuple[str, ...], encoding: str, monkeypatch: pytest.MonkeyPatch) -> tuple[int, str, str]:
    """The same without a process of its own, which for dozens of commands takes minutes."""
    streams = [io.TextIOWrapper(io.BytesIO(), encoding=encoding) for _ in range(2)]
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", streams[0])
        patch.setattr(sys, "stderr", streams[1])
        try:
            code = MAINS[command[0]](command[1:])
        except SystemExit as end:
            code = int(end.code or 0)
        for stream in streams:
            stream.flush()
    stdout, stderr = (stream.buffer.getvalue().decode(encoding) for stream in streams)  # type: ignore[attr-defined]
    return code, stdout, stderr


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("name", SHOWN)
def test_a_command_prints_and_ends_well(saved: Path, name: str, encoding: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(saved)
    code, stdout, stderr = here(SHOWN[name], encoding, monkeypatch)
    assert code == 0, stderr
    assert stdout
    assert "\\u" not in stdout  # readable: an escape would stand in a picture or a sentence of ours


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("name", REFUSED)
def test_a_message_is_readable(place: Path, name: str, encoding: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(place)
    code, _, stderr = here(REFUSED[name], encoding, monkeypatch)
    assert code == 2, stderr
    assert stderr
    assert "\\u" not in stderr


def test_what_an_encoding_lacks_is_written_in_ascii(place: Path) -> None:
    """The same picture, sign for sign."""
    _, ascii_text, _ = in_a_process(place, SHOWN["mask"], "ascii")
    _, text, _ = in_a_process(place, SHOWN["mask"], "utf-8")
    assert text.translate(str.maketrans("█▒·", "#+.")) == ascii_text
    assert "rank 1  12  ............#..." in ascii_text
