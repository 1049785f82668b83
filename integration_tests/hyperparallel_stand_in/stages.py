"""Pipeline stages, and the order in which their schedules run them."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from typing import Any, ClassVar, Literal

import mindspore as ms
import numpy as np
from device_mesh import Communicator, Request
from mindspore import Tensor, nn, ops

from hyperparallel_stand_in.backward import Backward
from hyperparallel_stand_in.meshes import DeviceMesh, Groups
from hyperparallel_stand_in.tensors import DTensor, Replicate, local_part


class PipelineStage:
    """A chunk of a model: what it gets from the stage before, as positional arguments, and gives to the one after.

    Keyword arguments are those of the micro-batch, on every stage. The last stage returns the loss.
    """

    groups: ClassVar[Groups]
    backward: ClassVar[Backward]

    def __init__(
        self, submodule, stage_index, stage_num, device=None, group=None, src_stage=None, dst_stage=None,
        dyn_shape=False, has_backward=True, shared_parameters=None, mesh=None,
    ) -> None:  # fmt: skip
        if src_stage or dst_stage or dyn_shape or shared_parameters or not has_backward or device != "npu":
            raise NotImplementedError("a stage with other arguments than its place, device, group and mesh")
        self.submodule, self.stage_index, self.stage_num, self.mesh = submodule, stage_index, stage_num, mesh
        self.group: Communicator = self.groups.of(group)
        if (self.group.rank, self.group.size) != (mesh.get_local_rank(), mesh.size()):
            raise ValueError(f"{group} and a mesh of ranks {mesh.rank_list}")
        submodule.set_grad(True)
        self.sent: list[Request] = []
        self._inputs: dict[int, list[Tensor]] = {}
        self._outputs: dict[int, Any] = {}
        self._received: list[Any] = []

    @property
    def is_first_stage(self) -> bool:
        return self.stage_index == 0

    @property
    def is_last_stage(self) -> bool:
        return self.stage_index == self.stage_num - 1

    def get_last_stage_sens(self, last_stage_outputs: Any) -> Any:
        """Ones, divided among the ranks that have the same loss."""
        outputs = _several(last_stage_outputs)
        seeds = []
        for output in outputs:
            copies = 1
            if isinstance(output, DTensor):
                axes = [axis for axis, placement in enumerate(output.placements) if placement == Replicate()]
                copies = int(np.prod([output.device_mesh.size(axis) for axis in axes]))
            seeds.append(ops.full_like(local_part(output), 1 / copies))
        return seeds if isinstance(last_stage_outputs, (tuple, list)) else seeds[0]

    def forward_one_chunk(
        self, micro_index: int, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if self.is_first_stage:
            inputs: list[Any] = list(args)
        else:
            inputs = self._receive_outputs(micro_index)
            self._inputs[micro_index] = inputs
        output = self.submodule(*inputs, **(kwargs or {}))
        self._outputs[micro_index] = output
        if not self.is_last_stage:
            self._send_outputs(micro_index, _several(output))
        return output

    def backward_one_chunk(self, micro_index: int) -> None:
        output = self._outputs.pop(micro_index)
        outputs = [local_part(each) for each in _several(output)]
        if self.is_last_stage:
            seeds = _several(self.get_last_stage_sens(output))
        else:
            outputs = [each for each in outputs if each._requires_grad]
            seeds = [self._receive(each.asnumpy(), micro_index, self.stage_index, "backward") for each in outputs]
        self.backward.run(outputs, seeds)
        for received in self._inputs.pop(micro_index, ()):
            local = local_part(received)
            if local._requires_grad:
                found = np.zeros_like(local.asnumpy()) if local._grad is None else local._grad.asnumpy()
                self._send(found, micro_index, self.stage_index - 1, "backward")

    def _get_layout_rank_list(self, layout: Any, *sender: Any) -> Any:
        """The ranks of a received tensor's mesh, looked up in the root of the mesh: here a flat world."""
        raise KeyError(f"axes {layout.alias_name} of a root mesh (world,)")

    def _send_outputs(self, micro_index: int, outputs: list[Any]) -> None:
        if micro_index == 0:
            described = pickle.dumps([_described(each) for each in outputs])
            self._send(np.array([len(described)]), 0, self.stage_index, "description")
            self._send(np.frombuffer(described, np.uint8), 0, self.stage_index, "description")
        for each in outputs:
            self._send(local_part(each).asnumpy(), micro_index, self.stage_index, "forward")

    def _receive_outputs(self, micro_index: int) -> list[Any]:
        before = self.stage_index - 1
        if micro_index == 0:
            length = int(self._receive(np.empty(1, np.int64), 0, before, "description").asnumpy()[0])
            described = self._receive(np.empty(length, np.uint8), 0, before, "description").asnumpy()
            self._received = pickle.loads(described.tobytes())
        found = []
        for shape, dtype, requires_grad, layout in self._received:
            local = self._receive(np.empty(shape, dtype), micro_index, before, "forward")
            local._requires_grad = requires_grad
            if layout is None:
                found.append(local)
            else:
                ranks = self._get_layout_rank_list(layout)
                mesh = DeviceMesh(self.groups, np.array(ranks).reshape(layout.mesh_shape), layout.alias_name)
                found.append(DTensor.from_local(local, mesh, layout.placements))
        return found

    def _send(self, values: Any, micro_index: int, sender: int, kind: str) -> None:
        """Between the stages `sender` and the next."""
        stage = sender if kind == "backward" else sender + 1
        values = np.array(values, order="C")
        self.sent.append(self.group.isend(values, stage % self.group.size, tag=self._tag(micro_index, sender, kind)))

    def _receive(self, like: Any, micro_index: int, sender: int, kind: str) -> Tensor:
        stage = sender + 1 if kind == "backward" else sender
        found = self.group.recv(np.empty_like(like), stage % self.group.size, tag=self._tag(micro_index, sender, kind))
        return Tensor(found)

    def _tag(self, micro_index: int, sender: int, kind: str) -> int:
        return 3 * (micro_index * self.stage_num + sender) + ("forward", "backward", "description").index(kind)


