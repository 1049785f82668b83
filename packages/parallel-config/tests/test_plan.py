"""Plans against an independent count: which degrees fit a world, by placing ranks one at a time."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from parallel_config import ConfigError, ParallelPlan


def fits(world: int, tp: int, cp: int, pp: int, ep: int, shard: int) -> bool:
    """Whether ranks fill a grid of these sizes completely, counted out rather than divided."""
    replicas = 0
    ranks_left = world
    while ranks_left >= tp * cp * pp:
        ranks_left -= tp * cp * pp
        replicas += 1
    if ranks_left or replicas == 0:
        return False
    size = replicas if shard == -1 else shard
    if not any(size * count == replicas for count in range(1, replicas + 1)):
        return False
    experts_grid = size * cp * tp
    return any(ep * count == experts_grid for count in range(1, experts_grid + 1))


def plan_or_none(world: int, **degrees: int) -> ParallelPlan | None:
    try:
        return ParallelPlan.from_degrees(world, **degrees)  # type: ignore[arg-type]
    except ConfigError:
        return None


@pytest.mark.parametrize("world", [1, 2, 3, 6, 8, 12, 16, 24, 48, 64])
def test_every_combination_of_degrees(world: int) -> None:
    sizes = [1, 2, 3, 4, 5, 8, 16]
    accepted = 0
    for tp, cp, pp, ep, shard in itertools.product(sizes[:5], [1, 2, 3], [1, 2, 3], [1, 2, 4], [-1, 1, 2, 4]):
        plan = plan_or_none(
            world,
            tensor_parallel=tp,
            context_parallel=cp,
            pipeline_parallel=pp,
            expert_parallel=ep,
            data_parallel_shard=shard,
        )
        assert (plan is not None) == fits(world, tp, cp, pp, ep, shard)
        if plan is not None:
            accepted += 1
            assert plan.dp_replicate * plan.dp_shard * plan.cp * plan.tp * plan.pp == world
            assert plan.efsdp * plan.ep == plan.dp_shard * plan.cp * plan.tp
    assert accepted > 0


degrees = st.sampled_from([1, 2, 3, 4, 6, 8])


@settings(max_examples=100, deadline=None)
@given(
    tp=degrees,
    cp=degrees,
    pp=degrees,
    replicate=degrees,
    shard=degrees,
    chunks=st.integers(1, 3),
    extra_layers=st.integers(0, 40),
    local=st.integers(1, 4),
    steps=st.integers(1, 5),
)
def test_a_plan_built_from_its_parts_has_those_parts(
    tp: int,
    cp: int,
    pp: int,
    replicate: int,
    shard: int,
    chunks: int,
    extra_layers: int,
    local: int,
    steps: int,
) -> None:
    parts = pp * chunks if pp > 1 else 1
    layers = parts + extra_layers // parts * parts
    world = tp * cp * pp * replicate * shard
    plan = ParallelPlan.from_degrees(
        world,
        tensor_parallel=tp,
        context_parallel=cp,
        pipeline_parallel=pp,
        data_parallel_shard=shard,
        pipeline_parallel_interleave_num=chunks,
        num_hidden_layers=layers,
        local_batch_size=local,
        global_batch_size=local * replicate * shard * steps,
    )
    assert (plan.dp_replicate, plan.dp_shard, plan.data_parallel) == (replicate, shard, replicate * shard)
    assert plan.fsdp == shard * cp
    assert plan.fsdp_enabled == (shard != 1 or cp != 1)
    assert plan.num_accumulation_steps == steps
    assert plan.sequence_parallel == (tp != 1)
    assert plan.loss_scale * tp * cp * replicate * shard == pytest.approx(1.0)
    placed = [layer for first, last in plan.stage_layers for layer in range(first, last + 1)]
    assert placed == list(range(layers))
    assert len(plan.stage_layers) == parts


def test_a_plan_cannot_be_changed_and_compares_by_value() -> None:
    plan = ParallelPlan.from_degrees(8, tensor_parallel=2)
    assert plan == ParallelPlan.from_degrees(8, tensor_parallel=2)
    assert hash(plan) == hash(ParallelPlan.from_degrees(8, tensor_parallel=2))
    with pytest.raises(AttributeError):
        plan.tp = 4  # type: ignore[misc]


def test_large_worlds_are_as_quick_as_small_ones() -> None:
    plan = ParallelPlan.from_degrees(
        131_072, tensor_parallel=8, pipeline_parallel=16, context_parallel=2, data_parallel_shard=8
    )
    assert (plan.data_parallel, plan.dp_replicate) == (512, 64)
