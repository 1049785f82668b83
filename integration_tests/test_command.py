"""`parallel-train` as a user meets it: run, verify, joining ranks, Ctrl-C, dying ranks, bad input."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import psutil
import pytest
from cases import STEPS, Case, Model
from msrun import interruptible

BIN = Path(sys.executable).parent
RANK = [sys.executable, "-m", "parallel_trainer"]
COMMAND = [str(BIN / "parallel-train")]
pytestmark = pytest.mark.timeout(600)

START_SECONDS = 300.0
END_SECONDS = 60.0
"""Until ranks of a run that would go on for hours are gone, on a machine that has much else to do."""


def call(*arguments: str | Path, cwd: Path, before: Sequence[str] = ()) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    return subprocess.run(
        [*before, *COMMAND, *map(str, arguments)],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        timeout=500,
    )


@pytest.fixture
def config(tmp_path: Path, corpora: dict[str, str]) -> Path:
    """A file whose plan is one replica of two shards."""
    path = tmp_path / "tiny.yaml"
    path.write_text(Case(1, 2, model=Model(dtype="float32")).yaml(corpora), encoding="utf-8")
    return path


def edited(config: Path, **changes: str) -> Path:
    """The same file with the first `name: value` of each name changed."""
    text = config.read_text(encoding="utf-8")
    for name, value in changes.items():
        text, found = re.subn(rf"(?m)^(\s*){name}: .*$", rf"\g<1>{name}: {value}", text, count=1)
        assert found, name
    config.write_text(text, encoding="utf-8")
    return config


def metrics(folder: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]


def test_run_starts_ranks_and_leaves_metrics_events_and_a_curve(config: Path, tmp_path: Path) -> None:
    done = call("run", config, "--nproc", "2", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    (folder,) = (tmp_path / "output").iterdir()
    steps = metrics(folder)
    assert [step["step"] for step in steps] == list(range(1, STEPS + 1))
    assert {"loss", "lr", "grad_norm", "tokens_per_second", "seconds", "consumed_samples"} <= set(steps[0])
    assert steps[-1]["loss"] < steps[0]["loss"]
    assert (folder / "loss_curve.png").read_bytes().startswith(b"\x89PNG\r\n")
    assert list((folder / "tensorboard").glob("events.out.tfevents.*"))
    assert done.stdout.count(f"step 1/{STEPS}") == 1
    # The same file, started by the user's own mpiexec: the command joins the ranks it is among.
    joined = call(
        "run",
        config,
        "--output",
        "joined",
        cwd=tmp_path,
        before=[str(BIN / "mpiexec"), "-n", "2", sys.executable],
    )
    assert joined.returncode == 0, joined.stderr
    assert [step["loss"] for step in metrics(tmp_path / "joined")] == [step["loss"] for step in steps]
    # A folder with the metrics of one run is not written over by another.
    refused(call("run", config, "--nproc", "2", "--output", "joined", cwd=tmp_path), "joined", "another run")
    assert len(metrics(tmp_path / "joined")) == STEPS


def test_bfloat16_computes_in_float32_and_says_so_once(config: Path, tmp_path: Path) -> None:
    edited(config, params_dtype="bfloat16", compute_dtype="bfloat16", steps="1", sizes="[24, 0, 0]")
    done = call("run", config, "--nproc", "2", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert (done.stdout + done.stderr).count("bfloat16: on a CPU weights and arithmetic are float32") == 1


def test_verify_compares_with_one_rank(config: Path, tmp_path: Path) -> None:
    done = call("verify", config, "--nproc", "2", "--steps", "2", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 rank (dp_replicate 1 x dp_shard 1) against 2 ranks (dp_replicate 1 x dp_shard 2), float64" in done.stdout
    assert "Equal within loss 1e-09, grad norm 1e-09, weights 1e-09" in done.stdout
    assert not (tmp_path / "output").exists()


def test_verify_says_where_no_weight_was_trained(config: Path, tmp_path: Path) -> None:
    done = call("verify", edited(config, warmup_steps="2"), "--nproc", "2", "--steps", "1", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "The learning rate is 0 in every step compared, 1 of " in done.stderr
    assert "--steps 2 compares an update too" in done.stderr


def test_verify_finds_a_rank_whose_learning_rate_is_off_by_a_millionth(
    config: Path, tmp_path: Path, monkeypatch
) -> None:
    fault = """
