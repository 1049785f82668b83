"""Putting the double where HyperParallel would be imported from."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import mindspore.mint.distributed as collectives
import numpy as np
from device_mesh import Communicator
from mindspore import Tensor

from hyperparallel_stand_in import contexts, meshes, shards, stages, tensors, units
from hyperparallel_stand_in.backward import Backward, make_enable


def install(world: Communicator) -> Callable[[], None]:
    """Let `hyper_parallel` be this double, for the ranks of `world`, until the process ends.

    What is returned is called when a model is done with: without it, backward passes of the next would go over it too.
    """
    groups, model = meshes.Groups(world), units.Units()
    backward = Backward(model)
    stage = type("PipelineStage", (stages.PipelineStage,), {"groups": groups, "backward": backward})
    core = "hyper_parallel.core"
    names: dict[str, dict[str, Any]] = {
        "hyper_parallel": {
            "DTensor": tensors.DTensor,
            "DeviceMesh": meshes.DeviceMesh,
            "PipelineStage": stage,
            "init_device_mesh": meshes.make_init_device_mesh(groups),
            "shard_module": shards.shard_module,
        },
        f"{core}.shard.sharding_plan": {"ShardingPlan": shards.ShardingPlan},
        f"{core}.dtensor.dtensor": {"DTensor": tensors.DTensor},
        f"{core}.dtensor.placement_types": {
            "Partial": tensors.Partial,
            "Replicate": tensors.Replicate,
            "Shard": tensors.Shard,
        },
        f"{core}.fully_shard.api": {
            "HSDPModule": units.HSDPModule,
            "MixedPrecisionPolicy": units.MixedPrecisionPolicy,
            "fully_shard": units.make_fully_shard(model, backward),
        },
        f"{core}.fully_shard.utils": {"CPUOffloadPolicy": units.CPUOffloadPolicy},
        f"{core}.context_parallel.context_parallel": {"ContextParallel": contexts.ContextParallel},
        f"{core}.context_parallel.async_context_parallel": {"AsyncContextParallel": contexts.AsyncContextParallel},
        f"{core}.activation_checkpoint": {"checkpoint_wrapper": stages.checkpoint_wrapper},
        f"{core}.pipeline_parallel": {
            "Schedule1F1B": stages.Schedule1F1B,
            "ScheduleGPipe": stages.ScheduleGPipe,
            "ScheduleInterleaved1F1B": stages.ScheduleInterleaved1F1B,
        },
        "hyper_parallel.platform.mindspore.autograd_compat": {
            "enable_mindspore_backward_compat": make_enable(backward),
        },
    }
    for path, values in names.items():
        parts = path.split(".")
        for depth in range(1, len(parts) + 1):
            name = ".".join(parts[:depth])
            sys.modules.setdefault(name, ModuleType(name))
        for name, value in values.items():
            setattr(sys.modules[path], name, value)
    os.environ["HYPER_PARALLEL_PLATFORM"] = "mindspore"
    _install_collectives(groups)
    return model.forget


def _install_collectives(groups: meshes.Groups) -> None:
    """Those of MindSpore that work on NPUs alone."""

    def init_process_group(backend: str = "hccl") -> None:
        if backend != "hccl":
            raise ValueError(f"backend {backend}")

    def all_reduce(tensor: Tensor, op: str = "sum", group: str | None = None, async_op: bool = False) -> None:
        if async_op or op != "sum":
            raise NotImplementedError(f"all_reduce with op {op}, async_op {async_op}")
        values = tensor.asnumpy()
        values[...] = groups.of(group).all_reduce(np.array(values))

    collectives.init_process_group = init_process_group
    collectives.all_reduce = all_reduce
