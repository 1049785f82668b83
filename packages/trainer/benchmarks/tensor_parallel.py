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

from device_mesh.variables import for_own_mpiexec
from parallel_trainer.launch.mpiexec import rank_environment

CORES = 2
STEPS, WARM_UP = 12, 2
ROWS, TOKENS, WIDTH, VOCABULARY = 4, 256, 256, 256
CONFIG = """
parallelism: {{tensor_parallel: {tp}, enable_loss_parallel: true}}
training: {{steps: {steps}, global_batch_size: {rows}, local_batch_size: {rows}}}
model:
  model_type: qwen3
  architectures: Qwen3ForCausalLM
  vocab_size: {vocabulary}
  seq_length: {tokens}
  hidden_size: {width}
  intermediate_size: {inner}
  num_hidden_layers: 4
  num_attention_heads: 4
  num_key_value_heads: 2
  head_dim: 64
lr_scheduler: {{type: ConstantWarmUpLR, learning_rate: 1.0e-3, warmup_steps: 0}}
train_dataset:
  dataloader:
    type: BlendedMegatronDatasetDataLoader
    datasets_type: GPTDataset
    sizes: [{samples}, 0, 0]
    config: {{data_path: ["{corpus}"], split: "1, 0, 0", seq_length: {tokens}, create_attention_mask: false}}
"""


def config(tp: int, corpus: str) -> str:
    """The file of both plans."""
    return CONFIG.format(
        tp=tp,
        corpus=corpus,
        steps=STEPS,
        rows=ROWS,
        tokens=TOKENS,
        samples=STEPS * ROWS,
        width=WIDTH,
        inner=3 * WIDTH,
        vocabulary=VOCABULARY,
    )


def rank(tp: int, corpus: str) -> None:
    """Train, and print the seconds of each step on rank 0."""
    from device_mesh import abort_on_error, connect
    from parallel_config import loads
    from parallel_trainer.job import prepare
    from parallel_trainer.trainer import Trainer

    communicator = connect()
    with abort_on_error(communicator):
        trainer = Trainer(prepare(loads(config(tp, corpus)), tp), communicator)
        seconds = []
        for _ in range(STEPS):
            start = time.perf_counter()
            trainer.train_step()
            seconds.append(time.perf_counter() - start)
        if communicator.rank == 0:
            print(json.dumps(seconds[WARM_UP:]))


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
        with IndexedWriter(corpus, vocab_size=VOCABULARY) as writer:
            writer.add_document(np.random.default_rng(0).integers(0, VOCABULARY, STEPS * ROWS * TOKENS + 1))
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
                threads = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"), str(CORES // ranks))
                environment = rank_environment(ranks, for_own_mpiexec(os.environ | threads))
                done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
                found += json.loads(done.stdout.strip().splitlines()[-1])
    speed = {ranks: ROWS * TOKENS / median(found) for ranks, found in seconds.items()}
    for ranks in seconds:
        print(f"tensor_parallel {ranks}, threads of a rank {CORES // ranks}: {speed[ranks]:8,.0f} tokens/s")
    usable = len(os.sched_getaffinity(0))
    print(f"ratio {speed[2] / speed[1]:.2f} on {usable} usable cores (goal on {CORES}: at least 0.8)")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--rank"]:
        rank(int(sys.argv[2]), sys.argv[3])
    else:
        main()