import os
if os.environ.get("PMI_RANK") == "1":
    from parallel_trainer.optim.adamw import AdamW
    right = AdamW.step
    AdamW.step = lambda self, gradients, *, lr: right(self, gradients, lr=lr * (1 + 1e-6))
"""
    (tmp_path / "sitecustomize.py").write_text(fault, encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    done = call("verify", edited(config, warmup_steps="0"), "--nproc", "2", "--steps", "2", cwd=tmp_path)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "DIFFERENT: " in done.stdout
    assert "weights by" in done.stdout


def running(marker: str) -> list[psutil.Process]:
    """Processes whose command line names `marker`, zombies left out."""
    found = []
    for process in psutil.process_iter(["cmdline", "status"]):
        line = " ".join(process.info["cmdline"] or ())
        if marker in line and process.info["status"] != psutil.STATUS_ZOMBIE:
            found.append(process)
    return found


def first_step(process: subprocess.Popen[bytes], folder: Path) -> None:
    """Wait until a run with output in folder/out has done its first step."""
    deadline = time.monotonic() + START_SECONDS
    while not (folder / "out" / "metrics.jsonl").exists():
        assert process.poll() is None, (folder / "log").read_text()
        assert time.monotonic() < deadline
        time.sleep(0.1)


@pytest.fixture
def long_run(config: Path, tmp_path: Path):
    """A run of two ranks that has finished its first step and would go on for long."""
    edited(config, steps="100000", sizes="[24, 0, 0]")
    log = tmp_path / "log"
    with log.open("w") as file, interruptible():
        process = subprocess.Popen(
            [*COMMAND, "run", str(config), "--nproc", "2", "--output", str(tmp_path / "out")],
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    first_step(process, tmp_path)
    yield process, log
    if process.poll() is None:
        process.terminate()
        process.wait(END_SECONDS)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP], ids=["ctrl-c", "terminal closed"])
def test_interrupt_ends_all_ranks_and_keeps_what_was_measured(long_run, config, tmp_path, number) -> None:
    process, log = long_run
    assert len(running(str(config))) >= 3
    process.send_signal(number)
    assert process.wait(END_SECONDS) == 130, log.read_text()
    assert running(str(config)) == []
    assert "Traceback" not in log.read_text()
    assert metrics(tmp_path / "out")
    assert (tmp_path / "out" / "loss_curve.png").read_bytes().endswith(b"IEND\xaeB`\x82")


def test_a_run_that_ignores_hangups_goes_on_when_the_terminal_closes(config: Path, tmp_path: Path) -> None:
    """As `nohup parallel-train run ...` does."""
    edited(config, steps="100000", sizes="[24, 0, 0]")
    with (tmp_path / "log").open("w") as file, interruptible():
        command = ["nohup", *COMMAND, "run", str(config), "--nproc", "2", "--output", str(tmp_path / "out")]
        process = subprocess.Popen(command, stdout=file, stderr=file, start_new_session=True)
    try:
        first_step(process, tmp_path)
        steps = len(metrics(tmp_path / "out"))
        process.send_signal(signal.SIGHUP)
        deadline = time.monotonic() + START_SECONDS
        while len(metrics(tmp_path / "out")) < steps + 3:
            assert process.poll() is None, (tmp_path / "log").read_text()
            assert time.monotonic() < deadline
            time.sleep(0.1)
    finally:
        process.terminate()
        process.wait(END_SECONDS)


def test_ranks_end_when_the_process_that_started_them_is_killed(long_run, config: Path) -> None:
    process, _ = long_run
    process.kill()
    process.wait(END_SECONDS)
    deadline = time.monotonic() + END_SECONDS
    while running(str(config)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert running(str(config)) == []


def test_rank_that_is_killed_takes_the_job_down(long_run, config: Path) -> None:
    process, _ = long_run
    ranks = [other for other in running(str(config)) if other.cmdline()[:3] == RANK]
    assert len(ranks) == 2
    ranks[1].kill()
    _, alive = psutil.wait_procs([ranks[0]], timeout=END_SECONDS)
    assert alive == []
    assert process.wait(END_SECONDS) not in (0, None)
    assert running(str(config)) == []


FAULT_IN_BACKWARD = """
import os, signal, time
if os.environ.get("PMI_RANK") == "1":
    from parallel_trainer.parallel import pipeline
    right, calls = pipeline.Chunk.backward, 0
    def backward(self, tape, gradient):
        global calls
        calls += 1
        if calls == 8:  # the third of five micro-batches of the second step; the other rank waits for its gradient
            open("fault", "w").write(str(time.time()))
            {fault}
        return right(self, tape, gradient)
    pipeline.Chunk.backward = backward
