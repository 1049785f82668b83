"""Tensor, sequence and expert parallelism: which parameters are split how, and where activations change hands.

Hidden states are (sequence, batch, hidden) between layers, as in MindFormers, and (batch, sequence, hidden) out of the
embedding. Sequence parallelism is the placement of what goes in and out: there is no switch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from parallel_config import ParallelPlan

from parallel_trainer.engines.hyperparallel.blocks import EMBEDDING, EXPERTS, HEAD, SHARED_EXPERTS, Block
from parallel_trainer.engines.hyperparallel.calls import Call, Module, Name
from parallel_trainer.engines.hyperparallel.mesh import EP, TP
from parallel_trainer.parallel.weights import Weight

_PLACEMENTS = "hyper_parallel.core.dtensor.placement_types"
REPLICATE = Call(Name(f"{_PLACEMENTS}.Replicate"))


def shard(dim: int) -> Call:
    """The placement of a tensor that is cut in equal parts along a dimension."""
    return Call(Name(f"{_PLACEMENTS}.Shard"), (dim,))


def divides(weight: Weight, plan: ParallelPlan) -> bool:
    """Whether tensor parallelism can cut the weight: placements know equal parts only."""
    return weight.tp_dim is not None and weight.shape[weight.tp_dim] % (weight.tp_block * plan.tp) == 0


def split_parameters(block: Block, plan: ParallelPlan) -> Iterator[Call]:
    """The block's parameters over tp, and what goes in and out of its parts."""
    placed = {
        name: (shard(weight.tp_dim) if weight.tp_dim is not None and divides(weight, plan) else REPLICATE,)
        for name, weight in block.weights.items()
        if plan.ep == 1 or not block.of_experts(name)
    }
    whole = [name for name, weight in block.weights.items() if weight.tp_dim is not None and not divides(weight, plan)]
    why = f"{plan.tp} equal parts do not make up {', '.join(whole)}: each rank holds all of it" if whole else ""
    inputs: dict[str, Any] = {}
    outputs: dict[str, Any] = {}
    if block.layer is not None:
        inputs = {f"{part}.input": (REPLICATE,) for part in ("self_attn", "mlp")}
        outputs = {f"{part}.output": (shard(0),) for part in ("self_attn", "mlp")}
        if SHARED_EXPERTS in block.modules:
            outputs[f"{SHARED_EXPERTS}.output"] = (REPLICATE,)  # added to what routed experts return, which is whole
    elif block.module.name == EMBEDDING:
        outputs = {"output": (shard(1),)}
    elif block.module.name == HEAD:
        inputs, outputs = {"input": (REPLICATE,)}, {"output": (REPLICATE,)}
    yield _shard_module(block.module, TP, placed, inputs, outputs, why=why)


def spread_experts(block: Block) -> Iterator[Call]:
    """Whole experts over ep, the innermost axis of its mesh: neighbouring ranks."""
    placed = {
        name.removeprefix(f"{EXPERTS}."): (shard(weight.ep_dim),)
        for name, weight in block.weights.items()
        if weight.ep_dim is not None
    }
    yield _shard_module(block.module.inner(EXPERTS), EP, placed, {}, {})


def _shard_module(
    module: Module,
    mesh: Any,
    plan: Mapping[str, Any],
    inputs: Mapping[str, Any],
    outputs: Mapping[str, Any],
    why: str = "",
) -> Call:
    given = {"plan": plan, "input_plan": inputs, "output_plan": outputs}
    sharding_plan = Call(
        Name("hyper_parallel.core.shard.sharding_plan.ShardingPlan"), (), {name: v for name, v in given.items() if v}
    )
    return Call(Name("hyper_parallel.shard_module"), (module, mesh, sharding_plan), why=why)
