"""Tokens per second of two tensor-parallel ranks with one thread each, against one rank with two threads.

    python benchmarks/tensor_parallel.py [--rounds 3]

4 layers, 256 wide, 4 rows of 256 tokens, float32. Launches take turns, so that a busy machine slows both; the ratio is
of the medians, and 1 means that splitting the weights costs nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

from parallel_trainer.launch.mpiexec import rank_environment

STEPS = 12
ROWS, TOKENS = 4, 256
CONFIG = """
parallelism: {{tensor_parallel: {tp}, enable_loss_parallel: true}}
training: {{steps: 12, global_batch_size: 4, local_batch_size: 4}}
model:
  model_type: qwen3
  architectures: Qwen3ForCausalLM
  vocab_size: 256
  seq_length: 256
  hidden_size: 256
  intermediate_size: 768
  num_hidden_layers: 4
  num_attention_heads: 4
  num_key_value_heads: 2
  head_dim: 64
lr_scheduler: {{type: ConstantWarmUpLR, learning_rate: 1.0e-3, warmup_steps: 0}}
train_dataset:
  dataloader:
    type: BlendedMegatronDatasetDataLoader
    datasets_type: GPTDataset
    sizes: [48, 0, 0]
    config: {{data_path: ["{corpus}"], split: "1, 0, 0", seq_length: 256, create_attention_mask: false}}
"""


def rank(tp: int, corpus: str) -> None:
    """Train, and print the seconds of each step on rank 0."""
    from device_mesh import abort_on_error, connect
    from parallel_config import loads
    from parallel_trainer.job import prepare
    from parallel_trainer.trainer import Trainer

    communicator = connect()
    with abort_on_error(communicator):
        trainer = Trainer(prepare(loads(CONFIG.format(tp=tp, corpus=corpus)), tp), communicator)
        seconds = []
        for _ in range(STEPS):
            start = time.perf_counter()
            trainer.train_step()
            seconds.append(time.perf_counter() - start)
        if communicator.rank == 0:
            print(json.dumps(seconds[2:]))


def main() -> None:
    """Launch both in turns and print tokens per second."""
    import numpy as np
    from parallel_trainer.data.indexed import IndexedWriter

    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=3)
    rounds = parser.parse_args().rounds
    seconds: dict[int, list[float]] = {1: [], 2: []}
    with tempfile.TemporaryDirectory() as folder:
        corpus = str(Path(folder, "corpus"))
        with IndexedWriter(corpus, vocab_size=256) as writer:
            writer.add_document(np.random.default_rng(0).integers(0, 256, STEPS * ROWS * TOKENS + 1))
        for _ in range(rounds):
            for ranks, found in seconds.items():
                command = [
                    str(Path(sys.executable).parent / "mpiexec"),
                    "-n",
                    str(ranks),
                    sys.executable,
                    __file__,
                    "--rank",
                    str(ranks),
                    corpus,
                ]
                done = subprocess.run(
                    command, env=rank_environment(ranks, os.environ), capture_output=True, text=True, check=True
                )
                found += json.loads(done.stdout.strip().splitlines()[-1])
    speed = {ranks: ROWS * TOKENS / median(found) for ranks, found in seconds.items()}
    print(f"1 rank, 2 threads       {speed[1]:8,.0f} tokens/s")
    print(f"tp 2, 1 thread a rank   {speed[2]:8,.0f} tokens/s, ratio {speed[2] / speed[1]:.2f} (goal: at least 0.8)")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--rank"]:
        rank(int(sys.argv[2]), sys.argv[3])
    else:
        main()
