"""Meshes, as MindFormers builds them: one of the world, and three views of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Literal

from parallel_config import ParallelPlan

from parallel_trainer.engines.hyperparallel.calls import Attribute, Call, Name, Use

DEVICE_MESH = "hyper_parallel.DeviceMesh"
TP, CP, PP, EP = Use("dense", ("tp",)), Use("data", ("cp",)), Use("data", ("pp",)), Use("sparse", ("ep",))


def start() -> Iterator[Call]:
    """What is needed before the first tensor."""
    yield Call(Name("mindspore.mint.distributed.init_process_group"), (), {"backend": "hccl"})
    compatible = "hyper_parallel.platform.mindspore.autograd_compat.enable_mindspore_backward_compat"
    yield Call(Name(compatible), why="MindSpore's tensors get backward() and .grad")


def meshes(plan: ParallelPlan) -> Iterator[Call]:
    """The world and its views. All ranks make them in this order, because groups are made by all together."""
    yield Call(
        Name("hyper_parallel.init_device_mesh"),
        ("npu", (plan.world_size,)),
        {"mesh_dim_names": ("world",)},
        result="world",
        why="1.0 takes no other device for fully_shard than npu and cuda",
    )
    views: dict[str, dict[str, int]] = {
        "data": {"pp": plan.pp, "batch": plan.dp_replicate * plan.dp_shard, "cp": plan.cp, "tp": plan.tp},
        "dense": {"pp": plan.pp, "dp_replicate": plan.dp_replicate, "fsdp": plan.fsdp, "tp": plan.tp},
        "sparse": {"pp": plan.pp, "dp_replicate": plan.dp_replicate, "efsdp": plan.efsdp, "ep": plan.ep},
    }
    for name, axes in views.items():
        yield Call(
            Attribute(Use("world"), "_unflatten", DEVICE_MESH),
            (0, tuple(axes.values()), tuple(axes)),
            {"backend_override": dict.fromkeys(_without_group(axes, plan.ep), "fake")},
            result=name,
        )
    joined = Attribute(Use("data", ("batch", "cp")), "_flatten", DEVICE_MESH)
    yield Call(
        joined, ("loss_mesh",), result="loss_mesh", why="ranks with different tokens, for whoever reports a loss"
    )


def _without_group(axes: Mapping[str, int], ep: int) -> Iterator[str]:
    """Axes of one rank need no group, but for fsdp; those of experts need one only where experts are spread."""
    for name, size in axes.items():
        needed = ep > 1 if name == "efsdp" else size > 1 or name == "fsdp"
        if not needed:
            yield name


def sharding_mesh(plan: ParallelPlan, axis: Literal["fsdp", "efsdp"]) -> Use:
    """Over which ranks fully_shard cuts: one axis, or replicas by shards, as two axes always mean HSDP."""
    view = "dense" if axis == "fsdp" else "sparse"
    return Use(view, (axis,) if plan.dp_replicate == 1 else ("dp_replicate", axis))
