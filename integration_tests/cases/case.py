"""One plan: what it is called, and its file."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path

from attrs import field, frozen

from cases.model import Model, flag

WORLDS = (1, 2, 4, 8)
STEPS = 2
SEQ_LENGTH = 32
VOCAB_SIZE = 61
EOD, PAD = 0, 1

TOLERANCE = {
    "float64": {"losses": 1e-9, "grad_norms": 1e-9, "weights": 1e-9, "loads": 0},
    "float32": {"losses": 1e-5, "grad_norms": 1e-4, "loads": 0},
}
"""By the type that a plan computes in, how far it may be from one rank."""

# Odd sizes on purpose: most weights do not divide by 4 or 8, the q/k norms have fewer elements than 8 ranks.
_CONFIG = """
parallelism:
  data_parallel_shard: {dp_shard}
  reshard_after_forward_policy: "{reshard}"
  disable_gradient_division: {sum_gradients}
  context_parallel: {cp}
  context_parallel_method: {method}
  context_parallel_async: {asynchronous}
  context_parallel_order: {order}
  ulysses_degree_in_cp: {ulysses}
  tensor_parallel: {tp}
  enable_loss_parallel: {loss_parallel}
  pipeline_parallel: {pp}
  pipeline_parallel_interleave_num: {chunks}
  pipeline_parallel_layers_per_stage: {layout}
  pipeline_parallel_overlap_p2p: {overlap}
  expert_parallel: {ep}
  moe_token_dispatcher_type: {dispatcher}
  npu_nums_per_device: {node}
  pipeline_parallel_overlap_b_f: {paired}
  pipeline_parallel_zero_bubble: {zero_bubble}
  pipeline_parallel_schedule: {schedule}
training:
  steps: {steps}
  global_batch_size: {global_batch}
  local_batch_size: {local_batch}
  max_norm: 0.5
  seed: 7
model:
{architecture}  vocab_size: {vocab}
  seq_length: {seq}
  max_position_embeddings: {seq}
  hidden_size: 20
  intermediate_size: 24
  num_hidden_layers: {layers}
  num_attention_heads: 8
  initializer_range: 0.1
  tie_word_embeddings: {tied}
  params_dtype: {dtype}
  compute_dtype: {dtype}
  use_attn_mask_compression: {causal}
optimizer:
  type: AdamW
  weight_decay: 0.1
lr_scheduler:
  type: LinearWithWarmUpLR
  learning_rate: 1.0e-2
  warmup_steps: 0
train_dataset:
  dataloader:
    type: BlendedMegatronDatasetDataLoader
    datasets_type: GPTDataset
    sizes: [{samples}, 0, 0]
    column_names: [input_ids, labels, loss_mask, position_ids{mask_column}]
    config:
      data_path: ["{corpus}"]
      split: "1, 0, 0"
      seq_length: {seq}
      eod: {eod}
      pad: {pad}
      eod_mask_loss: true
      reset_position_ids: true
      create_attention_mask: false
      create_compressed_eod_mask: {compressed}
