"""Which repair comes first: the one that keeps what was meant."""

from __future__ import annotations

import pytest
from parallel_config import read, repairs

QWEN = "model_type: qwen3, architectures: Qwen3ForCausalLM"
GPT = "type: BlendedMegatronDatasetDataLoader, datasets_type: GPTDataset, sizes: [8, 0, 0]"
COLUMNS = "column_names: [input_ids, labels, loss_mask, position_ids]"
CP2 = "parallelism: {context_parallel: 2}"
LAYERS = "parallelism.pipeline_parallel_layers_per_stage"
LOADER = "train_dataset.dataloader."


def offered(text: str, world_size: int = 1) -> list[str]:
    return [str(repair) for repair in repairs(read(text, "run.yaml"), world_size)]


def placed(layers: int, chunks: int, items: str) -> str:
    return (
        f"parallelism: {{pipeline_parallel: 2, pipeline_parallel_interleave_num: {chunks},"
        f" pipeline_parallel_layers_per_stage: {items}}}\nmodel: {{{QWEN}, num_hidden_layers: {layers}}}"
    )


def trained_on(loader: str, model: str = QWEN) -> str:
    return f"{CP2}\nmodel: {{{model}}}\ntrain_dataset: {{dataloader: {{{loader}}}}}"


FIRST: list[tuple[int, str, str]] = [
    (8, "parallelism: {global_batch_size: 8}", "move parallelism.global_batch_size to training"),
    (1, "tensor_parallel: 1", "move tensor_parallel to parallelism"),
    (1, "parallelism: {reshard_after_forward_policy: nevr}", "parallelism.reshard_after_forward_policy: never"),
    (1, "lr_scheduler: {type: CosineWithWarmUp}", "lr_scheduler.type: CosineWithWarmUpLR"),
    # placements written by hand
    (2, placed(10, 1, '["0-1, 4-5", "2-3, 6-9"]'), "parallelism.pipeline_parallel_interleave_num: 2"),
    (2, placed(10, 2, '["0-4", "5-9"]'), "parallelism.pipeline_parallel_interleave_num: 1"),
    (2, placed(10, 2, '["0-1, 4-8", "2-3, 10"]'), f"{LAYERS}: ['0-1, 4-8', '2-3, 9']"),
    (2, placed(10, 2, '["0-2, 4-8", "2-3, 9"]'), f"{LAYERS}: ['0-2, 4-8', '3, 9']"),
    (2, placed(10, 1, "[1-3, 5-9]"), f"{LAYERS}: [0-3, 4-9]"),
    # masks
    (
        2,
        trained_on(f"{GPT}, {COLUMNS}, config: {{create_attention_mask: false}}"),
        "model.use_attn_mask_compression: true",
    ),
    (
        2,
        trained_on(f"{GPT}, {COLUMNS}, config: {{reset_attention_mask: true}}"),
        (
            f"{LOADER}config.create_compressed_eod_mask: true; {LOADER}config.create_attention_mask: false;"
            f" {LOADER}column_names: [input_ids, labels, loss_mask, position_ids, actual_seq_len]"
        ),
    ),
    (
        2,
        trained_on("type: HFDataLoader, create_compressed_eod_mask: true, column_names: [input_ids, position_ids]"),
        "model.use_eod_attn_mask_compression: true",
    ),
    (
        2,
        trained_on(f"{GPT}, {COLUMNS}, config: {{seq_length: 4096}}", f"{QWEN}, use_attn_mask_compression: true"),
        f"{LOADER}config.create_attention_mask: false",
    ),
    # layer lists
    (1, "recompute: {mode: full, full_recompute_layer: [0-3, 2]}", "recompute.full_recompute_layer: [0-3]"),
    (1, "recompute: {mode: full, full_recompute_layer: [5, 1-2]}", "recompute.full_recompute_layer: [1-2, '5']"),
    (1, "recompute: {mode: full, full_recompute_layer: [0-2, x]}", "recompute.full_recompute_layer: [0-2]"),
    # values and lines
    (1, "checkpoint: {save_path: x, prefix: 1e5}", "checkpoint.prefix: '1e5'"),
    (1, "checkpoint: {save_path: x, prefix: 1.10}", "checkpoint.prefix: '1.10'"),
    (2, "parallelism:\n  tensor_parallel:2\n", "parallelism: {tensor_parallel: 2}"),
    (1, "parallelism:\n  context_parallel: 1\n  tensor_parallel: *tp\n", "remove line 3"),
    (2, "parallelism:\n  context_parallel: 1\n  tensor_parallel: [2\ntraining: {}\n", "line 3: '  tensor_parallel: 2'"),
    (1, "model: {model_type: qwen3, architectures: X, hidden_size: null}", "model.hidden_size: 4096"),
]


@pytest.mark.parametrize(("world_size", "text", "first"), FIRST)
def test_the_first_repair(world_size: int, text: str, first: str) -> None:
    assert offered(text, world_size)[0] == first


def test_of_a_field_written_twice_either_line_can_go() -> None:
    assert set(offered("training:\n  steps: 1\n  seed: 2\n  steps: 3\n")) == {"remove line 2", "remove line 4"}


def test_a_field_is_not_moved_over_another() -> None:
    text = "parallelism: {global_batch_size: 8}\ntraining: {global_batch_size: 4}"
    assert offered(text) == ["remove parallelism.global_batch_size"]


def test_documents_kept_apart_stay_apart() -> None:
    found = offered(trained_on(f"{GPT}, {COLUMNS}, config: {{reset_attention_mask: true}}"), 2)
    assert not any("use_attn_mask_compression" in repair for repair in found)


def test_a_dimension_is_given_up_last() -> None:
    found = offered(f"{CP2}\nmodel: {{{QWEN}}}", 2)
    assert found == ["model.use_attn_mask_compression: true", "parallelism.context_parallel: 1"]


def test_a_bad_callback_is_not_mended_by_removing_all() -> None:
    text = """
callbacks:
- 3
- {type: MaxLogitsMonitor, step_interval: x}
- {type: MaxLogitsMonitor, step_interval: 0}
"""
    assert offered(text)
    assert all("remove callbacks;" not in f"{repair};" for repair in offered(text))


def test_a_length_is_repaired_in_both_places() -> None:
    text = f"""
parallelism: {{tensor_parallel: 2}}
model: {{{QWEN}, seq_length: 7}}
train_dataset: {{dataloader: {{{GPT}, config: {{seq_length: 7}}}}}}
"""
    assert offered(text, 2)[0] == f"model.seq_length: 8; {LOADER}config.seq_length: 8"
