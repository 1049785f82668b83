"""Whole files as they are written for the reference, and the page's own examples."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from parallel_config import ConfigError, ConfigWarning, load, loads, plan, written_fields

SHIPPED = Path(__file__).parent / "data" / "pretrain_deepseek3_1b_8p_pynative.yaml"


def test_the_shipped_example_loads_unchanged() -> None:
    config = load(SHIPPED)
    found = plan(config, 8)
    assert (found.data_parallel, found.dp_shard, found.num_accumulation_steps) == (8, 8, 1)
    assert found.stage_layers == ((0, 15),)
    assert config.checkpoint.save_interleaved_steps == 100
    assert config.optimizer.eps == 1e-8
    assert config.lr_scheduler.warmup_ratio == 0.0
    assert config.train_dataset.dataloader.config.data_path == ("1", "/data/text_document")
    assert config.model.extra["mla_qkv_concat"] is True
    assert config.model.num_key_value_heads == 128, "the default of deepseek_v3, which the file leaves out"
    assert config.monitor.tensorboard.tensorboard_queue_size == 1000


def test_written_fields_are_those_of_the_file() -> None:
    config = loads("parallelism:\n  tensor_parallel: 1\ntrain_dataset:\n  prefetch_size: 2\n")
    assert written_fields(config) == {
        "parallelism",
        "parallelism.tensor_parallel",
        "train_dataset",
        "train_dataset.prefetch_size",
    }


INTERLEAVED = "pipeline_parallel: 2, pipeline_parallel_interleave_num: 2, pipeline_parallel_layers_per_stage"

PAGE_EXAMPLES: list[tuple[int, str, dict[str, Any]]] = [
    (8, "{data_parallel_shard: -1, tensor_parallel: 1}", {"dp_shard": 8, "dp_replicate": 1}),
    (16, "{data_parallel_shard: 8}", {"data_parallel": 16, "dp_replicate": 2, "dp_shard": 8}),
    (8, "{tensor_parallel: 2}", {"dp_shard": 4, "sequence_parallel": True}),
    (8, "{context_parallel: 2, context_parallel_method: colossal}", {"fsdp": 8, "ulysses_degree": 1}),
    (
        8,
        "{context_parallel: 4, context_parallel_method: ulysses, ulysses_degree_in_cp: 4}",
        {"data_parallel": 2, "ulysses_degree": 4},
    ),
    (
        8,
        "{context_parallel: 4, context_parallel_method: hybrid, ulysses_degree_in_cp: 2}",
        {"dp_shard": 2, "ulysses_degree": 2},
    ),
    (
        8,
        f"{{tensor_parallel: 4, {INTERLEAVED}: auto, pipeline_parallel_overlap_p2p: True}}",
        {"interleave_num": 2, "reshard_after_forward": False, "stage_layers": ()},
    ),
    (
        8,
        f'{{tensor_parallel: 4, {INTERLEAVED}: ["0-1, 4-8", "2-3, 9"]}}',
        {"stage_layers": ((0, 1), (2, 3), (4, 8), (9, 9))},
    ),
    (8, "{tensor_parallel: 4, expert_parallel: 2}", {"dp_shard": 2, "efsdp": 4}),
    (
        16,
        "{tensor_parallel: 2, expert_parallel: 8, moe_token_dispatcher_type: alltoall_deredundancy}",
        {"dp_shard": 8, "efsdp": 2, "moe_token_dispatcher_type": "alltoall_deredundancy"},
    ),
]


@pytest.mark.parametrize(("world_size", "parallelism", "expected"), PAGE_EXAMPLES)
def test_examples_of_the_specification(world_size: int, parallelism: str, expected: dict[str, Any]) -> None:
    found = plan(loads(f"parallelism: {parallelism}"), world_size)
    assert {name: getattr(found, name) for name in expected} == expected
    assert found.global_batch_size == found.data_parallel, "nothing is written about batches"


@pytest.mark.parametrize(
    ("policy", "pp", "expected"),
    [("always", 2, True), ("never", 1, False), ("default", 1, True), ("default", 2, False)],
)
def test_reshard_policies(policy: str, pp: int, expected: bool) -> None:
    text = f"""
parallelism:
  reshard_after_forward_policy: {policy}
  pipeline_parallel: {pp}
  pipeline_parallel_layers_per_stage: auto
