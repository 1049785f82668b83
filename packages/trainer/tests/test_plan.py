"""`parallel-train plan`: its tables, beside numbers worked out by hand, and the rank that it shows."""

from __future__ import annotations

import gc
import re
import tracemalloc
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
from device_mesh import connect
from parallel_config import loads
from parallel_trainer.cli import main
from parallel_trainer.costs import expected_nodes
from parallel_trainer.data.indexed import IndexedWriter
from parallel_trainer.estimate import Estimate
from parallel_trainer.job import Job, prepare
from parallel_trainer.models.router import Routing
from parallel_trainer.trainer import Trainer

# 8 tokens a micro-batch, 8 wide, 4 heads of 4 numbers and 2 of keys and values, 12 inside the feed-forward.
FILE = """
parallelism: {{{parallelism}}}
training: {{steps: 2, {training}}}
model: {{vocab_size: {vocab}, seq_length: 8, hidden_size: 8, intermediate_size: 12, num_hidden_layers: {layers},
        num_attention_heads: 4, use_attn_mask_compression: true, {model}}}
lr_scheduler: {{type: ConstantWarmUpLR, learning_rate: 1.0e-3, warmup_steps: 0}}
train_dataset:
  dataloader:
    type: BlendedMegatronDatasetDataLoader
    datasets_type: GPTDataset
    sizes: [64, 0, 0]
    column_names: [input_ids, labels, loss_mask, position_ids]
    config: {{data_path: ["{corpus}"], split: "1, 0, 0", seq_length: 8, create_attention_mask: false}}
"""

QWEN3 = "model_type: qwen3, architectures: Qwen3ForCausalLM, num_key_value_heads: 2, head_dim: 4"
# 8 experts with 6 numbers inside, of which a token chooses 2; a shared one, one further prediction; latents of 5 and 3.
DEEPSEEK = """model_type: deepseek_v3, architectures: DeepseekV3ForCausalLM, num_key_value_heads: 4, q_lora_rank: 5,
        kv_lora_rank: 3, qk_nope_head_dim: 4, qk_rope_head_dim: 2, v_head_dim: 3, n_routed_experts: 8,
        num_experts_per_tok: 2, moe_intermediate_size: 6, n_shared_experts: 1, first_k_dense_replace: 1, n_group: 4,
        topk_group: 2, moe_aux_loss_coeff: 0.1, num_nextn_predict_layers: 1"""


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
    model: str = QWEN3,
) -> str:
    return FILE.format(
        parallelism=parallelism, training=training, vocab=vocab, layers=layers, corpus=corpus, model=model
    )


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
        assert received == {"tp": of_tp, "world": 16, "total": of_tp + 16}


