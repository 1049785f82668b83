"""Standard deviations of initial weights, measured, beside the table of the README."""

from __future__ import annotations

import math
import re
from fnmatch import fnmatch
from pathlib import Path

import numpy as np
import pytest
from device_mesh import connect
from parallel_config import loads
from parallel_trainer.data.indexed import IndexedWriter
from parallel_trainer.job import prepare
from parallel_trainer.kernels import kernels
from parallel_trainer.models import build_model
from parallel_trainer.models.initial import InitialStd
from parallel_trainer.models.single import initial_weights
from parallel_trainer.trainer import Trainer

README = Path(__file__).parents[1] / "README.md"
RULES = ("hugging_face", "megatron", "mindformers")
RANGE, LAYERS = 0.05, 3
SIZES = f"""vocab_size: 300, hidden_size: 64, intermediate_size: 96, num_hidden_layers: {LAYERS},
    num_attention_heads: 4, initializer_range: {RANGE}"""
QWEN3 = f"architectures: Qwen3ForCausalLM, {SIZES}, num_key_value_heads: 2, head_dim: 16, attention_bias: true"
MODELS = {
    "qwen3": f"model_type: qwen3, {QWEN3}",
    "qwen3_moe": f"""model_type: qwen3_moe, {QWEN3}, num_experts: 8, num_experts_per_tok: 2, moe_intermediate_size: 48,
        mlp_only_layers: [1]""",
    "deepseek_v3": f"""model_type: deepseek_v3, architectures: DeepseekV3ForCausalLM, {SIZES}, num_key_value_heads: 4,
        q_lora_rank: 24, kv_lora_rank: 20, qk_nope_head_dim: 16, qk_rope_head_dim: 8, v_head_dim: 16,
        n_routed_experts: 8, n_group: 2, topk_group: 1, num_experts_per_tok: 2, moe_intermediate_size: 48,
        n_shared_experts: 1, first_k_dense_replace: 1, num_nextn_predict_layers: 1""",
}
FILE = """
training: {{steps: 1, global_batch_size: 1, local_batch_size: 1}}
model: {{{model}, seq_length: 8, use_attn_mask_compression: true}}
extensions: {{initial_weights: {rule}}}
lr_scheduler: {{type: ConstantWarmUpLR, learning_rate: 1.0e-3, warmup_steps: 0}}
train_dataset:
  dataloader:
    type: BlendedMegatronDatasetDataLoader
    datasets_type: GPTDataset
    sizes: [4, 0, 0]
    column_names: [input_ids, labels, loss_mask, position_ids]
    config: {{data_path: ["{corpus}"], split: "1, 0, 0", seq_length: 8, create_attention_mask: false}}
"""
OTHERS = {"*norm.weight": 1.0, "*.enorm.weight": 1.0, "*.hnorm.weight": 1.0, "*.bias": 0.0, "*_bias": 0.0}
"""By the pattern of a name, weights that are all the same."""


def table() -> dict[str, dict[str, str]]:
    """What the README says: by the last part of a matrix's name and by rule."""
    section = README.read_text(encoding="utf-8").partition("### Initial weights")[2].partition("###")[0]
    found: dict[str, dict[str, str]] = {}
    for line in (line for line in section.splitlines() if line.startswith("| `")):
        names, *cells = line.strip("| ").split(" | ")
        for name in re.findall(r"`(\w+)`", names):
            found[name] = dict(zip(RULES, cells, strict=True))
    return found


VALUES = {"r": RANGE, "r/√(2L)": RANGE / math.sqrt(2 * LAYERS), "0.01": 0.01}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("rule", RULES)
def test_weights_start_as_the_table_says(name: str, rule: str) -> None:
    """Within five times what the standard deviation of so many normal numbers scatters by."""
    section = loads(f"model: {{{MODELS[name]}}}").model
    expected, met = table(), set()
    for weight, values in initial_weights(
        build_model(section, kernels("cpu"), initial_weights=rule), seed=5, dtype="float64"
    ).items():
        constant = next((value for pattern, value in OTHERS.items() if fnmatch(weight, pattern)), None)
        if constant is not None:
            assert (values == constant).all(), weight
            continue
        kind = weight.removesuffix(".weight").rpartition(".")[2]
        met.add(kind)
        # Experts one by one: they are as different as any other numbers.
        for matrix in values if values.ndim == 3 else [values]:
            wanted, scatter = VALUES[expected[kind][rule]], 1 / math.sqrt(2 * matrix.size)
            assert matrix.std() == pytest.approx(wanted, rel=5 * scatter), weight
            assert abs(matrix.mean()) < 5 * wanted / math.sqrt(matrix.size), weight
        if values.ndim == 3:
            assert len(np.unique(values)) == values.size
    assert met
    assert met <= expected.keys()


def test_the_table_has_every_kind_of_matrix_and_no_other() -> None:
    kinds = {
        weight.name.removesuffix(".weight").rpartition(".")[2]
        for name in MODELS
        for weight in build_model(loads(f"model: {{{MODELS[name]}}}").model, kernels("cpu")).weights
        if len(weight.shape) > 1
    } | {"q_proj"}
    assert table().keys() == kinds


def test_at_61_layers_outputs_start_eleven_times_smaller() -> None:
    found = InitialStd.of("megatron", initializer_range=0.02, layers=61)
    assert found.matrix / found.output == pytest.approx(11.05, abs=0.01)
    assert InitialStd.of("megatron", initializer_range=0.02, layers=8).output == pytest.approx(0.005, rel=1e-12)


@pytest.mark.filterwarnings("ignore:Extensions of this project", "ignore:Accepted, but without effect")
@pytest.mark.parametrize("rule", RULES)
def test_a_run_starts_by_the_rule_of_its_file(rule: str, tmp_path: Path) -> None:
    with IndexedWriter(tmp_path / "text", vocab_size=300) as writer:
        writer.add_document(np.arange(200))
    text = FILE.format(model=MODELS["qwen3_moe"], corpus=tmp_path / "text", rule=rule)
    job = prepare(loads(text), 1)
    assert not any("extensions" in note for note in job.notes)
    weights = dict(Trainer(job, connect("single")).full_values())
    expected = initial_weights(
        build_model(job.config.model, kernels("cpu"), initial_weights=rule), seed=job.config.training.seed
    )
    assert weights.keys() == expected.keys()
    for name, values in expected.items():
        np.testing.assert_array_equal(weights[name], values, err_msg=name)


def test_a_rule_that_does_not_exist_is_refused() -> None:
    with pytest.raises(
        ValueError, match="initial_weights is 'zero': it has to be hugging_face, megatron or mindformers"
    ):
        InitialStd.of("zero", initializer_range=0.02, layers=2)
