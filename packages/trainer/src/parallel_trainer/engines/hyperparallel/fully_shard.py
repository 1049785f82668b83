"""FSDP and HSDP: what is wrapped in which order, what is reduced how, what is fetched ahead."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from parallel_config import ParallelPlan, TrainConfig

from parallel_trainer.engines.hyperparallel.blocks import EMBEDDING, EXPERTS, HEAD, NORM, ROUTER, Block
from parallel_trainer.engines.hyperparallel.calls import Attribute, Call, Module, Name, Parameter, Use
from parallel_trainer.engines.hyperparallel.mesh import sharding_mesh
from parallel_trainer.engines.hyperparallel.tensor_parallel import divides
from parallel_trainer.parallel.weights import Weight

_API = "hyper_parallel.core.fully_shard.api"
HSDP_MODULE = f"{_API}.HSDPModule"


def of_experts(block: Block, name: str, plan: ParallelPlan) -> bool:
    """Whether a weight is sharded on the mesh of experts."""
    return plan.ep > 1 and block.of_experts(name)


def replicated(block: Block, name: str, plan: ParallelPlan) -> bool:
    """Whether a rank keeps all of its part of a weight: rows that do not divide, and what is not trained."""
    weight: Weight = block.weights[name]
    rows = weight.shape[0] if weight.shape else 1
    if of_experts(block, name, plan):
        return rows // plan.ep % plan.efsdp != 0
    if weight.tp_dim == 0 and divides(weight, plan):
        rows //= plan.tp
    return rows % plan.fsdp != 0 or not weight.trainable


def policies(config: TrainConfig) -> Iterator[Call]:
    """What units compute in, and where they wait."""
    for name in dict.fromkeys((_policy(config), _policy(config, float32=True))):
        yield Call(
            Name(f"{_API}.MixedPrecisionPolicy"),
            (),
            {
                "param_dtype": Name(f"mindspore.{name.removeprefix('policy_')}"),
                "reduce_dtype": Name("mindspore.float32"),
                "apply_grad_on_fp32_main_grad": True,
            },
            result=name,
            why="gradients are then in main_grad, and grad is None",
        )
    if config.parallelism.cpu_offload:
        yield Call(Name("hyper_parallel.core.fully_shard.utils.CPUOffloadPolicy"), result="offload")


def _policy(config: TrainConfig, *, float32: bool = False) -> str:
    """Norms and routers stay in float32."""
    return f"policy_{'float32' if float32 else config.model.compute_dtype or 'float32'}"


def inner_units(block: Block, plan: ParallelPlan) -> tuple[str, ...]:
    """Modules of a layer that are wrapped before it: one unit has one type to compute in, and one mesh."""
    if block.layer is None:
        return ()
    experts = (EXPERTS,) if block.has_experts and plan.ep > 1 else ()
    return (*experts, *((ROUTER,) if block.has_experts else ()), *block.norms)


def wrap(block: Block, plan: ParallelPlan, config: TrainConfig) -> Iterator[Call]:
    """The block's units, the block itself last. Norms are not told when to reshard, and a head seldom does."""
    for name in inner_units(block, plan):
        reshard = None if name in block.norms else plan.reshard_after_forward
        yield _fully_shard(block, name, plan, config, reshard)
    reshard = plan.reshard_after_forward
    if block.module.name == NORM:
        reshard = None
    elif block.module.name == HEAD:
        reshard = config.parallelism.reshard_after_forward_policy == "always"
    yield _fully_shard(block, "", plan, config, reshard)


def wrap_root(chunk: int, plan: ParallelPlan, config: TrainConfig) -> Iterator[Call]:
    """The whole chunk, last."""
    keywords = {"mesh": sharding_mesh(plan, "fsdp"), "mp_policy": Use(_policy(config)), **_offload(config)}
    yield Call(Name(f"{_API}.fully_shard"), (Module("", chunk),), keywords)


def _fully_shard(block: Block, inner: str, plan: ParallelPlan, config: TrainConfig, reshard: bool | None) -> Call:
    """One unit: a module inside the block, or the block with what is in no unit of its own."""
    others = () if inner else tuple(f"{name}." for name in inner_units(block, plan))
    own = [name for name in block.weights if name.startswith(f"{inner}." if inner else "")]
    kept = [name for name in own if replicated(block, name, plan) and not any(map(name.startswith, others))]
    untrained = [name for name in kept if not block.weights[name].trainable]
    float32 = (inner != EXPERTS and bool(inner)) or block.module.name == NORM
    keywords: dict[str, Any] = {"mesh": sharding_mesh(plan, "efsdp" if inner == EXPERTS else "fsdp")}
    if reshard is not None:
        keywords["reshard_after_forward"] = reshard
    keywords |= {"mp_policy": Use(_policy(config, float32=float32)), **_offload(config)}
    if kept:
        keywords["replicate_params"] = [Parameter(block.module, name) for name in kept]
    parts = plan.efsdp if inner == EXPERTS else plan.fsdp
    return Call(
        Name(f"{_API}.fully_shard"),
        (block.module.inner(inner) if inner else block.module,),
        keywords,
        why=f"{parts} equal parts do not make up rows that stay whole" if len(untrained) < len(kept) else "",
    )


def _offload(config: TrainConfig) -> dict[str, Use]:
    return {"offload_policy": Use("offload")} if config.parallelism.cpu_offload else {}


def reduce_by_sum(blocks: Sequence[Block], chunk: int, plan: ParallelPlan) -> Iterator[Call]:
    """On every unit, because it holds for that unit alone, and its default depends on the kind of its parameters."""
    for block in blocks:
        names = ("", *inner_units(block, plan))
        for module in (block.module.inner(name) if name else block.module for name in names):
            yield _on(module, "set_reduce_op_type", "sum")
    yield _on(Module("", chunk), "set_reduce_op_type", "sum")


def fetch_ahead(blocks: Sequence[Block], plan: ParallelPlan) -> Iterator[Call]:
    """Each block fetches its own units and the next block, in the backward pass the one before."""
    by_name = {block.module.name: block.module for block in blocks}
    layers = [block for block in blocks if block.layer is not None]
    tail = [by_name[name] for name in (NORM, HEAD) if name in by_name]
    if not layers:
        return
    if EMBEDDING in by_name:
        yield _on(by_name[EMBEDDING], "set_modules_to_forward_prefetch", [layers[0].module])
    for layer, after in zip(layers, [*layers[1:], None], strict=True):
        ahead = [after.module] if after else tail
        yield from _fetch(layer, plan, "set_modules_to_forward_prefetch", ahead)
    if HEAD in by_name:
        yield _on(by_name[HEAD], "set_modules_to_backward_prefetch", [layers[-1].module])
    for layer, before in zip(reversed(layers), [*reversed(layers[:-1]), None], strict=True):
        ahead = [before.module] if before else [by_name[EMBEDDING]] if EMBEDDING in by_name else []
        yield from _fetch(layer, plan, "set_modules_to_backward_prefetch", ahead)


def _fetch(layer: Block, plan: ParallelPlan, method: str, ahead: list[Module]) -> Iterator[Call]:
    """One list, because a second would replace the first."""
    own = [layer.module.inner(name) for name in inner_units(layer, plan)]
    if own or ahead:
        yield _on(layer.module, method, [*own, *ahead])


def _on(module: Module, method: str, argument: object) -> Call:
    return Call(Attribute(module, method, HSDP_MODULE), (argument,))
