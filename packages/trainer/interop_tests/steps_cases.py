"""Files of twenty steps, and how this project runs them."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from functools import reduce
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from device_mesh import connect
from parallel_config import load
from parallel_trainer.data.indexed import IndexedWriter
from parallel_trainer.job import prepare
from parallel_trainer.trainer import Trainer
from run_record import Run

VOCABULARY, END = 61, 60

COMMON = """
training: {steps: 20, global_batch_size: 4, local_batch_size: 2, max_norm: 1.5, seed: 7}
optimizer: {type: AdamW, betas: [0.9, 0.95], eps: 1.0e-6, weight_decay: 0.1}
lr_scheduler: {type: CosineWithWarmUpLR, learning_rate: 1.0e-2, warmup_steps: 4}
train_dataset:
  dataloader:
    type: BlendedMegatronDatasetDataLoader
    datasets_type: GPTDataset
    sizes: [80, 0, 0]
    config: {split: "1, 0, 0", seq_length: 24, seed: 11, eod: 60, pad: -1, create_attention_mask: false}
model:
  vocab_size: 61
  seq_length: 24
  hidden_size: 32
  intermediate_size: 48
  num_hidden_layers: 2
  num_attention_heads: 4
  initializer_range: 0.1
  params_dtype: float64
  compute_dtype: float64
"""
"""Some documents are shorter than a sample and some longer."""

PACKED = """
lr_scheduler: {lr_end: 1.0e-3}
train_dataset:
  dataloader: {config: {create_compressed_eod_mask: true, reset_position_ids: true, eod_mask_loss: true}}
"""

QWEN = """
model: {model_type: qwen3, architectures: Qwen3ForCausalLM, num_key_value_heads: 2, head_dim: 8}
"""
QWEN_EXPERTS = """
model:
  model_type: qwen3_moe
  architectures: Qwen3MoeForCausalLM
  num_key_value_heads: 2
  head_dim: 8
  num_experts: 8
  num_experts_per_tok: 3
  moe_intermediate_size: 12
  norm_topk_prob: true
  moe_router_load_balancing_type: seq_aux_loss
  moe_aux_loss_coeff: 0.05
"""
DEEPSEEK = """
model:
  model_type: deepseek_v3
  architectures: DeepseekV3ForCausalLM
  q_lora_rank: 12
  kv_lora_rank: 10
  qk_nope_head_dim: 8
  qk_rope_head_dim: 4
  v_head_dim: 6
  n_routed_experts: 12
  num_experts_per_tok: 4
  n_shared_experts: 1
  moe_intermediate_size: 12
  first_k_dense_replace: 1
  n_group: 4
  topk_group: 2
  routed_scaling_factor: 2.5
  moe_router_enable_expert_bias: true
  moe_router_bias_update_rate: 0.02
  moe_router_load_balancing_type: seq_aux_loss
  moe_aux_loss_coeff: 0.05
  num_nextn_predict_layers: 0
"""
FURTHER = """
model: {num_nextn_predict_layers: 1, mtp_loss_scaling_factor: 0.3}
"""

CASES = {
    "qwen3": (QWEN, "model: {attention_bias: true}"),
    "qwen3 packed, tied": (
        QWEN,
        PACKED,
        "training: {local_batch_size: 1}",
        "model: {tie_word_embeddings: true, rope_theta: 1.0e+6}",
    ),
    "qwen3 with rules of decay": (
        QWEN,
        "model: {attention_bias: true}",
        "optimizer: {weight_decay_include: [q_norm, k_proj.bias], weight_decay_exclude: [embed_tokens, layers.1.mlp]}",
    ),
    "qwen3_moe": (QWEN_EXPERTS,),
    "qwen3_moe packed": (
        QWEN_EXPERTS,
        PACKED,
        "model: {norm_topk_prob: false, moe_router_load_balancing_type: aux_loss}",
    ),
    "deepseek_v3": (DEEPSEEK,),
    "deepseek_v3 packed": (
        DEEPSEEK,
        PACKED,
        "model: {q_lora_rank: null, moe_router_load_balancing_type: global_aux_loss}",
    ),
    "deepseek_v3 further": (DEEPSEEK, FURTHER),
    "deepseek_v3 further, packed": (DEEPSEEK, FURTHER, PACKED, "model: {tie_word_embeddings: true}"),
}
"""Each says what it has besides `COMMON`."""

ONE_LAYER_OF_EXPERTS = (
    QWEN_EXPERTS,
    "training: {local_batch_size: 4}",
    "model: {decoder_sparse_step: 2, moe_router_load_balancing_type: aux_loss}",
)
"""With one micro-batch a step and one such layer transformers' balancing loss is `aux_loss`, but for a factor."""


def file_of(parts: tuple[str, ...], corpus: Path) -> dict[str, Any]:
    """A file as a dictionary, which trains on this corpus."""
    file = reduce(merged, map(yaml.safe_load, parts), yaml.safe_load(COMMON))
    return merged(file, {"train_dataset": {"dataloader": {"config": {"data_path": [str(corpus)]}}}})


def merged(file: Mapping[str, Any], more: Mapping[str, Any]) -> dict[str, Any]:
    """A file with what another says besides or instead."""
    inner = {
        name: merged(file[name], value) for name, value in more.items() if isinstance(value, dict) and name in file
    }
    return {**copy.deepcopy(dict(file)), **more, **inner}


def write_corpus(prefix: Path) -> None:
    """Documents of 3 to 60 tokens, each closed by its end."""
    random = np.random.default_rng(0)
    with IndexedWriter(prefix, vocab_size=VOCABULARY) as corpus:
        for length in random.integers(2, 60, 90):
            # The next token depends on the one before, so that there is something to learn.
            tokens = (np.cumsum(random.integers(1, 4, length)) + random.integers(END)) % END
            corpus.add_document(np.append(tokens, END))


def our_run(file: Mapping[str, Any], folder: Path, *, steps: int) -> Run:
    """What this project does with a file on one rank, in the first `steps` of its steps."""
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(file))
    trainer = Trainer(prepare(load(path), 1), connect("single"))
    run = Run(weights_of(trainer))
    for _ in range(steps):
        lr, result = trainer.lr, trainer.train_step()
        assert result.updated
        found = {"lr": lr, "loss": result.loss, "mtp loss": result.mtp_loss, "balance loss": result.balance_loss}
        numbers = {name: np.float64(value) for name, value in found.items() if value is not None}
        run.steps.append(numbers | {"grad norm": np.float64(result.grad_norm)})
        if trainer.loads:
            run.steps[-1]["tokens of experts"] = trainer.loads.tokens_per_expert
    run.final = weights_of(trainer)
    return run


def weights_of(trainer: Trainer) -> dict[str, np.ndarray]:
    """All weights as they are."""
    return {name: value.copy() for name, value in trainer.full_values()}
