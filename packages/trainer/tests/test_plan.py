"""`parallel-train plan`: its tables, beside numbers worked out by hand, and the rank that it shows."""

from __future__ import annotations

import gc
import re
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from device_mesh import connect
from parallel_config import loads
from parallel_trainer.cli import main
from parallel_trainer.data.indexed import IndexedWriter
from parallel_trainer.estimate import Estimate
from parallel_trainer.job import Job, prepare
from parallel_trainer.trainer import Trainer

# 8 tokens a micro-batch, 8 wide, 4 heads of 4 numbers and 2 of keys and values, 12 inside the feed-forward.
FILE = """
parallelism: {{{parallelism}}}
training: {{steps: 2, {training}}}
model: {{model_type: qwen3, architectures: Qwen3ForCausalLM, vocab_size: {vocab}, seq_length: 8, hidden_size: 8,
        intermediate_size: 12, num_hidden_layers: {layers}, num_attention_heads: 4, num_key_value_heads: 2, head_dim: 4,
        use_attn_mask_compression: true}}
lr_scheduler: {{type: ConstantWarmUpLR, learning_rate: 1.0e-3, warmup_steps: 0}}
train_dataset:
  dataloader:
    type: BlendedMegatronDatasetDataLoader
    datasets_type: GPTDataset
    sizes: [64, 0, 0]
    column_names: [input_ids, labels, loss_mask, position_ids]
    config: {{data_path: ["{corpus}"], split: "1, 0, 0", seq_length: 8, create_attention_mask: false}}
"""


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    prefix = tmp_path_factory.mktemp("corpus") / "text"
    with IndexedWriter(prefix, vocab_size=61) as writer:
        writer.add_document(np.random.default_rng(0).integers(0, 61, 1000))
    return str(prefix)


def text(
    corpus: str,
    parallelism: str,
    *,
    training: str = "global_batch_size: 1, local_batch_size: 1",
    vocab: int = 61,
    layers: int = 2,
) -> str:
    return FILE.format(parallelism=parallelism, training=training, vocab=vocab, layers=layers, corpus=corpus)


def shown(capsys: pytest.CaptureFixture[str], path: Path, content: str, *arguments: str) -> tuple[str, list[dict]]:
    """What the command prints, and its tables: numbers by the names of their rows."""
    path.write_text(content, encoding="utf-8")
    assert main(["plan", str(path), *arguments]) == 0
    printed = capsys.readouterr().out
    tables: list[dict[str, int]] = []
    for line in printed.splitlines():
        row = re.fullmatch(r"  (\S.*?)\s+([\d,]+)", line)
        if row is None:
            tables.append({})
        else:
            tables[-1][row[1]] = int(row[2].replace(",", ""))
    return printed, [table for table in tables if table]


