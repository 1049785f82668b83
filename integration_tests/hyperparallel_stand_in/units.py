"""`fully_shard`: weights in shards of rows, whole for their unit's forward and backward pass, and reduced gradients."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal

import mindspore as ms
import numpy as np
from attrs import define, frozen
from device_mesh import Array, Communicator
from mindspore import Parameter, Tensor, nn

from hyperparallel_stand_in.backward import Backward
from hyperparallel_stand_in.meshes import DeviceMesh
from hyperparallel_stand_in.shards import made_parameter
from hyperparallel_stand_in.tensors import DTensor, Replicate, Shard, local_part


@frozen
class MixedPrecisionPolicy:
    """What a unit computes in and reduces in; with the last flag gradients are added up in float32 in `main_grad`."""

    param_dtype: Any = None
    reduce_dtype: Any = None
    output_dtype: None = None
    cast_forward_inputs: bool = True
    apply_grad_on_fp32_main_grad: bool = False

    def __attrs_post_init__(self) -> None:
        if self.output_dtype is not None:
            raise NotImplementedError("output_dtype")


@frozen
class OffloadPolicy:
    """No offloading."""


@frozen
class CPUOffloadPolicy(OffloadPolicy):
    """Shards in the host's memory: it changes no value, so nothing is done."""

    pin_memory: bool = True


@define(eq=False)
class Managed:
    """A parameter of a unit.

    owner, name: the module that has it, and the name there.
    shard:       this rank's rows, or all of them: what an optimizer updates.
    whole:       what the unit computes with; gathered into the same memory each time.
    rows:        the group among which rows are cut; None where each rank keeps all of them.
    copies:      groups of ranks with the same element, on the unit's mesh and on that of tensor parallelism.
    collected:   gradients that are not reduced yet.
    """

    owner: nn.Cell
    name: str
    shard: Parameter
    whole: Parameter
    rows: Communicator | None
    copies: tuple[Communicator, ...]
    collected: Array | None = None

    def show(self, parameter: Parameter) -> None:
        self.owner._params[self.name] = parameter

    def collect(self) -> None:
        """Add what a backward pass has left, not in MindSpore's own sum: that loses the order of a transposed one."""
        local = local_part(self.whole)
        if local._grad is not None:
            found = np.array(local._grad.asnumpy())
            self.collected = found if self.collected is None else self.collected + found
            local._grad = None


