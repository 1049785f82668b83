"""SwiGLU: the gated activation of the feed-forward part."""

from __future__ import annotations

from typing import Any

import numpy as np
from mindspore import Tensor
from mindspore.common import _Function


def sigmoid(x: np.ndarray) -> np.ndarray:
    """`1 / (1 + exp(-x))`, a new array."""
    # exp overflows to infinity for x below -88 (float32), and 1 / infinity is the right answer.
    with np.errstate(over="ignore"):
        y = np.exp(np.negative(x))
    y += 1
    return np.reciprocal(y, out=y)


def gated(gate: np.ndarray, gate_sigmoid: np.ndarray, up: np.ndarray) -> np.ndarray:
    """`gate * sigmoid(gate) * up`, a new array."""
    y = gate * gate_sigmoid
    y *= up
    return y


def gated_gradient(
    dy: np.ndarray,
    gate: np.ndarray,
    gate_sigmoid: np.ndarray,
    up: np.ndarray,
    *,
    d_gate: np.ndarray | None = None,
    d_up: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Gradients of `gated` for gate and up; into `d_gate` and `d_up` where given."""
    # silu = gate * sigmoid, and its derivative is sigmoid + silu * (1 - sigmoid).
    silu = gate * gate_sigmoid
    d_up = np.multiply(dy, silu, out=d_up)
    d_gate = np.subtract(1, gate_sigmoid, out=d_gate)
    d_gate *= silu
    d_gate += gate_sigmoid
    d_gate *= up
    d_gate *= dy
    return d_gate, d_up


class _SwiGLU(_Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        ctx.sigmoid = sigmoid(gate.asnumpy())
        return Tensor.from_numpy(gated(gate.asnumpy(), ctx.sigmoid, up.asnumpy()))

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = (tensor.asnumpy() for tensor in ctx.saved_tensors)
        d_gate, d_up = gated_gradient(dy.asnumpy(), gate, ctx.sigmoid, up)
        return Tensor.from_numpy(d_gate), Tensor.from_numpy(d_up)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """See `Kernels.swiglu`."""
    return _SwiGLU.apply(gate, up)
