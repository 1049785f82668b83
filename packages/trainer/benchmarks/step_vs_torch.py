"""One training step (forward and backward) of the same Qwen3 here and in PyTorch eager mode, in the same run.

    python benchmarks/step_vs_torch.py [--rounds 10] [--json FILE]

Needs torch and transformers, the environment of the `interop` session. The two take turns, so that a busy
machine slows both; the ratio is of the medians, and 1 means as fast as PyTorch.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

from parallel_trainer.launch.mpiexec import rank_environment

if (_wanted := rank_environment(1, os.environ)) != dict(os.environ):
    # The environment of a rank has to be there before NumPy is loaded: its BLAS chooses its kernels then.
    os.execve(sys.executable, [sys.executable, *sys.argv], _wanted)

import numpy as np
import torch
from mindspore import Tensor, ops, runtime
from parallel_trainer.batch import MicroBatch
from parallel_trainer.kernels import kernels
from parallel_trainer.models.config import Qwen3Config
from parallel_trainer.models.qwen3 import Qwen3
from parallel_trainer.models.single import initial_weights
from transformers import Qwen3Config as PeerConfig
from transformers import Qwen3ForCausalLM

ROWS, TOKENS = 4, 256
CONFIG = Qwen3Config(
    vocab_size=256,
    hidden_size=256,
    intermediate_size=1024,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=4,
    head_dim=64,
)


def our_step(ids: np.ndarray, labels: np.ndarray) -> Callable[[], float]:
    """The step on one device, unit by unit, without the sharding around it."""
    runtime.launch_blocking()  # as the trainer does
    model = Qwen3(CONFIG, kernels("cpu"))
    values = initial_weights(model, seed=0)
    weights = [[Tensor(values[weight.name]) for weight in unit.weights] for unit in model.units]
    backwards = [ops.GradOperation(get_all=True, sens_param=True)(unit) for unit in model.units]
    for unit in model.units:
        unit.set_grad(True)
    batch = MicroBatch(ids, np.tile(np.arange(TOKENS, dtype=np.int32), (ROWS, 1)), labels)

    def step() -> float:
        inputs = [Tensor(ids)]
        for unit, of_unit in zip(model.units, weights, strict=True):
            inputs.append(unit(inputs[-1], batch, *of_unit))
        gradient = Tensor(np.array([1 / labels.size], np.float32))
        for index in reversed(range(len(model.units))):
            gradient, *of_weights = backwards[index](inputs[index], batch, *weights[index], gradient)
            for of_weight in of_weights:
                of_weight.asnumpy()
        return float(inputs[-1].asnumpy()[0]) / labels.size

    return step


def torch_step(ids: np.ndarray, labels: np.ndarray, attention: str) -> Callable[[], float]:
    """The step of Hugging Face's model; `attention` is its `attn_implementation`."""
    fields = {
        name: getattr(CONFIG, name)
        for name in (
            "vocab_size",
            "hidden_size",
            "intermediate_size",
            "num_hidden_layers",
            "num_attention_heads",
            "num_key_value_heads",
            "head_dim",
        )
    }
    model = Qwen3ForCausalLM(
        PeerConfig(**fields, attn_implementation=attention, use_cache=False, tie_word_embeddings=False)
    )
    inputs, targets = (torch.from_numpy(array).long() for array in (ids, labels))

    def step() -> float:
        model.zero_grad()
        logits = model(inputs).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
        loss.backward()
        return loss.item()

    return step


def main() -> None:
    """Measure, print a table and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10, help="steps of each that are timed")
    parser.add_argument("--json", type=Path, help="write the numbers to this file too")
    arguments = parser.parse_args()

    ids, labels = np.random.default_rng(0).integers(0, CONFIG.vocab_size, (2, ROWS, TOKENS), dtype=np.int32)
    steps = {
        "parallel_trainer": our_step(ids, labels),
        "torch, sdpa attention": torch_step(ids, labels, "sdpa"),
        "torch, eager attention": torch_step(ids, labels, "eager"),
    }
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for round_number in range(arguments.rounds + 2):
        for name, step in steps.items():
            start = time.perf_counter()
            step()
            if round_number >= 2:
                seconds[name].append(time.perf_counter() - start)

    ours = median(seconds["parallel_trainer"])
    rows = {
        name: {
            "median_ms": median(values) * 1e3,
            "best_ms": min(values) * 1e3,
            "tokens_per_second": ROWS * TOKENS / median(values),
            "speed_of_ours": median(values) / ours,
        }
        for name, values in seconds.items()
    }
    print(f"{'step of':24}{'median ms':>12}{'best ms':>12}{'tokens/s':>12}{'ours is × as fast':>20}")
    for name, row in rows.items():
        print(
            f"{name:24}{row['median_ms']:12.1f}{row['best_ms']:12.1f}"
            f"{row['tokens_per_second']:12.0f}{row['speed_of_ours']:20.2f}"
        )
    if arguments.json:
        arguments.json.write_text(json.dumps({"threads": torch.get_num_threads(), "steps": rows}, indent=1))


if __name__ == "__main__":
    main()
