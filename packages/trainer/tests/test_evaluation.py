"""Evaluation: which samples count, what they lose, what is refused, when it happens and what a run leaves of it."""

from __future__ import annotations

import json
import math
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from device_mesh import connect
from hypothesis import given, settings
from hypothesis import strategies as st
from mindspore import Tensor, mint
from mindspore.graph.api import _pynative_executor
from parallel_config import loads
from parallel_trainer.batch import IGNORED_LABEL, MicroBatch
from parallel_trainer.cli.run import _train
from parallel_trainer.data.held_out import HeldOut
from parallel_trainer.data.indexed import IndexedWriter
from parallel_trainer.data.sample import Sample, stack
from parallel_trainer.errors import UserError
from parallel_trainer.evaluation import EvaluationResult, evaluate
from parallel_trainer.job import Job, prepare
from parallel_trainer.models.single import losses
from parallel_trainer.models.unit import Unit
from parallel_trainer.parallel.chunk import Chunk
from parallel_trainer.parallel.fully_shard import ShardedWeights
from parallel_trainer.parallel.pipeline import Pipeline
from parallel_trainer.parallel.weights import Constant, Weight
from parallel_trainer.trainer import Trainer

SEQ_LENGTH = 8
FILE = """
training: {{steps: 5, global_batch_size: 4, local_batch_size: 2, max_norm: 1.0}}
model: {{model_type: qwen3, architectures: Qwen3ForCausalLM, vocab_size: 32, seq_length: 8, hidden_size: 8,
        intermediate_size: 12, num_hidden_layers: 1, num_attention_heads: 2, num_key_value_heads: 1, head_dim: 4,
        initializer_range: 0.3, params_dtype: float64, compute_dtype: float64}}
lr_scheduler: {{type: ConstantWarmUpLR, learning_rate: 1.0e-2, warmup_steps: 0}}
train_dataset:
  dataloader:
    type: BlendedMegatronDatasetDataLoader
    datasets_type: GPTDataset
    sizes: {sizes}
    config: {{{data}, seq_length: 8, eod: 0, eod_mask_loss: true, create_attention_mask: false}}
{section}
"""

OWN = (
    "{interval: 1, dataloader: {type: BlendedMegatronDatasetDataLoader, datasets_type: GPTDataset, config: "
    "{valid_data_path: [x], seq_length: 8, eod: 40, create_attention_mask: false}}}"
)