"""


@frozen
class Case:
    """One plan, trained for `STEPS` steps and compared with one rank."""

    dp_replicate: int = 1
    dp_shard: int = 1
    cp: int = 1
    tp: int = 1
    method: str = "colossal"
    ulysses: int | None = None
    asynchronous: bool = False
    order: str = "contiguous"
    loss_parallel: bool = False
    pp: int = 1
    chunks: int = 1
    layout: str = "auto"
    overlap: bool = False
    ep: int = 1
    node: int | None = None
    paired: bool = False
    zero_bubble: str = "none"
    schedule: str = "1f1b"
    reduction: str = "sum"
    reshard: str = "default"
    accumulation: int = 1
    model: Model = field(factory=Model)

    @property
    def world(self) -> int:
        return self.pp * self.dp_replicate * self.dp_shard * self.cp * self.tp

    @property
    def local_batch(self) -> int:
        """Samples of a rank's micro-batch."""
        micro_batches = max(self.accumulation, self.model.micro_batches)
        return self.model.local_batch or self.model.batch // (self.dp_replicate * self.dp_shard * micro_batches)

    @property
    def dimensions(self) -> str:
        """Which kind of plan this is, for the tables."""
        context = [f"{self.method} context parallel"] if self.cp > 1 else []
        kind = "zero-bubble" if self.zero_bubble != "none" else "interleaved" if self.chunks > 1 else ""
        kind = "GPipe" if self.schedule == "gpipe" else kind
        pipeline = [f"{kind} pipeline".strip()] if self.pp > 1 else []
        experts = ["expert parallel"] if self.ep > 1 else ["experts"] if self.model.architecture != "qwen3" else []
        return " x ".join([*pipeline, *experts, *(["tensor parallel"] if self.tp > 1 else []), *context, "FSDP, HSDP"])

    @property
    def degrees(self) -> str:
        """The plan's degrees as the tables show them."""
        names = ("pp", "chunks", "dp_replicate", "dp_shard", "cp", "tp", "ep")
        shown = [f"{name} {getattr(self, name)}" for name in names if getattr(self, name) > 1]
        return " x ".join(shown) or "one rank"

    @property
    def name(self) -> str:
        parts = [f"{self.dp_replicate}x{self.dp_shard}x{self.cp}x{self.tp}"]
        if self.pp > 1:
            parts.insert(0, f"pp{self.pp}x{self.chunks}")
            parts += [self.zero_bubble] if self.zero_bubble != "none" else []
            parts += [] if self.schedule == "1f1b" else [self.schedule]
            parts += [] if self.layout == "auto" else ["uneven"]
            parts += [*(["overlap"] if self.overlap else []), *(["paired"] if self.paired else [])]
        parts += [f"ep{self.ep}"] if self.ep > 1 else []
        parts += [f"nodes-of-{self.node}"] if self.node else []
        parts += ["lossparallel"] if self.loss_parallel else []
        if self.cp > 1:
            parts += [self.method + (str(self.ulysses) if self.method == "hybrid" else ""), self.order]
            parts += ["async"] if self.asynchronous else []
        return "-".join([*parts, self.reduction, self.reshard, f"acc{self.accumulation}", self.model.name])

    def yaml(self, corpora: Mapping[str, str]) -> str:
        """The file, given the prefix of each text's corpus."""
        text = self.model.text
        compressed = text != "plain"
        return _CONFIG.format(
            dp_shard=self.dp_shard,
            reshard=self.reshard,
            sum_gradients=flag(self.reduction == "sum"),
            cp=self.cp,
            method=self.method,
            asynchronous=flag(self.asynchronous),
            order=self.order,
            ulysses="null" if self.ulysses is None else self.ulysses,
            steps=STEPS,
            global_batch=self.model.batch,
            layers=self.model.layers,
            pp=self.pp,
            chunks=self.chunks,
            layout=self.layout if self.pp > 1 else "null",
            overlap=flag(self.overlap),
            ep=self.ep,
            dispatcher="alltoall_deredundancy" if self.node else "alltoall",
            node=self.node or 8,
            architecture=self.model.section,
            paired=flag(self.paired),
            zero_bubble=self.zero_bubble,
            schedule=self.schedule,
            tp=self.tp,
            loss_parallel=flag(self.loss_parallel),
            local_batch=self.local_batch,
            vocab=VOCAB_SIZE,
            seq=SEQ_LENGTH,
            tied=flag(self.model.tied),
            dtype=self.model.dtype,
            causal=flag(not compressed),
            samples=STEPS * self.model.batch,
            mask_column=", actual_seq_len" if compressed else "",
            corpus=corpora[text],
            eod=EOD,
            pad=PAD if text == "padded" else -1,
            compressed=flag(compressed),
        )


def corpora() -> dict[str, str]:
    """By text the prefix of its corpus, from the folder that ranks are started with."""
    found: dict[str, str] = json.loads(Path(sys.argv[1], "corpora.json").read_text(encoding="utf-8"))
    return found