"""
    assert plan(loads(text), 2).reshard_after_forward is expected


def test_every_section_has_the_documented_defaults() -> None:
    config = loads("parallelism: {}")
    assert config.parallelism.data_parallel_shard == -1
    assert config.parallelism.pipeline_parallel_layers_per_stage is None
    assert config.training.steps == 1000
    assert config.training.max_norm == 1.0
    assert config.optimizer.betas == (0.9, 0.95)
    assert config.checkpoint.enable_save is True
    assert config.recompute.mode == "None"
    assert config.profiler.with_stack is True
    assert config.lora_config.lora_rank == 8
    assert config.train_dataset.dataloader.config.create_attention_mask is True


@pytest.mark.parametrize(
    ("model_type", "field", "value"),
    [("qwen3", "head_dim", 128), ("qwen3", "vocab_size", 151936), ("deepseek_v3", "n_routed_experts", 256)],
)
def test_the_model_type_fills_what_the_file_leaves_out(model_type: str, field: str, value: int) -> None:
    config = loads(f"model: {{model_type: {model_type}, architectures: X, num_hidden_layers: 2}}")
    assert getattr(config.model, field) == value
    assert config.model.num_hidden_layers == 2


def test_a_compressed_dataset_switches_the_model_to_compression() -> None:
    text = """
parallelism: {context_parallel: 2}
model: {model_type: qwen3, architectures: Qwen3ForCausalLM}
train_dataset:
  dataloader:
    type: BlendedMegatronDatasetDataLoader
    datasets_type: GPTDataset
    sizes: [8, 0, 0]
    config: {seq_length: 4096, create_compressed_eod_mask: true, create_attention_mask: false}
"""
    config = loads(text)
    assert config.model.use_eod_attn_mask_compression is True
    assert plan(config, 2).cp == 2


def test_a_missing_file_is_a_configuration_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.yaml' cannot be read|cannot be read: No such file"):
        load(tmp_path / "nowhere.yaml")


def test_a_folder_is_a_configuration_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        load(tmp_path)


def test_bytes_that_are_not_utf_8_are_placed(tmp_path: Path) -> None:
    path = tmp_path / "latin.yaml"
    path.write_bytes(b"checkpoint:\n  prefix: caf\xe9\n")
    with pytest.raises(ConfigError, match="0xe9 is not UTF-8") as caught:
        load(path)
    assert (caught.value.problems[0].line, caught.value.problems[0].column) == (2, 14)


def test_a_byte_order_mark_is_accepted(tmp_path: Path) -> None:
    path = tmp_path / "bom.yaml"
    path.write_bytes(b"\xef\xbb\xbfparallelism: {tensor_parallel: 2}\n")
    assert load(path).parallelism.tensor_parallel == 2


def test_the_overview_of_the_specification_loads_without_a_warning() -> None:
    text = """
parallelism:
  data_parallel_shard: -1
  reshard_after_forward_policy: "default"
  cpu_offload: False
  disable_gradient_division: True
  tensor_parallel: 1
  context_parallel: 1
  context_parallel_method: "colossal"
  context_parallel_async: False
  ulysses_degree_in_cp: null
  context_parallel_mask_type: "causal"
  pipeline_parallel: 1
  pipeline_parallel_interleave_num: 1
  pipeline_parallel_layers_per_stage: null
  pipeline_parallel_overlap_p2p: False
  pipeline_parallel_overlap_b_f: False
  expert_parallel: 1
  moe_token_dispatcher_type: "alltoall"
  npu_nums_per_device: 8
"""
    config = loads(text)
    assert config.parallelism == type(config.parallelism)()
    assert plan(config, 8).dp_shard == 8


def test_evaluation_reads_its_own_dataloader_or_that_of_the_training_data() -> None:
    train = (
        "train_dataset: {dataloader: {type: BlendedMegatronDatasetDataLoader, datasets_type: GPTDataset,"
        " sizes: [8, 0, 0], config: {data_path: [a], split: '9, 1', seq_length: 16}}}\n"
    )
    own = (
        ", dataloader: {type: BlendedMegatronDatasetDataLoader, datasets_type: GPTDataset,"
        " config: {valid_data_path: [b], seq_length: 16}}"
    )
    for extra, corpora in (("", ("a", None)), (own, (None, "b"))):
        with pytest.warns(ConfigWarning, match="MindFormers r2.0.0 ignores: section eval_dataset"):
            config = loads(f"{train}eval_dataset: {{interval: 5{extra}}}")
        data = config.eval_dataloader.config
        paths = (data.data_path, data.valid_data_path)
        assert paths == tuple(corpus if corpus is None else (corpus,) for corpus in corpora)
        assert (config.eval_dataset.interval, config.eval_dataset.samples) == (5, None)
