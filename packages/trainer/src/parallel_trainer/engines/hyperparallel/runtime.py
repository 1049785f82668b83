"""What runs beside HyperParallel's calls: where parameters start, seeds of the backward, the gradient norm."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from mindspore import Tensor, mint, ops

from parallel_trainer.engines.hyperparallel.modules import local
from parallel_trainer.optim.gradient_norm import clip_coefficient


def scaled_stage(stage: Any, *, loss_scale: float, tp: Any = None) -> Any:
    """A pipeline stage whose loss goes back multiplied by `loss_scale`, from every rank that has it.

    The stage's own seed is 1, but for a loss that several ranks have whole 1 over their number: `loss_scale` counts
    these ranks already.

    tp: the mesh of tensor parallelism, where there is one. A stage looks for the ranks of a tensor that it receives
        in the root of its mesh, and a world that was cut into views has no axis called tp.
    """

    class ScaledStage(stage):
        def get_last_stage_sens(self, last_stage_outputs: Any) -> Any:
            several = isinstance(last_stage_outputs, (list, tuple))
            outputs = last_stage_outputs if several else [last_stage_outputs]
            seeds = [ops.full_like(local(output), loss_scale) for output in outputs]
            return seeds if several else seeds[0]

        def _get_layout_rank_list(self, layout: Any, *sender: Any) -> Any:
            axes = [name for name in getattr(layout, "alias_name", ()) or () if name != "pp"]
            if tp is not None and axes == ["tp"]:
                return tuple(tp.rank_list)
            return super()._get_layout_rank_list(layout, *sender)

    return ScaledStage


def backward(loss: Any, seed: float) -> None:
    """Go back from a loss whose gradient is `seed`: MindSpore's tensors want it as one of them."""
    loss.backward(ops.full_like(local(loss), seed))


def squared_norm(chunks: Sequence[Any], divisors: Mapping[str, int]) -> Tensor:
    """The squares of this rank's gradients, float32 (1,), each divided by the ranks that hold the same element.

    divisors: those ranks by the parameter's name, with * for a layer's number.
    """
    total = mint.zeros((1,))
    for name, gradient in _gradients(chunks):
        values = gradient.astype("float32")
        total = total + (values * values).sum() / divisors[re.sub(r"\.layers\.\d+\.", ".layers.*.", name)]
    return total


def clip(chunks: Sequence[Any], squares: Tensor, *, max_norm: float) -> float:
    """Scale all gradients where their norm over all ranks, the root of `squares`, exceeds `max_norm`; returns it.

    A `max_norm` of 0 or less leaves them alone.
    """
    norm = float(np.sqrt(squares.asnumpy()[0]))
    factor = clip_coefficient(norm, max_norm)
    if factor < 1:
        for _, gradient in _gradients(chunks):
            gradient.copy_(gradient * factor)  # mul_ leaves it as it is on a CPU
    return norm


def gradient_of(parameter: Any) -> Any:
    """This rank's part of a gradient, None without; with a policy that adds up in float32 it is in `main_grad`."""
    gradient = getattr(parameter, "main_grad", None)
    if gradient is None:
        gradient = getattr(parameter, "grad", None)
    return None if gradient is None else local(gradient)


def named_parameters(chunks: Sequence[Any]) -> Iterator[tuple[str, Any]]:
    """The parameters of chunks by the names that weights have, whatever modules are wrapped in."""
    for chunk in chunks:
        for name, parameter in chunk.parameters_and_names():
            yield name.replace("_ckpt_wrapped_module.", ""), parameter


def move_to(device: str, chunks: Sequence[Any]) -> None:
    """Bring parameters into the memory of `device`, "Ascend": fully_shard takes none that are elsewhere."""
    for _, parameter in named_parameters(chunks):
        parameter.data = parameter.to(device)


def _gradients(chunks: Sequence[Any]) -> Iterator[tuple[str, Tensor]]:
    for name, parameter in named_parameters(chunks):
        gradient = gradient_of(parameter)
        if gradient is not None:
            yield name, gradient
