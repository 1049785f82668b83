"""Which schedule a file asks for, and which rank holds which part of the model."""

from __future__ import annotations

import pytest
from parallel_config import ConfigWarning, ParallelPlan, loads, plan
from parallel_trainer.job import degrees
from parallel_trainer.kernels import kernels
from parallel_trainer.models.config import Qwen3Config
from parallel_trainer.models.qwen3 import Qwen3
from parallel_trainer.parallel.pipeline import Order, schedule, stage_units, unit_names, weight_ranks
from pipeline_schedule import Kind, Overlap, gpipe, interleaved_1f1b, one_f_one_b, overlap_p2p, validate, zb_h1, zb_v


@pytest.mark.parametrize("micro_batches", [1, 3, 4, 9])
def test_a_file_chooses_the_schedule(micro_batches: int) -> None:
    m = micro_batches
    assert schedule(4, 1, m) == one_f_one_b(4, m)
    assert schedule(4, 3, m) == interleaved_1f1b(4, 3, m)
    assert schedule(4, 1, m, Order("zbh1")) == zb_h1(4, m)
    assert schedule(4, 2, m, Order("zbv", overlap_p2p=True)) == overlap_p2p(zb_v(4, m))
    assert schedule(4, 1, m, Order(schedule="gpipe")) == gpipe(4, m)
    assert schedule(4, 3, m, Order(schedule="interleaved_1f1b")) == interleaved_1f1b(4, 3, m)


def test_a_pipeline_of_one_stage_takes_each_micro_batch_forward_and_back() -> None:
    (program,) = schedule(1, 1, 3).programs
    assert [(step.kind, step.microbatch) for step in program] == [
        (kind, m) for m in range(3) for kind in (Kind.FORWARD, Kind.BACKWARD)
    ]


@pytest.mark.parametrize("chunks", [1, 2, 3])
@pytest.mark.parametrize("p2p", [False, True])
def test_overlap_b_f_pairs_the_steady_part_of_interleaved_1f1b(chunks: int, p2p: bool) -> None:
    """Each rank runs W forwards ahead, then as many pairs as forwards are left but one, all in interleaved order."""
    made = schedule(4, chunks, 12, Order(overlap_p2p=p2p, overlap_b_f=True))
    validate(made)
    for rank, program in enumerate(made.programs):
        ahead = min((chunks - 1) * 4 + 2 * (3 - rank), 12 * chunks)
        assert sum(isinstance(step, Overlap) for step in program) == 12 * chunks - ahead - 1


def test_orders_come_from_the_file() -> None:
    text = """
parallelism: {pipeline_parallel: 2, pipeline_parallel_layers_per_stage: auto, pipeline_parallel_overlap_p2p: true,
              pipeline_parallel_zero_bubble: zbh1}
"""
    with pytest.warns(ConfigWarning, match="zero_bubble zbh1"):
        config = loads(text)
    assert Order.of(config.parallelism) == Order("zbh1", overlap_p2p=True)
    assert plan(config, 2).zero_bubble == "zbh1"
    sizes = "pipeline_parallel: 2, pipeline_parallel_layers_per_stage: auto"
    config = loads(f"parallelism: {{{sizes}, pipeline_parallel_schedule: GPipe}}")
    assert Order.of(config.parallelism) == Order(schedule="gpipe")
    assert degrees(plan(config, 2)) == "pp 2 (gpipe) x dp_replicate 1 x dp_shard 1"


def test_without_pipelining_no_order_is_chosen() -> None:
    with pytest.warns(ConfigWarning, match=r"overlap_b_f .pipeline_parallel is 1.*zero_bubble .pipeline_parallel is 1"):
        config = loads("parallelism: {pipeline_parallel_overlap_b_f: true, pipeline_parallel_zero_bubble: zbv}")
    assert Order.of(config.parallelism) == Order()


@pytest.mark.parametrize("pp", [1, 2, 3, 4, 8])
@pytest.mark.parametrize(("zero_bubble", "chunks"), [("none", 1), ("none", 2), ("none", 3), ("zbh1", 1), ("zbv", 2)])
def test_plan_and_schedule_put_stages_on_the_same_ranks(pp: int, zero_bubble: str, chunks: int) -> None:
    inferred = ParallelPlan.from_degrees(
        pp,
        pipeline_parallel=pp,
        pipeline_parallel_interleave_num=chunks,
        pipeline_parallel_zero_bubble=zero_bubble,
    )
    made = schedule(pp, inferred.interleave_num, 3, Order(inferred.zero_bubble))
    assert inferred.stage_ranks == made.placement


def model(*, tied: bool) -> Qwen3:
    config = Qwen3Config(
        vocab_size=8,
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=4,
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=8,
        tie_word_embeddings=tied,
    )
    return Qwen3(config, kernels("cpu"))


def test_units_are_named_and_cut_alike() -> None:
    units = model(tied=False).units
    cut = [(0, 0), (1, 2), (3, 3)]
    names = stage_units(unit_names(len(units)), cut)
    assert names == [("embedding", "layers.0"), ("layers.1", "layers.2"), ("layers.3", "head")]
    for of_stage, named in zip(stage_units(units, cut), names, strict=True):
        for unit, name in zip(of_stage, named, strict=True):
            assert name in {"embedding", "head"} or f".{name}." in unit.weights[0].name


@pytest.mark.parametrize(
    ("stage_ranks", "holders"), [((0, 1), (0, 1)), ((0, 1, 0, 1), (0, 1)), ((0, 1, 1, 0), (0,)), ((0, 1, 2, 3), (0, 3))]
)
def test_a_tied_table_is_held_where_the_embedding_and_the_head_are(
    stage_ranks: tuple[int, ...], holders: object
) -> None:
    each = 4 // len(stage_ranks)
    cut = [(stage * each, stage * each + each - 1) for stage in range(len(stage_ranks))]
    found = weight_ranks(stage_units(model(tied=True).units, cut), stage_ranks)
    assert found["model.embed_tokens.weight"] == holders
    assert found["model.norm.weight"] == (stage_ranks[-1],)
    for layer in range(4):
        assert found[f"model.layers.{layer}.mlp.up_proj.weight"] == (stage_ranks[layer // each],)
    untied = weight_ranks(stage_units(model(tied=False).units, cut), stage_ranks)
    assert untied["lm_head.weight"] == (stage_ranks[-1],)