def test_tables_of_both_tensor_parallel_ranks(corpus: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    content = text(corpus, "tensor_parallel: 2")
    for rank, rows in ((0, 31), (1, 30)):
        arguments = ("--world-size", "2", "--rank", str(rank))
        printed, (parameters, memory, received) = shown(capsys, tmp_path / "a.yaml", content, *arguments)
        assert (
            f"Parameters of rank {rank}, of {2 * 61 * 8 + 2 * (2 * 64 + 128 + 128 + 288 + 24) + 8:,} in all" in printed
        )
        # Of each layer, 8 of 16 rows of q, 4 of 8 of k and v, 8 of 16 columns of o; 6 of 12 inside the feed-forward.
        attention, feed_forward, norms = 8 * (8 + 4 + 4 + 8), 3 * 6 * 8, 2 * 8 + 2 * 4
        held = {
            "embedding": rows * 8,
            "attention": 2 * attention,
            "norms": 2 * norms + 8,
            "feed-forward": 2 * feed_forward,
            "head": rows * 8,
        }
        total = sum(held.values())
        assert parameters == held | {"total": total}
        # In a block: 4 tokens between the regions, 8 inside. Twice a hidden state and its root before the norms, and
        # its normed value gathered; 4 times 6 numbers; two numbers a query head and one a key head; queries 4 times,
        # keys 2 times, values once. The head: the same for its norm, and a gradient for each of all logits.
        block = 4 * 2 * 9 + 8 * (2 * 8 + 4 * 6 + 2 * 2 + 1 + 4 * (4 * 2 + 2 + 1))
        kept = {
            "parameters": 4 * total,
            "gradients": 4 * total,
            "whole gradients": 4 * (attention + feed_forward + norms),
            "optimizer state": 9 * total,
            "gathered parameters": 0,
            "activations": 4 * (2 * block + 4 * 9 + 8 * (8 + 61)),
            "logits at work": 4 * 8 * (rows + 61),
        }
        assert memory == kept | {"total": sum(kept.values())}
        # A border between regions is 4 tokens of 8 numbers: 4 each way of a layer, 1 of the embedding and of the head.
        of_tp = 2 * (4 * 2 + 2) * 4 * 8 * 4 + 8 * (61 - rows) * 4 + (2 * norms + 8) * 4
        assert received == {"tp": of_tp, "world": 8, "total": of_tp + 8}


def test_weights_of_a_sharded_plan(corpus: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    content = text(corpus, "data_parallel_shard: 2", training="global_batch_size: 2, local_batch_size: 1")
    printed, (parameters, memory, received) = shown(capsys, tmp_path / "a.yaml", content, "--world-size", "2")
    block, end = 2 * 16 * 8 + 2 * 8 * 8 + 3 * 12 * 8 + 24, 61 * 8
    assert parameters["total"] == (2 * block + 2 * end + 8) // 2
    assert memory["gathered parameters"] == memory["whole gradients"] == 4 * max(block, end + 8)
    # Every weight is gathered for both passes and its gradient scattered: three times the half that others have.
    assert received["fsdp"] == 3 * 4 * (2 * block + 2 * end + 8) // 2
    assert "Rank 0 needs the most memory: ranks are alike, or the first has the larger parts" in printed


@pytest.mark.parametrize(
    ("vocab", "rank", "has"), [(61, 0, "layers 0, 2, the embedding"), (4000, 1, "layers 1, 3, the")]
)
def test_the_rank_that_needs_most_is_shown(
    corpus: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], vocab: int, rank: int, has: str
) -> None:
    """Early stages have more micro-batches under way, the last one has the logits."""
    parallelism = "pipeline_parallel: 2, pipeline_parallel_interleave_num: 2, pipeline_parallel_layers_per_stage: auto"
    content = text(corpus, parallelism, training="global_batch_size: 4, local_batch_size: 1", vocab=vocab, layers=4)
    printed, tables = shown(capsys, tmp_path / "a.yaml", content, "--world-size", "2")
    assert f"Rank {rank} needs the most memory: its stage of the pipeline, {rank + 1} of 2, has {has}" in printed
    _, other = shown(capsys, tmp_path / "a.yaml", content, "--world-size", "2", "--rank", str(1 - rank))
    assert tables[1]["total"] > other[1]["total"]


@pytest.mark.parametrize(
    ("world_size", "parallelism"),
    [
        (3, "data_parallel_shard: 3"),
        (4, "data_parallel_shard: 2, tensor_parallel: 2, enable_loss_parallel: true"),
        (8, "tensor_parallel: 4, context_parallel: 2"),
        (8, "pipeline_parallel: 2, pipeline_parallel_layers_per_stage: auto, tensor_parallel: 2"),
        (8, "pipeline_parallel: 4, pipeline_parallel_layers_per_stage: [0-0, 1-2, 3-3, 4-4], context_parallel: 2"),
    ],
)
def test_no_rank_needs_more_than_the_one_that_is_shown(corpus: str, world_size: int, parallelism: str) -> None:
    content = text(
        corpus,
        parallelism,
        training="global_batch_size: 24, local_batch_size: 1",
        layers=5 if "0-0" in parallelism else 4,
    )
    job: Job = prepare(loads(content), world_size)
    totals = [sum(Estimate.of(job, rank).memory().values()) for rank in range(world_size)]
    assert sum(Estimate.largest(job).memory().values()) == max(totals)
    assert len(set(totals)) > 1


def test_memory_of_a_step_with_many_logits_is_what_is_planned(corpus: str) -> None:
    """At its peak, with 5 percent for Python's own objects and what MindSpore has outside NumPy."""
    job = prepare(loads(text(corpus, "", training="global_batch_size: 32, local_batch_size: 32", vocab=8000)), 1)
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        trainer = Trainer(job, connect("single"))
        trainer.train_step()
        gc.collect()
        tracemalloc.reset_peak()
        trainer.train_step()
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert sum(Estimate.largest(job).memory().values()) == pytest.approx(peak - before, rel=0.05)


def test_rank_outside_the_world(corpus: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "a.yaml"
    path.write_text(text(corpus, "tensor_parallel: 2"), encoding="utf-8")
    assert main(["plan", str(path), "--world-size", "2", "--rank", "2"]) == 2
    assert "--rank 2 must be 0 … 1" in capsys.readouterr().err


def test_more_ranks_than_vocabulary(corpus: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "a.yaml"
    path.write_text(text(corpus, "tensor_parallel: 4", vocab=3), encoding="utf-8")
    assert main(["plan", str(path), "--world-size", "4"]) == 2
    error = capsys.readouterr().err
    assert "a.yaml:2:32: parallelism.tensor_parallel 4 must be ≤ vocab_size 3" in error
    assert "Use tensor_parallel 1 or 2" in error
