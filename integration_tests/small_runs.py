"""A file and a corpus small enough to run in seconds, as the cases from public bug reports have them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
from parallel_trainer.data.indexed import IndexedWriter

COMMAND = str(Path(sys.executable).parent / "parallel-train")

FILE = """
training: {{steps: {steps}, global_batch_size: 4, local_batch_size: 1}}
model: {{model_type: qwen3, architectures: Qwen3ForCausalLM, vocab_size: 64, seq_length: 16, hidden_size: 32,
        intermediate_size: 48, num_hidden_layers: 2, num_attention_heads: 4, num_key_value_heads: 2, head_dim: 8}}
optimizer: {{type: AdamW}}
lr_scheduler: {{type: ConstantWarmUpLR, learning_rate: 1.0e-3, warmup_steps: 0}}
train_dataset:
  dataloader:
    type: BlendedMegatronDatasetDataLoader
    datasets_type: GPTDataset
    sizes: [{samples}, 0, 0]
    config: {{data_path: [{corpus}], split: "{split}", seq_length: 16, eod: 0,
             create_attention_mask: false, create_compressed_eod_mask: false}}
checkpoint: {checkpoint}
"""


def corpus(prefix: Path) -> None:
    """50 documents of 40 ids drawn from 1 … 63, each followed by id 0."""
    generator = np.random.default_rng(0)
    with IndexedWriter(prefix, vocab_size=64) as writer:
        for _ in range(50):
            writer.add_document(np.append(generator.integers(1, 64, 40), 0))


def write(path: Path, *, steps: int = 3, checkpoint: str = "{}", more: str = "", **changes: Any) -> Path:
    """The file of the cases, with fields of its section `checkpoint` and lines after it."""
    values = {"corpus": "corpus", "split": "1, 0, 0", "samples": 4 * steps} | changes
    path.write_text(FILE.format(steps=steps, checkpoint=checkpoint, **values) + more, encoding="utf-8")
    return path


def call(*arguments: str | Path, cwd: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run `parallel-train`, each rank with one thread."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"} | variables
    command = [COMMAND, *map(str, arguments)]
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=240)


def metrics(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
