"""`shard_module`: parameters in parts, and what goes in and out of modules in other parts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from attrs import frozen
from mindspore import Parameter, Tensor, nn

from hyperparallel_stand_in.meshes import DeviceMesh
from hyperparallel_stand_in.tensors import DTensor, Placement, Replicate, Shard


@frozen
class ShardingPlan:
    """Placements by the names of parameters, and by the names of modules followed by .input or .output."""

    plan: Mapping[str, tuple[Placement, ...]] | None = None
    input_plan: Mapping[str, tuple[Placement, ...]] | None = None
    output_plan: Mapping[str, tuple[Placement, ...]] | None = None
    return_local_tensor: None = None


def shard_module(model: nn.Cell, device_mesh: DeviceMesh, sharding_plan: ShardingPlan) -> nn.Cell:
    """Cut the named parameters, each rank from what it holds of the whole, and redistribute at the named modules."""
    if sharding_plan.return_local_tensor is not None:
        raise NotImplementedError("return_local_tensor")
    for name, placements in (sharding_plan.plan or {}).items():
        owner, last = _inside(model, name)
        owner._params[last] = _cut(owner._params[last], device_mesh, placements)
    for key, placements in (sharding_plan.input_plan or {}).items():
        _inside_at(model, key, "input").register_forward_pre_hook(
            _redistribute_inputs(device_mesh, placements), with_kwargs=True
        )
    for key, placements in (sharding_plan.output_plan or {}).items():
        _inside_at(model, key, "output").register_forward_hook(_redistribute_outputs(device_mesh, placements))
    return model


def _cut(parameter: Parameter, mesh: DeviceMesh, placements: tuple[Placement, ...]) -> Parameter:
    values = parameter.asnumpy()
    for axis, placement in enumerate(placements):
        if isinstance(placement, Shard):
            size = mesh.size(axis)
            if values.shape[placement.dim] % size:
                raise ValueError(f"{parameter.name} of shape {values.shape}: {placement} over {size} ranks is uneven")
            values = np.split(values, size, placement.dim)[mesh.get_local_rank(axis)]
        elif not isinstance(placement, Replicate):
            raise ValueError(f"{parameter.name}: a parameter cannot be {placement}")
    return made_parameter(values, parameter, mesh, placements)


def made_parameter(
    values: Any, like: Parameter, mesh: DeviceMesh | None = None, placements: tuple[Placement, ...] = ()
) -> Parameter:
    """A parameter of these values, on a mesh as a DTensor, that collects gradients if the other does."""
    local = Tensor(np.array(values, order="C"))
    local._requires_grad = bool(like.requires_grad)  # before it is shared: that is where gradients are kept
    data = local if mesh is None else DTensor.from_local(local, mesh, placements)
    return Parameter(data, name=like.name, requires_grad=like.requires_grad)


def _inside(model: nn.Cell, name: str) -> tuple[nn.Cell, str]:
    *path, last = name.split(".")
    owner = model
    for part in path:
        owner = owner._cells[part]
    if last not in owner._params:
        raise ValueError(f"{type(model).__name__} has no parameter {name}")
    return owner, last


def _inside_at(model: nn.Cell, key: str, end: str) -> nn.Cell:
    *path, last = key.split(".")
    if last != end:
        raise ValueError(f"{key} of a plan of {end}s: it has to end with {end}")
    found = model
    for part in path:
        if part not in found._cells:
            raise ValueError(f"{type(model).__name__} has no module {'.'.join(path)}")
        found = found._cells[part]
    return found


def _redistribute_inputs(mesh: DeviceMesh, placements: tuple[Placement, ...]) -> Callable[..., Any]:
    """Placements are for the first positional argument; a DTensor anywhere else has none and is an error."""

    def hook(cell: nn.Cell, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        others = [*arguments[1:], *keywords.values()]
        if any(isinstance(value, DTensor) for value in others):
            raise ValueError(f"{type(cell).__name__} is given a DTensor that its input plan says nothing about")
        first = [
            value.redistribute(mesh, placements) if isinstance(value, DTensor) else value for value in arguments[:1]
        ]
        return (*first, *arguments[1:]), keywords

    return hook


def _redistribute_outputs(mesh: DeviceMesh, placements: tuple[Placement, ...]) -> Callable[..., Any]:
    def hook(cell: nn.Cell, _: Any, output: Any) -> Any:
        if isinstance(output, (tuple, list)):
            raise ValueError(f"{type(cell).__name__} returns {len(output)} values, and its output plan is about one")
        return output.redistribute(mesh, placements) if isinstance(output, DTensor) else output

    return hook