class Layout:
    """What a stage says about a distributed tensor that it sends."""

    def __init__(self, tensor: DTensor) -> None:
        self.alias_name = tensor.device_mesh.mesh_dim_names
        self.mesh_shape = tensor.device_mesh.mesh_shape
        self.placements = tensor.placements


def _described(output: Any) -> tuple[Any, ...]:
    local = local_part(output)
    layout = Layout(output) if isinstance(output, DTensor) else None
    return tuple(local.shape), ms.dtype_to_nptype(local.dtype), bool(local._requires_grad), layout


def _several(outputs: Any) -> list[Any]:
    return list(outputs) if isinstance(outputs, (tuple, list)) else [outputs]


Order = Iterator[tuple[Literal["F", "B"], int, int]]
"""Forward or backward, the chunk, the micro-batch."""


class _Schedule:
    def __init__(self, stages: Any, micro_batch_num: int, *unmodelled: Any) -> None:
        if any(each is not None and each is not False for each in unmodelled):
            raise NotImplementedError("batch dimensions of one's own, concatenated outputs, swapping")
        self.stages: list[PipelineStage] = list(stages) if isinstance(stages, (list, tuple)) else [stages]
        self.micro_batch_num = micro_batch_num
        self.ranks = self.stages[0].group.size
        self.rank = self.stages[0].stage_index % self.ranks

    def order(self) -> Order:
        raise NotImplementedError

    def run(self, *args: Any, **kwargs: Any) -> list[Any]:
        """Forward and backward of all micro-batches; on the rank of the last stage their losses, in that order."""
        parts = [
            (tuple(self._part(value, number) for value in args), {k: self._part(v, number) for k, v in kwargs.items()})
            for number in range(self.micro_batch_num)
        ]
        losses = []
        for what, chunk, micro in self.order():
            stage = self.stages[chunk]
            if what == "B":
                stage.backward_one_chunk(micro)
                continue
            output = stage.forward_one_chunk(micro, *parts[micro])
            if stage.is_last_stage:
                losses.append(output)
        for stage in self.stages:
            for request in stage.sent:
                request.wait()
            stage.sent.clear()
        self.stages[0].backward.units.reduce()
        return losses

    def _part(self, value: Any, number: int) -> Any:
        """A micro-batch's equal part of rows; what is no tensor goes to all."""
        if isinstance(value, DTensor):
            return DTensor.from_local(self._part(value.to_local(), number), value.device_mesh, value.placements)
        if not isinstance(value, Tensor):
            return value
        if value.ndim == 0 or value.shape[0] % self.micro_batch_num:
            raise ValueError(f"shape {tuple(value.shape)} does not split into {self.micro_batch_num} micro-batches")
        rows = value.shape[0] // self.micro_batch_num
        return value[number * rows : (number + 1) * rows]