"""


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("os.kill(os.getpid(), signal.SIGKILL)", "Killed (signal 9)"),
        ("raise RuntimeError('a fault')", "in backward(stage 1, micro-batch 2), step"),
    ],
    ids=["killed", "error"],
)
def test_rank_that_dies_amid_a_schedule_takes_the_pipeline_down(
    corpora: dict[str, str], tmp_path: Path, monkeypatch, fault: str, said: str
) -> None:
    path = tmp_path / "pipeline.yaml"
    path.write_text(Case(pp=2, accumulation=5, model=Model(batch=10)).yaml(corpora), encoding="utf-8")
    (tmp_path / "sitecustomize.py").write_text(FAULT_IN_BACKWARD.format(fault=fault), encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])]))
    done = call("run", path, "--nproc", "2", "--output", "out", cwd=tmp_path)
    seconds = time.time() - float((tmp_path / "fault").read_text())
    assert done.returncode not in (0, None)
    assert (done.stdout + done.stderr).count(said) == 1, done.stdout + done.stderr
    assert len(metrics(tmp_path / "out")) == 1
    assert seconds < END_SECONDS
    assert running(str(path)) == []


def refused(done: subprocess.CompletedProcess[str], *named: str) -> None:
    """One readable message with these words, a non-zero exit, no traceback."""
    assert done.returncode not in (0, None), done.stdout
    assert "Traceback" not in done.stderr
    for word in named:
        assert done.stderr.count(word) >= 1, (word, done.stderr)
    lines = [line for line in done.stderr.splitlines() if line.strip()]
    assert len(set(lines)) == len(lines), f"said twice:\n{done.stderr}"


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"data_parallel_shard": "3"}, ["data_parallel_shard", "3", "2", "parallel-config check "]),
        ({"local_batch_size": "5"}, ["global_batch_size", "24", "10"]),
        ({"type": "CosineAnnealingLR"}, ["CosineAnnealingLR", "ConstantWarmUpLR"]),
        ({"vocab_size": "40"}, ["40", "vocab"]),
        ({"data_path": "[nowhere/at-all]"}, ["nowhere/at-all"]),
        ({"create_compressed_eod_mask": "true"}, ["create_compressed_eod_mask"]),
        ({"model_type": "llama"}, ["llama", "qwen3", "deepseek_v3"]),
    ],
)
def test_bad_file_is_refused_before_any_rank_starts(config: Path, tmp_path: Path, changes, named) -> None:
    if changes.get("type"):
        text = config.read_text(encoding="utf-8").replace("LinearWithWarmUpLR", changes["type"])
        config.write_text(text, encoding="utf-8")
    else:
        edited(config, **changes)
    refused(call("run", config, "--nproc", "2", cwd=tmp_path), *named)
    assert not (tmp_path / "output").exists()


def test_verify_covers_context_parallelism_on_packed_text(corpora: dict[str, str], tmp_path: Path) -> None:
    path = tmp_path / "packed.yaml"
    case = Case(cp=2, asynchronous=True, order="zigzag", model=Model(text="packed"))
    path.write_text(case.yaml(corpora), encoding="utf-8")
    done = call("verify", path, "--nproc", "2", "--steps", "2", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "cp 2 (colossal, zigzag, asynchronous)" in done.stdout
    assert "Equal within" in done.stdout


def test_missing_file(tmp_path: Path) -> None:
    refused(call("run", "nowhere.yaml", "--nproc", "2", cwd=tmp_path), "nowhere.yaml")


def test_launcher_and_nproc_that_do_not_match(config: Path, tmp_path: Path) -> None:
    done = call("run", config, "--nproc", "4", cwd=tmp_path, before=[str(BIN / "mpiexec"), "-n", "2", sys.executable])
    assert done.returncode == 2
    assert "--nproc 4" in done.stderr
    assert "2 ranks" in done.stderr
    assert "env -u PMI_FD " in done.stderr  # for a shell that has them from elsewhere


def test_error_in_joined_ranks_is_said_once(config: Path, tmp_path: Path) -> None:
    edited(config, data_parallel_shard="3")
    done = call("run", config, cwd=tmp_path, before=[str(BIN / "mpiexec"), "-n", "2", sys.executable])
    assert done.returncode != 0
    assert done.stderr.count("parallelism.data_parallel_shard") == 1, done.stderr


def test_loss_that_is_not_finite_ends_the_run_once_and_names_the_numbers(config: Path, tmp_path: Path) -> None:
    edited(config, learning_rate="1.0e+30", warmup_steps="0", max_norm="0.0")
    done = call("run", config, "--nproc", "2", "--output", "out", cwd=tmp_path)
    assert done.returncode != 0
    assert done.stderr.count("training cannot go on") == 1, done.stderr
    assert "Traceback" not in done.stderr
    assert metrics(tmp_path / "out")[0]["step"] == 1
    assert (tmp_path / "out" / "loss_curve.png").read_bytes().endswith(b"IEND\xaeB`\x82")


NAN_IN_GRADIENTS = """
import os
if os.environ.get("PMI_RANK") == "1":
    from parallel_trainer.parallel.fully_shard import ShardedWeights
    right, step = ShardedWeights.finish_gradients, 0
    def finish_gradients(self):
        global step
        step += 1
        right(self)
        if step in (2, 4, 5, 6):
            self.gradients[0] = float("nan")
    ShardedWeights.finish_gradients = finish_gradients
