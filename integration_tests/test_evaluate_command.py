"""`parallel-train evaluate`: the number that the run reported, from its checkpoint or a Hugging Face folder."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import numpy as np
import pytest
from parallel_trainer.checkpoint.hugging_face import declared, write_folder
from parallel_trainer.models.config import Qwen3Config
from small_runs import call, corpus, metrics, write

pytestmark = pytest.mark.timeout(900)

EVALUATED = "eval_dataset: {interval: 2, samples: 8}\n"
SAVES = "{save_path: ck, save_interleaved_steps: 1}"


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of three steps, saved and evaluated after the second and the last."""
    folder = tmp_path_factory.mktemp("evaluate")
    corpus(folder / "corpus")
    write(folder / "run.yaml", checkpoint=SAVES, split="8, 2, 0", more=EVALUATED)
    (folder / "split.yaml").write_text((folder / "run.yaml").read_text() + "parallelism: {tensor_parallel: 2}\n")
    done = call("run", "run.yaml", "--nproc", "1", "--output", "out", cwd=folder)
    assert done.returncode == 0, done.stderr
    return folder


def reported(place: Path, step: int) -> float:
    (found,) = (line["eval_loss"] for line in metrics(place / "out") if "eval_loss" in line and line["step"] == step)
    return float(found)


def refused(done: subprocess.CompletedProcess[str], *fragments: str) -> None:
    assert done.returncode == 2, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    for fragment in fragments:
        assert fragment in done.stderr


def test_it_gives_the_number_that_the_run_gave(place: Path) -> None:
    done = call("evaluate", "run.yaml", "--output", "newest", cwd=place)
    assert done.returncode == 0, done.stderr
    assert "weights: ck/iteration_00000003, saved after step 3\nranks: 1 = " in done.stdout
    (line,) = metrics(place / "newest")
    assert (line["step"], line["eval_loss"], line["eval_samples"]) == (3, reported(place, 3), 8)
    assert line["eval_perplexity"] == pytest.approx(np.exp(line["eval_loss"]), rel=1e-12)
    assert f"eval  loss {line['eval_loss']:.6f}  perplexity {line['eval_perplexity']:.4f}  8 samples" in done.stdout
    refused(call("evaluate", "run.yaml", "--output", "newest", cwd=place), "--output newest holds the metrics")


def test_on_other_ranks_and_of_another_checkpoint_it_is_the_same_to_rounding(place: Path) -> None:
    older = "ck/iteration_00000002"
    done = call("evaluate", "split.yaml", "--checkpoint", older, "--nproc", "2", "--output", "older", cwd=place)
    assert done.returncode == 0, done.stderr
    assert f"weights: {older}, saved after step 2" in done.stdout
    (line,) = metrics(place / "older")
    assert line["eval_loss"] == pytest.approx(reported(place, 2), rel=1e-6)
    assert reported(place, 2) != pytest.approx(reported(place, 3), rel=1e-4)  # so that the test could fail


def test_a_hugging_face_folder_is_evaluated_as_it_is(place: Path) -> None:
    """Exported weights give the run's number; and a model of zeros that of even guesses, ln of the vocabulary."""
    exported = call("checkpoint", "export-hf", "ck", "hf", cwd=place)
    assert exported.returncode == 0, exported.stderr
    for world, file in ((1, "run.yaml"), (2, "split.yaml")):
        done = call("evaluate", file, "--checkpoint", "hf", "--nproc", str(world), "--output", f"hf{world}", cwd=place)
        assert done.returncode == 0, done.stderr
        assert "weights: hf\n" in done.stdout
        (line,) = metrics(place / f"hf{world}")
        assert line["eval_loss"] == pytest.approx(reported(place, 3), rel=1e-6)
    config = Qwen3Config(vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
                         num_attention_heads=4, num_key_value_heads=2, head_dim=8)  # fmt: skip
    values = ((name, [np.zeros(weight.size)]) for name, weight in declared(config).items())
    write_folder(place / "zeros", config, values)
    done = call("evaluate", "run.yaml", "--checkpoint", "zeros", cwd=place)
    assert done.returncode == 0, done.stderr
    (loss,) = re.findall(r"eval  loss (\S+)", done.stdout)
    assert float(loss) == pytest.approx(np.log(64), abs=1e-6)


def test_what_cannot_be_evaluated_is_said(place: Path) -> None:
    text = (place / "run.yaml").read_text()
    (place / "none.yaml").write_text(text.replace(EVALUATED, ""))
    refused(call("evaluate", "none.yaml", cwd=place), "no eval_dataset, so there is nothing to evaluate")
    (place / "nowhere.yaml").write_text(text.replace(SAVES, "{enable_save: false}"))
    refused(call("evaluate", "nowhere.yaml", cwd=place), "There is no checkpoint to evaluate", "Give --checkpoint PATH")
    refused(call("evaluate", "run.yaml", "--checkpoint", "gone", cwd=place), "gone does not exist")
    (place / "other.yaml").write_text(text.replace("intermediate_size: 48", "intermediate_size: 64"))
    refused(call("evaluate", "other.yaml", cwd=place), "does not fit this model", "[48, 32] in it, and [64, 32] in the")
    other = call("evaluate", "other.yaml", "--checkpoint", "hf", cwd=place)
    refused(other, "hf does not fit this model, by its weights", "[48, 32] in it, and [64, 32] in the model")
    engine = call("evaluate", "run.yaml", "--engine", "hyperparallel", cwd=place)
    refused(engine, "--engine hyperparallel", "native engine alone")
    refused(call("evaluate", "run.yaml", "--nproc", "0", cwd=place), "--nproc 0 must be at least 1")