class Schedule1F1B(_Schedule):
    """Backward as soon as possible; one stage a rank."""

    def __init__(
        self, stages, micro_batch_num, args_batch_dim=None, kwargs_batch_dim=None, output_concat_dim=None, swap=False
    ) -> None:
        super().__init__(stages, micro_batch_num, args_batch_dim, kwargs_batch_dim, output_concat_dim, swap)
        if len(self.stages) != 1:
            raise ValueError(f"1F1B with {len(self.stages)} stages on a rank")

    def order(self) -> Order:
        ahead = min(self.ranks - 1 - self.rank, self.micro_batch_num)
        yield from (("F", 0, micro) for micro in range(ahead))
        for micro in range(ahead, self.micro_batch_num):
            yield "F", 0, micro
            yield "B", 0, micro - ahead
        yield from (("B", 0, micro) for micro in range(self.micro_batch_num - ahead, self.micro_batch_num))


class ScheduleGPipe(_Schedule):
    """All forwards, then all backwards; one stage a rank."""

    def __init__(
        self, stages, micro_batch_num, args_batch_dim=None, kwargs_batch_dim=None, output_concat_dim=None, swap=False
    ) -> None:
        super().__init__(stages, micro_batch_num, args_batch_dim, kwargs_batch_dim, output_concat_dim, swap)
        if len(self.stages) != 1:
            raise ValueError(f"GPipe with {len(self.stages)} stages on a rank")

    def order(self) -> Order:
        yield from (("F", 0, micro) for micro in range(self.micro_batch_num))
        yield from (("B", 0, micro) for micro in range(self.micro_batch_num))


class ScheduleInterleaved1F1B(_Schedule):
    """1F1B with several chunks a rank, whose virtual stages are dealt out in rounds. Overlap changes no order here."""

    def __init__(
        self, stages, micro_batch_num, args_batch_dim=None, kwargs_batch_dim=None, output_concat_dim=None, swap=False,
        overlap_p2p=False, overlap_b_f=False, enable_dxdw_split=False, p2p_transport="auto",
    ) -> None:  # fmt: skip
        super().__init__(stages, micro_batch_num, args_batch_dim, kwargs_batch_dim, output_concat_dim, swap)
        if enable_dxdw_split or p2p_transport not in ("auto", "plain", "batch", "boundary", "multi_stream"):
            raise NotImplementedError(f"enable_dxdw_split {enable_dxdw_split}, p2p_transport {p2p_transport}")

    def order(self) -> Order:
        micros, ranks, chunks = self.micro_batch_num, self.ranks, len(self.stages)
        rounds = max(1, micros // ranks)
        sizes = [micros] if micros < ranks else [
            ranks + micros % ranks // rounds + (number < micros % ranks % rounds) for number in range(rounds)
        ]  # fmt: skip
        forward = [
            (chunk, sum(sizes[:number]) + micro)
            for number, size in enumerate(sizes)
            for chunk in range(chunks)
            for micro in range(size)
        ]
        backward = [(chunks - 1 - chunk, micro) for chunk, micro in forward]
        ahead = min((chunks - 1) * sizes[0] + 2 * (ranks - 1 - self.rank), len(forward))
        yield from (("F", *each) for each in forward[:ahead])
        for one, other in zip(forward[ahead:], backward, strict=False):
            yield "F", *one
            yield "B", *other
        yield from (("B", *each) for each in backward[len(forward) - ahead :])


class CheckpointWrapper(nn.Cell):
    """A module whose activations are computed again in the backward pass. Its attributes are found as its own."""

    def __init__(self, module: nn.Cell, early_stop: bool) -> None:
        super().__init__(auto_prefix=False)
        self._ckpt_wrapped_module, self._early_stop = module, early_stop

    def construct(self, *arguments: Any, **keywords: Any) -> Any:
        return ms.recompute(
            self._ckpt_wrapped_module, *arguments, use_reentrant=False, early_stop=self._early_stop, **keywords
        )

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "_ckpt_wrapped_module":
                raise
            return getattr(self._ckpt_wrapped_module, name)


def checkpoint_wrapper(
    module, swap_inputs=False, policy_fn=None, context_fn=None, group_swap=None, early_stop=True
) -> CheckpointWrapper:  # fmt: skip
    if swap_inputs or policy_fn or context_fn or group_swap:
        raise NotImplementedError("recomputation with a policy or with swapping")
    return CheckpointWrapper(module, early_stop)
