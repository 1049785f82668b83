"""Context parallelism: hooks on the core of attention that bring queries, keys and values where they are needed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from attrs import define
from device_mesh.autograd import start_all_to_all
from mindspore import Tensor, nn

from hyperparallel_stand_in.meshes import DeviceMesh
from hyperparallel_stand_in.tensors import DTensor, Replicate, Shard, local_part


@define(eq=False)
class ContextParallel:
    """A style that is applied to the core of attention, called with (query, key, value, …).

    Among `ulysses_degree` neighbours (None: all ranks) parts of the sequence are exchanged for heads, and over the
    other axis keys and values are gathered; the core gets DTensors. Its output goes back where the query was.
    """

    seq_dim: int = 1
    head_dim: int = 2
    ulysses_degree: int | None = None
    qkv_indices: tuple[int, ...] = (0, 1, 2)
    qkv_kwarg_names: tuple[str, ...] = ()
    use_local_output: bool = False
    load_balance: bool = False

    def __attrs_post_init__(self) -> None:
        if self.qkv_indices != (0, 1, 2) or self.qkv_kwarg_names or self.use_local_output or self.load_balance:
            raise NotImplementedError("context parallelism with other arguments than dimensions and the Ulysses degree")

    def apply(self, module: nn.Cell, device_mesh: DeviceMesh) -> nn.Cell:
        self._hook(module, self._mesh(device_mesh), lambda tensors, start: [start(each)() for each in tensors])
        return module

    def _mesh(self, mesh: DeviceMesh) -> DeviceMesh:
        """Where keys are gathered by where heads are exchanged."""
        inner = mesh.size() if self.ulysses_degree is None else self.ulysses_degree
        if mesh.ndim != 1 or mesh.size() % inner:
            raise ValueError(f"Ulysses degree {inner} over {mesh.mesh_dim_names} of {mesh.size()} ranks")
        return DeviceMesh(mesh.groups, mesh.ranks.reshape(-1, inner), ("co", "ds"))

    def _hook(
        self,
        module: nn.Cell,
        mesh: DeviceMesh,
        exchanged: Callable[[tuple[Tensor, ...], Callable[[Tensor], Callable[[], Tensor]]], list[Tensor]],
    ) -> None:
        sequence, heads = Shard(self.seq_dim), Shard(self.head_dim)

        def before(_: nn.Cell, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
            if any(isinstance(each, DTensor) or not isinstance(each, Tensor) for each in arguments[:3]):
                raise NotImplementedError("queries, keys and values have to be tensors that are not distributed")
            query, *others = (
                DTensor.from_local(each, mesh, (sequence, heads))
                for each in exchanged(arguments[:3], lambda each: self._start(each, mesh))
            )
            if mesh.size("co") > 1:
                others = [each.redistribute(mesh, (Replicate(), heads)) for each in others]
            return (query, *others, *arguments[3:]), keywords

        def after(_: nn.Cell, arguments: Any, output: Any) -> Any:
            inner = mesh["ds"]
            if inner.size() == 1:
                return output
            found = DTensor.from_local(local_part(output), inner, (heads,))
            return found.redistribute(inner, (sequence,))

        module.register_forward_pre_hook(before, with_kwargs=True)
        module.register_forward_hook(after)

    def _start(self, x: Tensor, mesh: DeviceMesh) -> Callable[[], Tensor]:
        inner = mesh.communicator("ds")
        if x.shape[self.head_dim] % inner.size:
            raise ValueError(f"{x.shape[self.head_dim]} heads over {inner.size} ranks")
        return start_all_to_all(x, inner, split_dim=self.head_dim, concat_dim=self.seq_dim)


class AsyncContextParallel(ContextParallel):
    """The same, started when the modules that make queries, keys and values return, and waited for by the core."""

    def apply(
        self,
        module: nn.Cell,
        device_mesh: DeviceMesh,
        q_proj: nn.Cell | None = None,
        k_proj: nn.Cell | None = None,
        v_proj: nn.Cell | None = None,
    ) -> nn.Cell:
        producers = (q_proj, k_proj, v_proj)
        if None in producers or self.ulysses_degree == 1:
            raise NotImplementedError("asynchronous context parallelism without producers or without heads exchanged")
        mesh, begun = self._mesh(device_mesh), {}

        def starts(place: int) -> Callable[..., None]:
            def after(_: nn.Cell, arguments: Any, output: Any) -> None:
                begun[place] = output, self._start(output, mesh)

            return after

        def taken(tensors: tuple[Tensor, ...], _: Any) -> list[Tensor]:
            for place, tensor in enumerate(tensors):
                if begun[place][0] is not tensor:
                    raise ValueError(f"something stands between producer {place} and the core, and would be left out")
            return [begun.pop(place)[1]() for place in range(len(tensors))]

        for place, producer in enumerate(producers):
            producer.register_forward_hook(starts(place))
        self._hook(module, mesh, taken)
        return module
