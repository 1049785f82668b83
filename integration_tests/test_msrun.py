"""The reference's start-up line on a machine without NPUs: msrun ... run_mindformer.py --config FILE --mode 1."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from cases import STEPS, Case, Model
from msrun import BIN, ENVIRONMENT, MODULE, msrun

DOOR = [str(Path(__file__).parents[1] / "tools" / "run_mindformer.py")]
pytestmark = pytest.mark.timeout(1200)


def start(folder: Path, workers: int, *program: str) -> subprocess.CompletedProcess[str]:
    """What a call of msrun comes to; no process of it is left then."""
    done = msrun(folder, workers, *program)
    assert [process for process in psutil.process_iter(["cwd"]) if process.info["cwd"] == str(folder)] == []
    return done


def losses(folder: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]


@pytest.fixture
def config(tmp_path: Path, corpora: dict[str, str]) -> str:
    """A file for any number of replicas of two shards."""
    case = Case(2, 2, model=Model(dtype="float32"))
    (tmp_path / "tiny.yaml").write_text(case.yaml(corpora), encoding="utf-8")
    return "tiny.yaml"


@pytest.mark.parametrize(("workers", "door"), [(2, DOOR), (4, MODULE)])
def test_trains_as_ranks_of_mpiexec_do(tmp_path: Path, config: str, workers: int, door: list[str]) -> None:
    done = start(tmp_path, workers, *door, "--config", config, "--mode", "1", "--output_dir", "runs")
    assert done.returncode == 0, done.stdout + done.stderr
    (run,) = (tmp_path / "runs").iterdir()
    assert len(losses(run)) == STEPS
    report = (tmp_path / "logs" / "worker_0.log").read_text(encoding="utf-8")
    assert report.startswith(f"Rank 0 of {workers} reports the run here")
    assert report.count("step 1/") == 1
    for rank in range(1, workers):
        assert (tmp_path / "logs" / f"worker_{rank}.log").read_text(encoding="utf-8") == ""
    assert "worker_0.log" in (tmp_path / "logs" / "scheduler.log").read_text(encoding="utf-8")
    command = [str(BIN / "parallel-train"), "run", config, "--nproc", str(workers), "--output", "mpiexec"]
    subprocess.run(command, cwd=tmp_path, env=ENVIRONMENT, check=True, capture_output=True, timeout=500)
    assert losses(run) == losses(tmp_path / "mpiexec")


@pytest.mark.parametrize(
    ("workers", "arguments", "named"),
    [
        (3, ["--mode", "1"], "parallelism.data_parallel_shard 2 must divide data_parallel = world_size 3"),
        (2, ["--mode", "0"], "--mode 0 cannot be run: "),
        (2, ["--device_target", "Ascend"], "--device ascend: this machine has no NPU (/dev/davinci0)"),
        (2, ["--mode", "graph"], "--mode graph cannot be run: "),
        (2, ["--mode", "1", "--resume_training", "true"], "unrecognized arguments: --resume_training true"),
        (2, ["--run_mode", "predict"], "--run_mode predict cannot be run: "),
    ],
)
def test_what_cannot_be_run_is_said_once_and_nothing_is_written(
    tmp_path: Path, config: str, workers: int, arguments: list[str], named: str
) -> None:
    done = start(tmp_path, workers, *DOOR, "--config", config, *arguments)
    assert done.returncode != 0
    printed = done.stdout + done.stderr
    assert printed.count(named) == 1, printed
    # What is left of tracebacks is that of msrun itself, which ends so whenever a worker fails.
    assert printed.count("Traceback") == 1
    assert not (tmp_path / "output").exists()


def test_help_is_shown_once(tmp_path: Path) -> None:
    done = start(tmp_path, 2, *MODULE, "--help")
    assert done.returncode == 0
    assert done.stdout.count("python -m parallel_trainer.run_mindformer --config FILE --mode 1") == 1


def test_one_device_needs_no_msrun(tmp_path: Path, config: str) -> None:
    text = (tmp_path / config).read_text(encoding="utf-8").replace("data_parallel_shard: 2", "data_parallel_shard: 1")
    (tmp_path / config).write_text(text, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, *MODULE[1:], "--config", config, "--mode", "1"],
        cwd=tmp_path,
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stderr
    assert len(losses(next((tmp_path / "output").iterdir()))) == STEPS
