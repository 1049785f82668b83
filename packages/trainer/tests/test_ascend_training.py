"""A run with the kernels of Ascend, whose operators a CPU stands in for: the same training as with those of a CPU."""

from __future__ import annotations

from pathlib import Path

import mindspore as ms
import numpy as np
import pytest
from device_mesh import connect
from kernel_contract import ON_NPU, kernel_set
from parallel_config import loads
from parallel_trainer.data.indexed import IndexedWriter
from parallel_trainer.job import Job, prepare
from parallel_trainer.parallel.dtypes import BFLOAT16
from parallel_trainer.trainer import Trainer

pytestmark = pytest.mark.skipif(ON_NPU, reason="compares with a CPU: run this on a machine without an NPU")

FILE = """
training: {{steps: 3, global_batch_size: 4, local_batch_size: 2, max_norm: 1.0}}
model: {{vocab_size: 61, seq_length: 8, hidden_size: 16, intermediate_size: 24, num_hidden_layers: 2,
        num_attention_heads: 4, use_attn_mask_compression: true, compute_dtype: {dtype}, {model}}}
lr_scheduler: {{type: ConstantWarmUpLR, learning_rate: 1.0e-2, warmup_steps: 0}}
train_dataset:
  dataloader:
    type: BlendedMegatronDatasetDataLoader
    datasets_type: GPTDataset
    sizes: [64, 0, 0]
    column_names: [input_ids, labels, loss_mask, position_ids]
    config: {{data_path: ["{corpus}"], split: "1, 0, 0", seq_length: 8, create_attention_mask: false}}
"""
QWEN3 = "model_type: qwen3, architectures: Qwen3ForCausalLM, num_key_value_heads: 2, head_dim: 4"
DEEPSEEK = """model_type: deepseek_v3, architectures: DeepseekV3ForCausalLM, num_key_value_heads: 4, q_lora_rank: 5,
        kv_lora_rank: 3, qk_nope_head_dim: 4, qk_rope_head_dim: 2, v_head_dim: 3, n_routed_experts: 8,
        num_experts_per_tok: 2, moe_intermediate_size: 6, n_shared_experts: 1, first_k_dense_replace: 1, n_group: 4,
        topk_group: 2, moe_aux_loss_coeff: 0.1, num_nextn_predict_layers: 1"""


@pytest.fixture
def make_job(tmp_path: Path):
    prefix = tmp_path / "text"
    with IndexedWriter(prefix, vocab_size=61) as writer:
        writer.add_document(np.random.default_rng(0).integers(0, 61, 1000))

    def make(model: str, device: str = "cpu", dtype: str = "float32") -> Job:
        return prepare(loads(FILE.format(corpus=prefix, model=model, dtype=dtype)), 1, device=device)

    return make


@pytest.fixture
def on_ascend(monkeypatch: pytest.MonkeyPatch):
    """Makes the trainer of a job that believes to be on an NPU."""
    kernel_set("ascend", monkeypatch, exact=True)

    def make(job: Job) -> Trainer:
        chosen: list[str] = []
        monkeypatch.setattr(ms, "set_device", chosen.append)
        trainer = Trainer(job, connect("single"))
        assert chosen == ["Ascend"]
        return trainer

    return make


def trained(trainer: Trainer) -> tuple[list[float], list[float], dict[str, np.ndarray]]:
    """Losses and gradient norms of three steps, and the weights after them."""
    results = [trainer.train_step() for _ in range(3)]
    return [result.loss for result in results], [result.grad_norm for result in results], dict(trainer.full_values())


@pytest.mark.parametrize("model", [QWEN3, DEEPSEEK], ids=["qwen3", "deepseek_v3"])
def test_float32_trains_as_on_a_cpu(model: str, make_job, on_ascend) -> None:
    expected = trained(Trainer(make_job(model), connect("single")))
    losses, norms, weights = trained(on_ascend(make_job(model, "ascend")))
    np.testing.assert_allclose(losses, expected[0], rtol=1e-5)
    np.testing.assert_allclose(norms, expected[1], rtol=1e-4)
    for name, value in expected[2].items():
        np.testing.assert_allclose(weights[name], value, rtol=1e-3, atol=1e-4, err_msg=name)


@pytest.mark.parametrize("model", [QWEN3, DEEPSEEK], ids=["qwen3", "deepseek_v3"])
def test_bfloat16_trains_nearly_so_and_masters_stay_float32(model: str, make_job, on_ascend) -> None:
    expected = trained(Trainer(make_job(model), connect("single")))
    trainer = on_ascend(make_job(model, "ascend", "bfloat16"))
    routers = {held.weight.name for held in trainer.weights if ".mlp.gate." in held.weight.name}
    for held in trainer.weights:
        assert held.tensor.dtype == (ms.float32 if held.weight.name in routers else ms.bfloat16), held.weight.name
    assert bool(routers) == (model == DEEPSEEK)
    losses, norms, weights = trained(trainer)
    np.testing.assert_allclose(losses, expected[0], rtol=1e-2)
    np.testing.assert_allclose(norms, expected[1], rtol=1e-1)
    assert {value.dtype for value in weights.values()} == {np.dtype(np.float32)}
    assert trainer.weights.gradients.dtype == np.float32
    # More than bfloat16 could hold.
    assert any((value != value.astype(BFLOAT16).astype(np.float32)).any() for value in weights.values())