class Unit:
    """A module with those of its parameters that no unit inside it has."""

    def __init__(
        self,
        module: nn.Cell,
        mesh: DeviceMesh,
        policy: MixedPrecisionPolicy,
        kept: Sequence[Parameter],
        model: Units,
        backward: Backward,
        *,
        reshard_after_forward: bool,
    ) -> None:
        self.mesh, self.policy, self.model, self.backward = mesh, policy, model, backward
        self.reshard_after_forward = reshard_after_forward
        found = list(_unmanaged(module))
        strangers = [one.name for one in kept if not any(one is parameter for _, _, parameter in found)]
        if strangers:
            raise ValueError(f"replicate_params {strangers} are no parameters that this unit manages")
        # Of parameters that tensor parallelism has cut the gradients are summed, of others averaged.
        distributed = any(isinstance(parameter, DTensor) for _, _, parameter in found)
        self.reduce_op: Literal["sum", "avg"] = "sum" if distributed else "avg"
        self.parameters = [
            self._managed(owner, name, parameter, kept=any(parameter is one for one in kept))
            for owner, name, parameter in found
        ]
        self.is_whole = True
        self.show_shards()
        module.register_forward_pre_hook(self._before_forward, with_kwargs=True)
        module.register_forward_hook(self._after_forward)
        model.add(self)

    def show_whole(self) -> None:
        for parameter in self.parameters:
            parameter.show(parameter.whole)
        self.is_whole = True

    def show_shards(self) -> None:
        for parameter in self.parameters:
            parameter.show(parameter.shard)
        self.is_whole = False

    def zero_grad(self) -> None:
        for parameter in self.parameters:
            parameter.shard.main_grad = None
            parameter.shard.grad = None
        self.model.fresh = False

    def _managed(self, owner: nn.Cell, name: str, parameter: Parameter, *, kept: bool) -> Managed:
        values, dtype = local_part(parameter).asnumpy(), self.policy.param_dtype
        shards = self.mesh.communicator(self.mesh.ndim - 1)
        if not kept and values.shape[0] % shards.size:
            raise NotImplementedError(f"{parameter.name} of shape {values.shape}: its rows over {shards.size} ranks")
        own = values if kept else np.split(values, shards.size)[shards.rank]
        # The library's shards name the axes of tensor parallelism too; here they name the unit's mesh alone.
        placements = (Replicate(),) * (self.mesh.ndim - 1) + (Replicate() if kept else Shard(0),)
        shard = made_parameter(own, parameter, self.mesh, placements)
        shard._hsdp_param_initialized = True
        whole = values if dtype is None else values.astype(ms.dtype_to_nptype(dtype))
        distributed = (parameter.device_mesh, parameter.placements) if isinstance(parameter, DTensor) else ()
        copies = [self.mesh.communicator(0)] if self.mesh.ndim == 2 else []
        copies += [shards] if kept else []
        if distributed:
            mesh, on_mesh = distributed
            copies += [mesh.communicator(axis) for axis, one in enumerate(on_mesh) if one == Replicate()]
        return Managed(
            owner,
            name,
            shard,
            made_parameter(whole, parameter, *distributed),
            None if kept else shards,
            tuple(group for group in copies if group.size > 1),
        )

    def _before_forward(self, _: nn.Cell, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        if self.backward.running:
            return arguments, keywords
        if not self.is_whole:
            self.model.gather()
            self.show_whole()
        if self.policy.cast_forward_inputs and self.policy.param_dtype is not None:
            arguments = tuple(map(self._cast, arguments))
            keywords = {name: self._cast(value) for name, value in keywords.items()}
        return arguments, keywords

    def _after_forward(self, _: nn.Cell, arguments: Any, output: Any) -> Any:
        if self.reshard_after_forward and not self.backward.running:
            self.show_shards()
        return output

    def _cast(self, value: Any) -> Any:
        if not isinstance(value, Tensor) or not value.is_floating_point() or value.dtype == self.policy.param_dtype:
            return value
        if isinstance(value, DTensor):
            local = value.to_local().astype(self.policy.param_dtype)
            return DTensor.from_local(local, value.device_mesh, value.placements)
        return value.astype(self.policy.param_dtype)

    def in_reduced_type(self, gradient: Array) -> Array:
        """The gradient in the type in which it is reduced."""
        dtype = self.policy.reduce_dtype
        return gradient if dtype is None else gradient.astype(ms.dtype_to_nptype(dtype), copy=False)

    def divisor(self, group: Communicator) -> int:
        """What makes a sum over a group what the unit wants."""
        return group.size if self.reduce_op == "avg" else 1

    def add(self, shard: Parameter, gradient: Array) -> None:
        """Add a reduced gradient to that of the shard."""
        in_main = self.policy.apply_grad_on_fp32_main_grad
        before = getattr(shard, "main_grad", None) if in_main else shard.grad
        values = gradient.astype(np.float32 if in_main else shard.asnumpy().dtype)
        if before is not None:
            values = values + before.asnumpy()
        total = DTensor.from_local(Tensor(values), shard.device_mesh, shard.placements)
        if in_main:
            shard.main_grad = total
        else:
            shard.grad = total


class Units:
    """All units of a rank's model. What they gather and reduce goes in one message for each group, which changes when
    values travel and not what they are: processes that share cores would wait for every message."""

    def __init__(self) -> None:
        self._units: list[Unit] = []
        self.fresh = False

    def add(self, unit: Unit) -> None:
        self._units.append(unit)
        self.fresh = False

    def forget(self) -> None:
        self._units.clear()

    def show_whole(self) -> None:
        for unit in self._units:
            unit.show_whole()

    def show_shards(self) -> None:
        for unit in self._units:
            unit.show_shards()

    def collect(self) -> None:
        for unit in self._units:
            for parameter in unit.parameters:
                parameter.collect()

    def gather(self) -> None:
        """Make all whole weights of what shards are now, unless no backward pass has ended since."""
        if self.fresh:
            return
        self.fresh = True
        managed = [parameter for unit in self._units for parameter in unit.parameters]
        for rows in _different(parameter.rows for parameter in managed):
            of_group = [parameter for parameter in managed if parameter.rows is rows]
            targets = [local_part(parameter.whole).asnumpy() for parameter in of_group]
            shards = [
                parameter.shard.to_local().asnumpy().astype(target.dtype)
                for parameter, target in zip(of_group, targets, strict=True)
            ]
            if rows is not None:
                shards = _apart(rows.all_gather(_together(shards, 1)), [shard.size for shard in shards])
            for target, whole in zip(targets, shards, strict=True):
                target[...] = whole.reshape(target.shape)

    def reduce(self) -> None:
        """Reduce the gradients that backward passes have left, and add them to those of the shards."""
        self.fresh = False
        left: list[tuple[Unit, Managed, Array]] = []
        for unit in reversed(self._units):
            for parameter in unit.parameters:
                gradient, parameter.collected = parameter.collected, None
                if gradient is not None:
                    left.append((unit, parameter, unit.in_reduced_type(gradient)))
        for rows in _different(parameter.rows for _, parameter, _ in left):
            if rows is not None:
                own = [gradient for _, parameter, gradient in left if parameter.rows is rows]
                sums = rows.reduce_scatter(_together(own, rows.size))
                pieces = iter(_apart(sums, [gradient.size // rows.size for gradient in own]))
                left = [
                    (
                        unit,
                        parameter,
                        next(pieces).reshape(-1) / unit.divisor(rows) if parameter.rows is rows else gradient,
                    )
                    for unit, parameter, gradient in left
                ]
        for group in _different(group for _, parameter, _ in left for group in parameter.copies):
            sums = group.all_reduce(
                _together([gradient for _, parameter, gradient in left if group in parameter.copies], 1)
            )
            pieces = iter(_apart(sums, [gradient.size for _, parameter, gradient in left if group in parameter.copies]))
            left = [
                (
                    unit,
                    parameter,
                    next(pieces).reshape(-1) / unit.divisor(group) if group in parameter.copies else gradient,
                )
                for unit, parameter, gradient in left
            ]
        for unit, parameter, gradient in left:
            unit.add(parameter.shard, gradient.reshape(parameter.shard.local_shape))


def _together(arrays: Sequence[Array], parts: int) -> Array:
    """Arrays in one, (parts, sum of their sizes / parts): of each as many equal parts of its rows."""
    return np.concatenate([array.reshape(parts, -1) for array in arrays], axis=1)


def _apart(together: Array, sizes: Sequence[int]) -> list[Array]:
    """(parts, …) as one for each size, (parts, size)."""
    return np.split(together, np.cumsum(sizes)[:-1], axis=1)


def _different(groups: Iterable[Communicator | None]) -> list[Communicator | None]:
    """Each group once, in their order."""
    found: list[Communicator | None] = []
    for group in groups:
        if not any(group is other for other in found):
            found.append(group)
    return found


def _unmanaged(module: nn.Cell) -> Iterator[tuple[nn.Cell, str, Parameter]]:
    for _, cell in module.cells_and_names():
        for name, parameter in cell._params.items():
            if parameter is not None and not getattr(parameter, "_hsdp_param_initialized", False):
                yield cell, name, parameter


class HSDPModule:
    """What a module is an instance of once it is sharded."""

    hsdp_unit: Unit

    def set_reduce_op_type(self, reduce_op_type: str) -> None:
        if reduce_op_type not in ("sum", "avg"):
            raise ValueError(f"reduce op {reduce_op_type}")
        self.hsdp_unit.reduce_op = reduce_op_type

    def set_modules_to_forward_prefetch(self, modules: list[HSDPModule]) -> None:
        self.forward_prefetch = _checked(modules)

    def set_modules_to_backward_prefetch(self, modules: list[HSDPModule]) -> None:
        self.backward_prefetch = _checked(modules)

    def zero_grad(self) -> None:
        for unit in self._units():
            unit.zero_grad()

    def _units(self) -> Iterator[Unit]:
        return (cell.hsdp_unit for _, cell in self.cells_and_names() if isinstance(cell, HSDPModule))


def _checked(modules: Any) -> list[HSDPModule]:
    if not isinstance(modules, (list, tuple)) or not all(isinstance(module, HSDPModule) for module in modules):
        raise ValueError(f"modules to fetch have to be a list of sharded modules: {modules}")
    return list(modules)


def make_fully_shard(model: Units, backward: Backward):
    """`fully_shard` of the modules of one model."""

    def fully_shard(
        module, *, mesh=None, reshard_after_forward=True, shard_placement_fn=None, mp_policy=MixedPrecisionPolicy(),
        offload_policy=OffloadPolicy(), ignored_params=None, replicate_params=None, comm_fusion=False,
        comm_fusion_zero_copy=None,
    ):  # fmt: skip
        if (
            shard_placement_fn
            or ignored_params
            or comm_fusion
            or comm_fusion_zero_copy
            or not isinstance(mesh, DeviceMesh)
        ):
            raise NotImplementedError("fully_shard without a mesh, with placements, ignored parameters or fusion")
        if not isinstance(module, nn.Cell) or isinstance(module, HSDPModule) or mesh.ndim > 2:
            raise ValueError(f"fully_shard of {type(module).__name__} on a mesh of {mesh.mesh_dim_names}")
        unit = Unit(
            module,
            mesh,
            mp_policy,
            replicate_params or (),
            model,
            backward,
            reshard_after_forward=reshard_after_forward,
        )
        module.__class__ = type(f"HSDP{type(module).__name__}", (HSDPModule, type(module)), {})
        module.hsdp_unit = unit
        return module

    return fully_shard
