"""The parity matrix: which plans are trained and what each must equal."""

from __future__ import annotations

import itertools

from attrs import frozen

WORLDS = (1, 2, 4, 8)
STEPS = 5
GLOBAL_BATCH = 24
SEQ_LENGTH = 24
VOCAB_SIZE = 61

# Odd sizes on purpose: most weights do not divide by 4 or 8, the q/k norms have fewer elements than 8 ranks.
_CONFIG = """
parallelism:
  data_parallel_shard: {dp_shard}
  reshard_after_forward_policy: "{reshard}"
  disable_gradient_division: {sum_gradients}
training:
  steps: {steps}
  global_batch_size: {global_batch}
  local_batch_size: {local_batch}
  max_norm: 0.5
  seed: 7
model:
  model_type: qwen3
  architectures: Qwen3ForCausalLM
  vocab_size: {vocab}
  seq_length: {seq}
  max_position_embeddings: {seq}
  hidden_size: 20
  intermediate_size: 28
  num_hidden_layers: 2
  num_attention_heads: 4
  num_key_value_heads: 2
  head_dim: 6
  initializer_range: 0.1
  tie_word_embeddings: {tied}
  params_dtype: {dtype}
  compute_dtype: {dtype}
optimizer:
  type: AdamW
  weight_decay: 0.1
lr_scheduler:
  type: LinearWithWarmUpLR
  learning_rate: 1.0e-2
  warmup_steps: 2
train_dataset:
  dataloader:
    type: BlendedMegatronDatasetDataLoader
    datasets_type: GPTDataset
    sizes: [{samples}, 0, 0]
    column_names: [input_ids, labels, loss_mask, position_ids]
    config:
      data_path: ["{corpus}"]
      split: "1, 0, 0"
      seq_length: {seq}
      eod: 0
      pad: -1
      eod_mask_loss: true
      reset_position_ids: true
      create_attention_mask: false
      create_compressed_eod_mask: false
"""


@frozen
class Case:
    """One plan, trained for `STEPS` steps and compared with one rank."""

    dp_replicate: int
    dp_shard: int
    reduction: str = "sum"
    reshard: str = "default"
    accumulation: int = 1
    dtype: str = "float64"
    tied: bool = False

    @property
    def world(self) -> int:
        return self.dp_replicate * self.dp_shard

    @property
    def name(self) -> str:
        head = "tied" if self.tied else "untied"
        return (
            f"{self.dp_replicate}x{self.dp_shard}-{self.reduction}-{self.reshard}-acc{self.accumulation}"
            f"-{self.dtype}-{head}"
        )

    @property
    def baseline(self) -> str:
        """The run on one rank that this must equal: same model, same samples, one micro-batch."""
        return f"{self.dtype}-{'tied' if self.tied else 'untied'}"

    def yaml(self, corpus: str) -> str:
        return _CONFIG.format(
            dp_shard=self.dp_shard,
            reshard=self.reshard,
            sum_gradients=str(self.reduction == "sum").lower(),
            steps=STEPS,
            global_batch=GLOBAL_BATCH,
            local_batch=GLOBAL_BATCH // (self.world * self.accumulation),
            vocab=VOCAB_SIZE,
            seq=SEQ_LENGTH,
            tied=str(self.tied).lower(),
            dtype=self.dtype,
            samples=STEPS * GLOBAL_BATCH,
            corpus=corpus,
        )


def _splits(world: int) -> list[tuple[int, int]]:
    return [(world // shard, shard) for shard in range(1, world + 1) if world % shard == 0]


BASELINES = tuple(Case(1, 1, dtype=dtype, tied=tied) for dtype in ("float64", "float32") for tied in (False, True))

CASES = tuple(
    [
        Case(*split, reduction, reshard, accumulation)
        for world in WORLDS
        for split, reduction, reshard, accumulation in itertools.product(
            _splits(world), ("sum", "mean"), ("always", "never", "default"), (1, 3)
        )
    ]
    + [
        Case(*split, reduction, "default", 3, "float64", tied=True)
        for world in WORLDS
        for split, reduction in itertools.product(_splits(world), ("sum", "mean"))
    ]
    + [
        Case(*split, "sum", "default", accumulation, "float32")
        for world in WORLDS
        for split, accumulation in itertools.product(_splits(world), (1, 3))
    ]
)