"""


def test_gradient_that_is_not_finite_on_one_rank_is_skipped_on_all_until_too_many_follow_each_other(
    config: Path, tmp_path: Path, monkeypatch
) -> None:
    (tmp_path / "sitecustomize.py").write_text(NAN_IN_GRADIENTS, encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])]))
    edited(config, steps="9", max_norm="0.5\n  use_skip_step_on_nan: true\n  max_consecutive_skipped_steps: 3")
    done = call("run", config, "--nproc", "2", "--output", "out", cwd=tmp_path)
    assert done.returncode not in (0, None)
    assert done.stderr.count("3 steps in a row were skipped, because loss or gradient norm were not finite") == 1, (
        done.stderr
    )
    assert "max_consecutive_skipped_steps is 3" in done.stderr
    assert "Traceback" not in done.stderr
    assert running(str(config)) == []
    steps = metrics(tmp_path / "out")
    # Step 3 starts the count anew; step 6, the third in a row, is the end.
    assert [step["updated"] for step in steps] == [True, False, True, False, False]
    assert [step["grad_norm"] is None for step in steps] == [False, True, False, True, True]
    assert all(step["loss"] > 0 for step in steps)
    assert done.stdout.count("skipped: not finite") == 3


OVERFLOW_IN_UPDATE = """
import os, signal
if os.environ.get("PMI_RANK") == "1":
    from parallel_trainer.parallel.fully_shard import ShardedWeights
    right = ShardedWeights.finish_gradients
    def finish_gradients(self):
        right(self)
        self.values[0] = 3.3e38
        os.kill(os.getpid(), signal.SIGTERM)
    ShardedWeights.finish_gradients = finish_gradients
"""


def test_an_update_that_overflows_on_one_rank_ends_the_run_and_is_never_saved(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where such steps are skipped, every step is saved, and the run is asked to stop and save meanwhile."""
    (tmp_path / "sitecustomize.py").write_text(OVERFLOW_IN_UPDATE, encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])]))
    saved = "checkpoint:\n  save_path: ck\n  save_interleaved_steps: 1\n"
    edited(config, learning_rate="1.0e+38", max_norm="0.5\n  use_skip_step_on_nan: true")
    config.write_text(config.read_text(encoding="utf-8") + saved, encoding="utf-8")
    done = call("run", config, "--nproc", "2", "--output", "out", cwd=tmp_path)
    assert done.returncode not in (0, None)
    assert done.stderr.count("made weights that are not finite") == 1, done.stderr
    assert "Traceback" not in done.stderr
    assert {path.name for path in (tmp_path / "ck").iterdir()} <= {".lock", ".run"}
    assert not (tmp_path / "out").exists(), "no step was made"
