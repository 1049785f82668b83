"""A batch system gives the same command again: the run goes on, in its checkpoints and in what it reports."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from small_runs import call, corpus, metrics, write

pytestmark = pytest.mark.timeout(600)

OWN = "{save_path: ck, load_path: ck, save_interleaved_steps: 1}"


def test_pub2_ckpt_01_the_same_command_goes_on_in_its_checkpoints_and_its_output(tmp_path: Path) -> None:
    """PUB2-CKPT-01."""
    corpus(tmp_path / "corpus")
    file = tmp_path / "run.yaml"
    command = ("run", file, "--nproc", "1", "--output", "out")
    write(file, steps=3, samples=20, checkpoint=OWN)
    first = call(*command, cwd=tmp_path)
    assert first.returncode == 0, first.stderr
    assert "Nothing is saved in ck yet: the run begins anew" in first.stdout

    complete = call(*command, cwd=tmp_path)
    assert complete.returncode == 0, complete.stderr
    assert "ck/iteration_00000003 is of the last of 3 steps: this run is complete" in complete.stdout
    assert [record["step"] for record in metrics(tmp_path / "out")] == [1, 2, 3]

    write(file, steps=5, samples=20, checkpoint=OWN)
    again = call(*command, cwd=tmp_path)
    assert again.returncode == 0, again.stderr
    assert "Going on after step 3, from ck/iteration_00000003" in again.stdout
    assert "training.steps was 3 and is 5: the learning rate of the steps that both have is the same" in again.stdout
    assert "step 3/5" not in again.stdout
    whole = metrics(tmp_path / "out")
    assert [record["step"] for record in whole] == [1, 2, 3, 4, 5]
    assert [record["consumed_samples"] for record in whole] == [4, 8, 12, 16, 20]

    # The checkpoint is older than the last line: two steps are trained again, and said once.
    for step in (4, 5):
        shutil.rmtree(tmp_path / "ck" / f"iteration_0000000{step}")
    with (tmp_path / "out" / "metrics.jsonl").open("a") as file_of_metrics:
        file_of_metrics.write('{"step": 6, "lo')  # a rank that was killed while it wrote
    lost = call(*command, cwd=tmp_path)
    assert lost.returncode == 0, lost.stderr
    assert (
        "out goes on after step 3; what it has of steps 4 to 5 is replaced by these steps trained again" in lost.stdout
    )
    repeated = metrics(tmp_path / "out")
    assert [(record["step"], record["loss"]) for record in repeated] == [(r["step"], r["loss"]) for r in whole]

    # As it was before: nothing of another run is written over.
    other = write(tmp_path / "other.yaml", steps=6, samples=24, checkpoint=OWN.replace("ck", "elsewhere"))
    for path in (other, write(tmp_path / "none.yaml", steps=6, samples=24, checkpoint="{enable_save: false}")):
        refused = call("run", path, "--nproc", "1", "--output", "out", cwd=tmp_path)
        assert refused.returncode == 2
        assert "--output out holds the metrics of another run" in refused.stderr
    fork = write(tmp_path / "fork.yaml", steps=6, samples=24, checkpoint="{save_path: ck, save_interleaved_steps: 1}")
    refused = call("run", fork, "--nproc", "1", "--output", "out", cwd=tmp_path)
    assert refused.returncode == 2
    assert "checkpoint.load_path: ck goes on with it" in refused.stderr
    assert len(metrics(tmp_path / "out")) == 5


def test_a_run_that_was_killed_before_it_saved_begins_anew_in_its_own_output(tmp_path: Path) -> None:
    corpus(tmp_path / "corpus")
    file = write(tmp_path / "run.yaml", steps=2, checkpoint=OWN)
    command = ("run", file, "--nproc", "2", "--output", "out")
    first = call(*command, cwd=tmp_path)
    assert first.returncode == 0, first.stderr
    for folder in (tmp_path / "ck").glob("iteration_*"):
        shutil.rmtree(folder)
    again = call(*command, cwd=tmp_path)
    assert again.returncode == 0, again.stderr
    assert "out goes on after step 0; what it has of steps 1 to 2 is replaced" in again.stdout
    assert [record["step"] for record in metrics(tmp_path / "out")] == [1, 2]


def test_pub2_path_01_a_run_saves_into_the_home_folder(tmp_path: Path) -> None:
    home, place = tmp_path / "home", tmp_path / "place"
    for folder in (home, place):
        folder.mkdir()
    corpus(home / "corpus")
    file = write(place / "run.yaml", steps=1, corpus="~/corpus",
                 checkpoint="{save_path: ~/nc-ckpt, save_interleaved_steps: 1}")  # fmt: skip
    done = call("run", file, "--nproc", "1", "--output=~/out", cwd=place, HOME=str(home))
    assert done.returncode == 0, done.stderr
    assert (home / "nc-ckpt" / "iteration_00000001" / "metadata.json").is_file()
    assert (home / "out" / "metrics.jsonl").is_file()
    assert [path.name for path in place.iterdir()] == ["run.yaml"]