@pytest.fixture(scope="module")
def corpora(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the corpora a and b, of which the last quarter of the documents has 10 · 7 tokens."""
    folder = tmp_path_factory.mktemp("corpora")
    generator = np.random.default_rng(0)
    for name in "ab":
        with IndexedWriter(folder / name, vocab_size=32) as writer:
            for _ in range(40):
                writer.add_document(np.append(generator.integers(1, 32, 6), 0))
    return folder


def job(folder: Path, section: str, *, data: str = 'data_path: [{a}], split: "3, 1"', sizes: str = "[8, 0, 0]") -> Job:
    """The file with this `eval_dataset`; `{a}` and `{b}` stand for the corpora."""
    text = FILE.format(data=data.format(a=folder / "a", b=folder / "b"), section=section, sizes=sizes)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Extensions of this project")
        return prepare(loads(text), 1)


def trainer(made: Job) -> Trainer:
    return Trainer(made, connect("single"))


def test_a_model_that_knows_nothing_loses_the_logarithm_of_the_vocabulary(corpora: Path) -> None:
    made = trainer(job(corpora, "eval_dataset: {interval: 2}"))
    made.weights.values[...] = 0
    result = made.evaluate()
    assert result.loss == pytest.approx(math.log(32), rel=1e-14)
    assert result.perplexity == pytest.approx(32, rel=1e-13)


def test_loss_is_the_mean_over_the_tokens_of_every_sample_once(corpora: Path) -> None:
    """(10 · 7 - 1) // 8 = 8 samples, 7 taken, in passes of two; against one sample at a time, with no pipeline."""
    made = trainer(job(corpora, "eval_dataset: {interval: 2, samples: 7}"))
    held_out = made.job.held_out
    assert held_out is not None
    assert len(held_out.dataset) == 8
    weights = dict(made.full_values())
    samples = [held_out.dataset[number] for number in range(7)]
    total = sum(losses(made.model, weights, stack([sample]))[0] for sample in samples)
    counted = sum(float(sample.loss_mask.sum()) for sample in samples)
    assert counted < 7 * SEQ_LENGTH
    result = made.evaluate()
    assert result.valid_tokens == counted
    assert result.loss == pytest.approx(total / counted, rel=1e-13)


def test_a_step_after_an_evaluation_is_the_step_without(corpora: Path) -> None:
    with_it, without = (trainer(job(corpora, "eval_dataset: {interval: 2, samples: 3}")) for _ in range(2))
    steps = []
    for _ in range(2):
        before = with_it.evaluate()
        steps.append(with_it.train_step())
        assert with_it.evaluate() != before
    assert [without.train_step() for _ in steps] == steps
    np.testing.assert_array_equal(with_it.weights.values, without.weights.values)


class Numbered:
    """Samples of two places that hold their own number."""

    def __len__(self) -> int:
        return 100

    def __getitem__(self, number: int) -> Sample:
        here = np.array([number, number], dtype=np.int32)
        return Sample(here, here + 1, np.ones(2, dtype=np.float32), np.arange(2, dtype=np.int32), np.array([2]))


@settings(deadline=None)
@given(size=st.integers(1, 100), rows=st.integers(1, 7), shards=st.integers(1, 5))
def test_every_sample_is_in_one_row_of_one_shard_and_all_shards_have_equally_many(
    size: int, rows: int, shards: int
) -> None:
    held_out = HeldOut(Numbered(), size)
    counted: list[int] = []
    for shard in range(shards):
        batches = list(held_out.micro_batches(rows, shards, shard))
        assert len(batches) == held_out.passes(rows, shards)
        for batch in batches:
            assert batch.input_ids.shape == (rows, 2)
            assert batch.loss_mask is not None
            counts = batch.loss_mask[:, 0] == 1
            assert (batch.loss_mask == counts[:, None]).all()
            counted += batch.input_ids[counts, 0].tolist()
    assert sorted(counted) == list(range(size))
    assert (held_out.passes(rows, shards) - 1) * rows * shards < size


@pytest.mark.parametrize(
    ("section", "options", "size"),
    [
        ("{interval: 1}", {}, 8),
        ("{interval: 1, samples: 3}", {}, 3),
        ("{interval: 1}", {"sizes": "[8, 5, 0]"}, 5),
        ("{interval: 1, samples: 3}", {"sizes": "[8, 5, 0]"}, 3),
        ("{interval: 1}", {"data": "train_data_path: [{a}], valid_data_path: [{b}]"}, (280 - 1) // 8),
        ("{interval: 1}", {"data": 'data_path: [{a}, {b}], split: "3, 1"'}, 16),
        ("{interval: 1, samples: 9}", {"data": 'data_path: [3, {a}, 1, {b}], split: "1, 1"'}, 9),
    ],
)
def test_samples_are_all_of_the_valid_part_or_as_many_as_the_file_says(
    corpora: Path, section: str, options: dict[str, str], size: int
) -> None:
    held_out = job(corpora, f"eval_dataset: {section}", **options).held_out
    assert held_out is not None
    assert held_out.size == size
    assert len(held_out.dataset) >= size


@pytest.mark.parametrize(
    ("section", "options", "said"),
    [
        ("{interval: 1, samples: 9}", {}, "asks for 9 samples, and the text to evaluate holds 8"),
        (
            "{interval: 1, samples: 17}",
            {"data": 'data_path: [{a}, {b}], split: "3, 1"'},
            "asks for 17 samples, and the text to evaluate holds 16",
        ),
        ("{interval: 1}", {"sizes": "[8, 9, 0]"}, "asks for 9 samples, and the text to evaluate holds 8"),
        (
            "{interval: 1, samples: 12}",
            {"data": 'data_path: [3, {a}, 1, {b}], split: "3, 1"'},
            "a holds fewer than its share",
        ),
        ("{interval: 1}", {"data": 'data_path: [{a}], split: "1, 0.001"'}, "eval_dataset cannot be read: corpus"),
        (
            "{interval: 1}",
            {"data": "train_data_path: [{a}], valid_data_path: [nowhere]"},
            "eval_dataset cannot be read: .*nowhere",
        ),
        (
            OWN,
            {},
            "eval_dataset.dataloader.config.eod 40 is no token",
        ),
    ],
)
def test_what_cannot_be_evaluated_is_refused_before_ranks_start(
    corpora: Path, section: str, options: dict[str, str], said: str
) -> None:
    with pytest.raises(UserError, match=said):
        job(corpora, f"eval_dataset: {section}", **options)


def test_a_fault_of_the_training_data_is_said_once_where_evaluation_shares_it(corpora: Path) -> None:
    with pytest.raises(UserError) as caught:
        job(corpora, "eval_dataset: {interval: 1}", data='data_path: [nowhere], split: "3, 1"')
    assert len(caught.value.problems) == 1


class Watched(Unit):
    """loss = w times the tokens that count; remembers whether gradients were recorded while it ran."""

    def __init__(self) -> None:
        super().__init__([Weight("w", (1,), init=Constant(2.0))])
        self.recorded: list[bool] = []

    def construct(self, x: Tensor, batch: MicroBatch, *weights: Tensor) -> Tensor:
        self.recorded.append(_pynative_executor.enable_grad())
        return mint.sum(weights[0] * Tensor(np.array([batch.valid_tokens()]))).reshape(1)


def watched() -> tuple[Watched, Pipeline]:
    unit, alone = Watched(), connect("single")
    groups = {"fsdp": alone, "dp_replicate": alone, "tp": alone}
    weights = ShardedWeights(unit.weights, communicators=groups, dtype=np.dtype(np.float64), seed=0)
    return unit, Pipeline([Chunk([unit], weights, reshard_after_forward=True)])


def labelled(*labels: int) -> MicroBatch:
    row = np.array([labels], np.int32)
    return MicroBatch(np.zeros_like(row), np.zeros_like(row), labels=row)


def test_no_gradient_is_recorded_and_recording_goes_on_after_it() -> None:
    unit, pipeline = watched()
    batches = [labelled(1, IGNORED_LABEL, 1), labelled(IGNORED_LABEL, IGNORED_LABEL), labelled(1)]
    before = _pynative_executor.enable_grad()
    result = evaluate(pipeline, iter(batches), together=2, loss_group=connect("single"))
    assert result == EvaluationResult(2.0, 3)
    assert unit.recorded == [False] * 3
    assert _pynative_executor.enable_grad() == before


def test_samples_of_which_no_token_counts_are_refused() -> None:
    _, pipeline = watched()
    with pytest.raises(UserError, match="no token whose prediction counts"):
        evaluate(pipeline, [labelled(IGNORED_LABEL)], together=1, loss_group=connect("single"))


@pytest.mark.parametrize(
    ("loss", "perplexity"), [(0.0, 1.0), (math.log(7), 7.0), (800.0, math.inf), (math.inf, math.inf)]
)
def test_perplexity_is_infinite_where_no_number_is_large_enough(loss: float, perplexity: float) -> None:
    assert EvaluationResult(loss, 1).perplexity == pytest.approx(perplexity)
    assert math.isnan(EvaluationResult(math.nan, 1).perplexity)


def test_a_file_without_the_section_has_nothing_to_evaluate(corpora: Path) -> None:
    made = job(corpora, "")
    assert not any(made.evaluates_after(step) for step in range(1, 6))
    assert "evaluation" not in made.summary
    with pytest.raises(UserError, match="no eval_dataset"):
        trainer(made).evaluate()


def test_a_run_evaluates_every_few_steps_and_after_the_last(
    corpora: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:
    monkeypatch.delenv("PARALLEL_TRAIN_TERMINAL", raising=False)
    made = job(corpora, "eval_dataset: {interval: 2, samples: 7}")
    assert "after every 2 steps and the last, 7 samples of 8 tokens, 56 in all; micro-batches of a rank: 4" in (
        made.summary
    )
    _train(made, connect("single"), tmp_path / "run")
    records = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    evaluations = [record for record in records if "eval_loss" in record]
    assert [record["step"] for record in records if "loss" in record] == [1, 2, 3, 4, 5]
    assert [record["step"] for record in evaluations] == [2, 4, 5]
    for record in evaluations:
        assert set(record) == {
            "step", "eval_loss", "eval_perplexity", "eval_samples", "eval_valid_tokens", "eval_seconds"
        }  # fmt: skip
        assert record["eval_perplexity"] == pytest.approx(math.exp(record["eval_loss"]))
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("eval ")]
    assert [line.split()[1] for line in lines] == ["2/5", "4/5", "5/5"]
    assert f"loss {evaluations[0]['eval_loss']:9.6f}  perplexity" in lines[0]
    assert (tmp_path / "run" / "loss_curve.png").read_bytes().startswith(b"\x89PNG\r\n")
