"""What this version refuses to run, what it ignores aloud, and the type it computes in."""

from __future__ import annotations

import numpy as np
import pytest
from parallel_config import ConfigError, ConfigWarning, fields_without_effect, loads
from parallel_trainer.errors import UserError
from parallel_trainer.precision import MixedPrecision, ascend_precision, compute_dtype
from parallel_trainer.support import refusals

MODEL = """
model:
  model_type: qwen3
  architectures: Qwen3ForCausalLM
  vocab_size: 64
  seq_length: 32
  hidden_size: 32
  intermediate_size: 64
  num_hidden_layers: 4
  num_attention_heads: 8
  num_key_value_heads: 8
  use_attn_mask_compression: true
"""


def refusal(text: str) -> str:
    return "\n".join(map(str, refusals(loads(text + MODEL))))


def test_what_cannot_run_yet_is_refused_at_its_place_in_the_file() -> None:
    (problem,) = refusals(loads("optimizer:\n  type: Muon\n" + MODEL, "run.yaml"))
    assert str(problem).startswith("run.yaml:2:9: optimizer.type Muon must be AdamW")


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("optimizer: {type: Muon}", "Muon"),
        ("optimizer: {amsgrad: true}", "amsgrad"),
        ("run_mode: predict", "1:11: run_mode predict must be train"),
        ("lora_config: {target_modules: q_proj}", "lora_config"),
        ("checkpoint: {save_path: ck, prefix: /other/run}", "checkpoint.prefix /other/run must be the beginning of a"),
        ("training: {steps: 0, global_batch_size: 8}", "1:19: training.steps 0 must be ≥ 1"),
        ("training: {rampup_batch_size: [8, 8, 16], global_batch_size: 16}", "training.rampup_batch_size [8, 8, 16]"),
    ],
)
def test_what_would_change_the_result_is_refused(text: str, named: str) -> None:
    assert named in refusal(text)


DATA = (
    "train_dataset: {{dataloader: {{type: BlendedMegatronDatasetDataLoader, datasets_type: GPTDataset, "
    'sizes: [8, 0, 0], config: {{data_path: [a, b], split: "1, 0, 0", seq_length: 32, eod: 0, {}}}}}}}\n'
)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ("reset_attention_mask: true, create_attention_mask: false", "create_attention_mask is false"),
        ("reset_attention_mask: true", "use_attn_mask_compression replaces the mask by a causal one"),
        ("reset_attention_mask: true, create_attention_mask: false, create_compressed_eod_mask: true", None),
    ],
)
def test_documents_that_would_not_be_kept_apart_are_refused(fields: str, named: str | None) -> None:
    message = refusal(DATA.format(fields))
    assert message == "" if named is None else named in message and "create_compressed_eod_mask: true" in message


def test_model_that_waits_for_ends_of_documents_which_the_data_does_not_give_is_refused() -> None:
    text = DATA.format("reset_position_ids: true") + MODEL + "  use_eod_attn_mask_compression: true\n"
    config = loads(text)
    (problem,) = refusals(config)
    assert "create_compressed_eod_mask: true, which sets both" in str(problem)


def test_fields_without_effect_are_those_the_file_wrote() -> None:
    text = (
        "parallelism: {cpu_offload: true}\ntrain_dataset: {num_parallel_workers: 4, dataloader: {type: MindDataset}}\n"
    )
    assert fields_without_effect(loads(text + MODEL)) == (
        "parallelism.cpu_offload",
        "train_dataset.num_parallel_workers",
    )
    dataset = "train_dataset: {dataloader: {type: BlendedMegatronDatasetDataLoader, datasets_type: GPTDataset, "
    dataset += 'sizes: [8, 0, 0], config: {data_path: [a, b], split: "1, 0, 0", seq_length: 32, eod: 0}}}\n'
    assert fields_without_effect(loads(dataset + MODEL)) == ()
    assert fields_without_effect(loads("parallelism: {}" + MODEL)) == ()
    # parallel-config says this one, and why: with one rank there is nothing to split.
    with pytest.warns(ConfigWarning, match="enable_mc2"):
        alone = loads("parallelism: {enable_mc2: true}" + MODEL)
    assert fields_without_effect(alone) == ()
    split = loads("parallelism: {enable_mc2: true, tensor_parallel: 2}" + MODEL)
    assert fields_without_effect(split) == ("parallelism.enable_mc2",)
    ignored = "checkpoint: {save_path: x, prefix: y, save_global_layout_cache: false}\n"
    ignored += "monitor: {train_state: {local_loss: true}}\n"
    assert fields_without_effect(loads(ignored + MODEL + "  rotary_dtype: float32\n  made_up: 1\n")) == (
        "checkpoint.save_global_layout_cache",
        "model.made_up",
        "model.rotary_dtype",
        "monitor.train_state.local_loss",
    )


def test_a_field_of_the_pipeline_that_is_overridden_is_named_in_one_message() -> None:
    text = "parallelism: {pipeline_parallel_microbatch_size: 4, pipeline_parallel_p2p_transport: auto}" + MODEL
    with pytest.warns(ConfigWarning) as caught:
        config = loads(text)
    assert fields_without_effect(config) == ("parallelism.pipeline_parallel_p2p_transport",)
    assert ["microbatch_size (reserved)" in str(warning.message) for warning in caught] == [True]


@pytest.mark.parametrize(
    ("params", "compute", "expected", "noted"),
    [
        ("float32", "float32", np.float32, False),
        ("float64", "float64", np.float64, False),
        ("float32", "bfloat16", np.float32, True),
        ("bfloat16", "bfloat16", np.float32, True),
        ("float32", "float16", np.float32, True),
    ],
)
def test_type_a_cpu_computes_in(params: str, compute: str, expected: type, noted: bool) -> None:
    config = loads(MODEL + f"  params_dtype: {params}\n  compute_dtype: {compute}\n")
    dtype, note = compute_dtype(config)
    assert dtype == expected
    assert (note is not None) is noted
    assert note is None or compute in note


def test_type_that_does_not_exist() -> None:
    with pytest.raises((UserError, ConfigError), match=r"compute_dtype.*float8"):
        compute_dtype(loads(MODEL + "  compute_dtype: float8\n"))


@pytest.mark.parametrize(
    ("params", "compute", "noted"),
    [("float32", "bfloat16", False), ("bfloat16", "bfloat16", True), ("float32", "float32", False)],
)
def test_types_on_ascend(params: str, compute: str, noted: bool) -> None:
    config = loads(MODEL + f"  params_dtype: {params}\n  compute_dtype: {compute}\n")
    precision, note = ascend_precision(config)
    assert precision == MixedPrecision(param_dtype=compute, reduce_dtype="float32")
    assert (note is not None) is noted


def test_types_on_ascend_that_are_left_out_are_the_references() -> None:
    assert ascend_precision(loads(MODEL)) == (MixedPrecision("bfloat16", "float32"), None)


@pytest.mark.parametrize(
    ("params", "compute", "message"),
    [
        ("float32", "float16", r"compute_dtype float16: .*loss scale.*Use bfloat16"),
        ("float64", "float64", r"compute_dtype float64: .*for a CPU"),
    ],
)
def test_types_that_ascend_does_not_run(params: str, compute: str, message: str) -> None:
    config = loads(MODEL + f"  params_dtype: {params}\n  compute_dtype: {compute}\n")
    with pytest.raises(UserError, match=message):
        ascend_precision(config)
