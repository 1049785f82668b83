"""Backward passes: `Tensor.backward` and `.grad` as HyperParallel gives them to MindSpore, and what units do then.

A unit's weights are whole again while gradients are computed, and its gradients are reduced afterwards. In the library
each does that when its turn comes; here all do it at the ends of the pass, in the same order on every rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from attrs import define
from mindspore import Tensor, ops
from mindspore._c_expression import TensorPy, run_backward
from mindspore.graph.api import _pynative_executor

from hyperparallel_stand_in.tensors import DTensor, local_part


class Units(Protocol):
    """All that `fully_shard` has made of a model, as far as a backward pass is concerned."""

    def show_whole(self) -> None: ...

    def show_shards(self) -> None: ...

    def collect(self) -> None: ...

    def reduce(self) -> None: ...


@define(eq=False)
class Backward:
    """What runs backward passes on a rank.

    running: whether a pass is under way, where a module that computes again must not touch its weights.
    """

    units: Units
    running: bool = False

    def run(self, outputs: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
        """Add to the gradients of all leaves; units are not reduced."""
        self.units.show_whole()
        self.running = True
        try:
            run_backward(
                tuple(outputs), tuple(gradients), False, False, (), allow_unreachable=True, accumulate_grad=True
            )
        finally:
            self.running = False
        self.units.collect()
        self.units.show_shards()


def checked_gradient(output: Tensor, gradient: Any) -> Tensor:
    """The gradient to start from. Raises TypeError for a number: the library takes tensors, or None for one element."""
    if gradient is None:
        if output.size != 1:
            raise RuntimeError(f"a gradient is needed for an output of shape {tuple(output.shape)}")
        return ops.ones_like(output)
    if not isinstance(gradient, TensorPy):
        raise TypeError(f"gradients can be Tensors or None, and this is a {type(gradient).__name__}")
    gradient = local_part(gradient)
    if tuple(gradient.shape) != tuple(output.shape) or gradient.dtype != output.dtype:
        raise RuntimeError(
            f"gradient {tuple(gradient.shape)} {gradient.dtype} of output {tuple(output.shape)} {output.dtype}"
        )
    return gradient


def make_enable(backward: Backward):
    """`enable_mindspore_backward_compat` of a rank whose passes are run by `backward`."""

    def tensor_backward(self, gradient=None, retain_graph=None, create_graph=False, inputs=None) -> None:
        if retain_graph or create_graph or inputs is not None:
            raise NotImplementedError("backward with retain_graph, create_graph or inputs")
        output = local_part(self)
        backward.run([output], [checked_gradient(output, gradient)])
        backward.units.reduce()

    def get_grad(self) -> Tensor | None:
        found = self._grad
        return found if getattr(self, "_distributed_grad", None) is None else self._distributed_grad

    def set_grad(self, value: Tensor | None) -> None:
        self._distributed_grad = value if isinstance(value, DTensor) else None
        self._grad = local_part(value)

    def set_requires_grad(self, value: bool) -> None:
        self._requires_grad = value

    def enable_mindspore_backward_compat() -> None:
        _pynative_executor.set_grad_flag(True)
        TensorPy.backward = tensor_backward
        TensorPy.grad = property(get_grad, set_grad)
        TensorPy.requires_grad = property(lambda self: self._requires_grad, set_requires_grad)

    return enable_mindspore_backward_compat
