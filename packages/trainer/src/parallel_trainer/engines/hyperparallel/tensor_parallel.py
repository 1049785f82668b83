"""Tensor, sequence and expert parallelism: which parameters are split how, and where activations change hands.

Hidden states are (tokens, hidden), and each rank has a part of the tokens between regions whose weights are split.
Sequence parallelism is the placement of what goes in and out of a region: there is no switch. Inside, a module computes
on local tensors; what it returns is a part of a sum over the ranks, or of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from parallel_config import ParallelPlan

from parallel_trainer.engines.hyperparallel.blocks import EMBEDDING, EXPERTS, HEAD, SHARED_EXPERTS, Block
from parallel_trainer.engines.hyperparallel.calls import Attribute, Call, Module, Name
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


def split_parameters(block: Block, plan: ParallelPlan, *, loss_parallel: bool) -> Iterator[Call]:
    """The block's parameters over tp, and what goes in and out of its parts. For a parallel loss logits stay split."""
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
        inputs = {f"{region}.input": (REPLICATE,) for region in _regions(block)}
        outputs = {f"{region}.output": (shard(0),) for region in _regions(block)}
    elif block.module.name == EMBEDDING:
        outputs = {} if whole else {"output": (shard(0),)}
    elif block.module.name == HEAD:
        inputs, outputs = {"input": (REPLICATE,)}, {} if whole or loss_parallel else {"output": (REPLICATE,)}
    yield _shard_module(block.module, TP, placed, inputs, outputs, why=why)


def _regions(block: Block) -> Iterator[str]:
    """Modules of a layer that see all tokens. Experts do not: each rank sends its own tokens to them."""
    yield "self_attn"
    if not block.has_experts:
        yield "mlp"
    elif SHARED_EXPERTS in block.modules:
        yield SHARED_EXPERTS


def say_ranks(chunk: int) -> Call:
    """Where a chunk's regions hand over, before its parameters are split."""
    return Call(Attribute(Module("", chunk), "split_over", ""), (TP,), why="its modules say what is a part of what")


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
