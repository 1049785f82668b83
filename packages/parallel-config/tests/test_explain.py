"""Explanations of right files."""

from __future__ import annotations

import pytest
from parallel_config import ConfigError, ConfigWarning, explain, loads

PARALLEL = """
parallelism:
  tensor_parallel: 2
  data_parallel_shard: 2
"""


def texts(text: str, world_size: int) -> dict[str, str]:
    return {line.name: line.text for line in explain(loads(text), world_size)}


def test_every_inferred_value_says_where_it_comes_from() -> None:
    found = texts("parallelism: {tensor_parallel: 2}", 8)
    assert found["dp_shard"] == "dp_shard 4 ← world_size 8 // (tp 2 · cp 1 · pp 1)"
    assert found["data_parallel"] == "data_parallel 4 ← world_size 8 // (tp 2 · cp 1 · pp 1)"
    assert found["efsdp"] == "efsdp 8 ← dp_shard 4 · cp 1 · tp 2 // ep 1"
    assert found["loss_scale"] == "loss_scale 0.125 ← 1 / (world_size 8 // pp 1)"
    assert found["num_accumulation_steps"] == (
        "num_accumulation_steps 1 ← global_batch_size 4 // (data_parallel 4 · local_batch_size 1)"
    )


def test_a_configured_shard_degree_is_its_own_origin() -> None:
    found = texts(PARALLEL, 8)
    assert found["dp_shard"] == "dp_shard 2 ← data_parallel_shard 2"
    assert found["dp_replicate"] == "dp_replicate 2 ← data_parallel 4 // dp_shard 2"


def test_an_inferred_batch_says_so() -> None:
    assert "as the file writes no batch size" in texts(PARALLEL, 8)["global_batch_size"]
    written = "training: {global_batch_size: 8}"
    assert "global_batch_size" not in texts(written, 8)


def test_stage_layers_and_their_origin() -> None:
    text = """
parallelism: {pipeline_parallel: 2, pipeline_parallel_layers_per_stage: auto}
model: {model_type: qwen3, architectures: Qwen3ForCausalLM, num_hidden_layers: 6}
"""
    found = texts(text, 2)
    assert found["stage_layers"].startswith("stage_layers 0-2, 3-5 ← num_hidden_layers 6 over pp 2")
    assert "hidden_act" in found["model defaults"]
    assert "not checked" not in found


def test_a_v_says_which_stage_holds_what() -> None:
    text = """
parallelism: {pipeline_parallel: 2, pipeline_parallel_layers_per_stage: auto, pipeline_parallel_interleave_num: 2,
              pipeline_parallel_zero_bubble: zbv}
"""
    with pytest.warns(ConfigWarning, match="zero_bubble zbv"):
        found = texts(text, 2)
    assert found["stage_ranks"] == "stage_ranks [0, 1, 1, 0] ← pipeline_parallel_zero_bubble zbv (an extension)"


def test_what_could_not_be_checked_is_said() -> None:
    found = texts(PARALLEL, 8)
    assert "unknown" in found["stage_layers"]
    for name in ("num_hidden_layers", "num_attention_heads", "seq_length"):
        assert name in found["not checked"]


def test_no_clipping_is_said() -> None:
    assert texts("training: {max_norm: 0}", 1)["max_norm"] == "max_norm 0 ≤ 0: gradients are not clipped"


def test_a_plan_that_does_not_exist_cannot_be_explained() -> None:
    with pytest.raises(ConfigError):
        explain(loads(PARALLEL), 6)
