"""A file made ready for the engine `hyperparallel`: what keeps it from training, all of it before ranks do anything."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from parallel_config import loads
from parallel_trainer.data.indexed import IndexedWriter
from parallel_trainer.errors import UserError
from parallel_trainer.job import Job, prepare

FILE = """
parallelism: {{{parallelism}}}
training: {{steps: 3, global_batch_size: 8, local_batch_size: 2}}
model: {{model_type: qwen3, architectures: Qwen3ForCausalLM, vocab_size: 61, seq_length: 8, hidden_size: 16,
        intermediate_size: 24, num_hidden_layers: 2, num_attention_heads: 4, num_key_value_heads: 2, head_dim: 4,
        use_attn_mask_compression: true, compute_dtype: float32, {model}}}
lr_scheduler: {{type: ConstantWarmUpLR, learning_rate: 1.0e-2, warmup_steps: 0}}
train_dataset:
  dataloader:
    type: BlendedMegatronDatasetDataLoader
    datasets_type: GPTDataset
    sizes: [64, 0, 0]
    column_names: [input_ids, labels, loss_mask, position_ids]
    config: {{data_path: ["{corpus}"], split: "1, 0, 0", seq_length: 8, create_attention_mask: false}}
{more}
"""
Make = Callable[..., Job]


@pytest.fixture
def make(tmp_path: Path) -> Make:
    prefix = tmp_path / "text"
    with IndexedWriter(prefix, vocab_size=61) as writer:
        writer.add_document(np.random.default_rng(0).integers(0, 61, 1000))

    def made(engine: str, parallelism: str = "", model: str = "", more: str = "") -> Job:
        text = FILE.format(parallelism=parallelism, model=model, more=more, corpus=prefix)
        with warnings.catch_warnings(action="ignore"):  # zero bubbles are an extension
            return prepare(loads(text), 4, engine=engine)

    return made


def test_all_that_keeps_it_from_a_file_is_said_at_once_each_with_its_place(make: Make) -> None:
    wrong = {
        "parallelism": "pipeline_parallel: 2, pipeline_parallel_layers_per_stage: auto, "
        "pipeline_parallel_zero_bubble: zbh1, cpu_offload: true",
        "model": "tie_word_embeddings: true",
        "more": "checkpoint: {enable_save: true, save_path: saved}",
    }
    make("native", **wrong)
    with pytest.raises(UserError) as raised:
        make("hyperparallel", **wrong)
    problems = raised.value.problems
    assert len(problems) == 4
    for field in ("pipeline_parallel_zero_bubble", "cpu_offload", "tie_word_embeddings", "enable_save"):
        (problem,) = [each for each in problems if field in each]
        assert problem.startswith("<string>:"), problem
        assert "--engine native" in problem


def test_what_is_left_out_of_a_run_is_a_note(make: Make) -> None:
    overlap = "pipeline_parallel: 2, pipeline_parallel_layers_per_stage: auto, pipeline_parallel_overlap_b_f: true"
    notes = make("hyperparallel", overlap).notes
    assert notes[0].startswith("HyperParallel trains, by calls that have never run on an NPU")
    assert notes[1].startswith("overlap_b_f is left out: it needs experts")
    assert make("native", overlap).notes == ()


def test_recomputation_has_an_effect_with_this_engine_alone(make: Make) -> None:
    recompute = "recompute: {mode: full, full_recompute_layer: [1]}"
    assert "recompute" in make("native", more=recompute).notes[0]
    notes = make("hyperparallel", more=recompute).notes
    assert not any("no effect" in note for note in notes), notes