def test_weights_of_a_sharded_plan(corpus: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    content = text(corpus, "data_parallel_shard: 2", training="global_batch_size: 2, local_batch_size: 1")
    printed, (parameters, memory, received) = shown(capsys, tmp_path / "a.yaml", content, "--world-size", "2")
    block, end = 2 * 16 * 8 + 2 * 8 * 8 + 3 * 12 * 8 + 24, 61 * 8
    assert parameters["total"] == (2 * block + 2 * end + 8) // 2
    # Embedding and block, two blocks, or block and head, whichever are most; in the backward pass the same.
    assert memory["gathered parameters"] == memory["whole gradients"] == 4 * (block + max(block, end + 8))
    # Every weight is gathered for both passes and its gradient scattered: three times the half that others have.
    assert received["fsdp"] == 3 * 4 * (2 * block + 2 * end + 8) // 2
    assert "Rank 0 needs the most memory: ranks are alike, or the first has the larger parts" in printed


def test_tables_of_experts_over_tensor_parallel_ranks(
    corpus: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Layer 0 is dense, layer 1 and the one that predicts further have experts, whose shards `efsdp` cuts."""
    content = text(corpus, "tensor_parallel: 4, expert_parallel: 2, enable_loss_parallel: true", model=DEEPSEEK)
    printed, (parameters, memory, received) = shown(capsys, tmp_path / "a.yaml", content, "--world-size", "4")
    assert "each when it is most; activations for even routing" in printed
    # Latents are whole; of the rest one head of 6, 7 and 3 numbers; inside 3 of 12 and, in the shared expert, 2 of 6.
    attention = 8 * (5 + 3 + 2) + 5 * 6 + 3 * 7 + 8 * 3
    norms, router, shared, experts = 2 * 8 + 5 + 3, 8 * 8 + 8, 3 * 8 * 2, 8 * 3 * 8 * 6 // 4
    held = {
        "embedding": 16 * 8,
        "norms": 2 * norms + 8,
        "attention": 2 * attention,
        "feed-forward": 3 * 8 * 3,
        "router": router,
        "experts": experts,
        "shared experts": shared,
        "multi-token prediction": attention + norms + router + experts + shared + 2 * 8 * 8 + 3 * 8,
        "head": 16 * 8,
    }
    total = sum(held.values())
    assert parameters == held | {"total": total}
    trained = total - 2 * 8  # biases along which routers choose have no gradient
    layer = attention + norms + router + 2 * experts + shared - 8
    # 2 own tokens and 8 of all ranks. Norms of 8, 5 and 3 numbers with a root each, what latents are made from, latents
    # gathered; queries and keys of 6 and values and twice the result of 3 numbers, a log-sum.
    latent = 2 * (2 * 9 + 8 + 6 + 4) + 8 * (5 + 3 + 2 * 6 + 3 * 3 + 1)
    # The router's input, scores, probabilities and a gradient of them, their sum and that of the chosen, two weights
    # twice and two numbers of 8 bytes; of 4 rows input, result and three times 6; the shared expert.
    chosen = 2 * (8 + 3 * 8 + 2 + 2 * 2 + 2 * 2) + 4 * (2 * 8 + 3 * 6) + 8 * (8 + 4 * 2)
    kept = 2 * latent + 8 * (8 + 4 * 3) + chosen + 2 * (4 * 9 + 16) + latent + chosen
    kept += 2 * 16 + 2 * 8 * (8 + 16)  # both halves, and for each hidden states and gradients of 16 logits
    expected = {
        "parameters": 4 * total,
        "gradients": 4 * trained,
        # Those of layer 1, while the experts' of the further layer are reduced: nothing else is sharded.
        "whole gradients": 4 * (layer + 2 * experts),
        "optimizer state": 9 * trained,
        "gathered parameters": 4 * 4 * experts,
        "activations": 4 * kept,
        "logits at work": 4 * 8 * 16,
    }
    assert memory == expected | {"total": sum(expected.values())}
    # Borders of 2 tokens with 3 other ranks, both ways: latents of 10 in and 8 out, a dense part or a shared expert,
    # two embeddings, two predictions; counts of 8 experts in float64; a logit in float32 and two sums in float64.
    alike = 3 * (norms + 8 * 10) + 2 * 8 * 8 + 8 + 3 * 8 + 2 * 8 * 8
    of_tp = 2 * 3 * 2 * 4 * (3 * (18 + 16) + 2 * 8 + 2 * 8) + 2 * 96 + 2 * (48 + 192) + 6 * alike
    # In each pass 2 of 4 rows of 8 numbers there and back, weights and their gradients; counts of 4 experts.
    of_ep = 2 * (2 * 4 * (4 * 8 + 2) + 4 * 8)
    # Each expert's part is gathered twice and its gradient scattered; tokens of each expert, the norm, and whether the
    # update was finite.
    assert received == {
        "tp": of_tp,
        "ep (even routing)": of_ep,
        "efsdp": 3 * 4 * 2 * experts,
        "world": 2 * 12 + 2 * 2 * 9 * 8 * 3 // 4,
        "total": sum((of_tp, of_ep, 3 * 4 * 2 * experts, 2 * 12 + 216)),
    }


def test_bytes_between_nodes_are_shown(corpus: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    parallelism = (
        "expert_parallel: 4, moe_token_dispatcher_type: alltoall_deredundancy, npu_nums_per_device: 2, "
        "data_parallel_shard: 4"
    )
    content = text(corpus, parallelism, model=DEEPSEEK, training="global_batch_size: 4, local_batch_size: 1")
    _, (_, _, received) = shown(capsys, tmp_path / "a.yaml", content, "--world-size", "4")
    # Of two layers. Two of four groups are on one node with a chance of 1/3, and then both experts; else both experts
    # are in one group with a chance of 1/3: a token goes to 1 + 4/9 nodes on average.
    between = 16 + (4 * 8 * 13 / 9 * 8 * 4 + 16 * (8 + 3 * 4)) / 2
    within = (16 * (4 * 8 + 2) * 4 + 8 * 8) / 2
    assert received["ep between nodes (even routing)"] == 2 * round(between)
    assert received["ep within nodes (even routing)"] == 2 * round(within)


@pytest.mark.parametrize(("groups", "chosen"), [(1, 1), (2, 1), (4, 2), (4, 3), (6, 2)])
@pytest.mark.parametrize("nodes", [1, 2, 4, 6])
def test_nodes_of_a_token_are_those_of_every_choice_on_average(groups: int, chosen: int, nodes: int) -> None:
    experts, top_k = 12, 2
    routing = Routing(
        experts=experts, inner=1, top_k=top_k, scoring="sigmoid", normalized=True, groups=groups, topk_group=chosen
    )
    if groups % nodes and nodes % groups:
        groups = chosen = 1
    size = experts // groups
    choices = [
        {expert // (experts // nodes) for expert in choice}
        for some in combinations(range(groups), chosen)
        for choice in combinations([group * size + place for group in some for place in range(size)], top_k)
    ]
    assert expected_nodes(routing, nodes) == pytest.approx(sum(map(len, choices)) / len(choices), rel=1e-12)


@pytest.mark.parametrize(
    ("vocab", "rank", "has", "model"),
    [
        (61, 0, "layers 0, 2, the embedding", QWEN3),
        (4000, 1, "layers 1, 3, the output layer", QWEN3),
        (61, 1, "layers 1, 3, the further prediction, the output layer", DEEPSEEK),
    ],
)
def test_the_rank_that_needs_most_is_shown(
    corpus: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], vocab: int, rank: int, has: str, model: str
) -> None:
    """Early stages have more micro-batches under way, the last one has the logits."""
    parallelism = "pipeline_parallel: 2, pipeline_parallel_interleave_num: 2, pipeline_parallel_layers_per_stage: auto"
    content = text(
        corpus, parallelism, training="global_batch_size: 4, local_batch_size: 1", vocab=vocab, layers=4, model=model
    )
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
        (3, "data_parallel_shard: 3, expert_parallel: 1"),
        (8, "pipeline_parallel: 2, pipeline_parallel_layers_per_stage: auto, tensor_parallel: 4, expert_parallel: 2"),
    ],
)
def test_no_rank_needs_more_than_the_one_that_is_shown(corpus: str, world_size: int, parallelism: str) -> None:
    content = text(
        corpus,
        parallelism,
        training="global_batch_size: 24, local_batch_size: 1",
        layers=5 if "0-0" in parallelism else 4,
        model=DEEPSEEK if "expert" in parallelism else QWEN3,
    )
    job: Job = prepare(loads(content), world_size)
    totals = [sum(Estimate.of(job, rank).memory().values()) for rank in range(world_size)]
    assert sum(Estimate.largest(job).memory().values()) == max(totals)
    assert len(set(totals)) > 1


@pytest.mark.parametrize("model", [QWEN3, DEEPSEEK], ids=["one prediction", "two predictions"])
def test_memory_of_a_step_with_many_logits_is_what_is_planned(corpus: str, model: str) -> None:
    """At its peak, with 5 percent for Python's own objects and what MindSpore has outside NumPy."""
    training = "global_batch_size: 32, local_batch_size: 32"
    job = prepare(loads(text(corpus, "", training=training, vocab=8000, model=model)), 1)
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
