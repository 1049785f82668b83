"""SwiGLU: the gated activation of the feed-forward part."""

from __future__ import annotations

from typing import Any

import numpy as np
from mindspore import Tensor
from mindspore.common import _Function


def _sigmoid(x: np.ndarray) -> np.ndarray:
    # exp overflows to infinity for x below -88 (float32), and 1 / infinity is the right answer.
    with np.errstate(over="ignore"):
        y = np.exp(np.negative(x))
    y += 1
    return np.reciprocal(y, out=y)


class _SwiGLU(_Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        gate_values = gate.asnumpy()
        sigmoid = _sigmoid(gate_values)
        ctx.save_for_backward(gate, up)
        ctx.sigmoid = sigmoid
        y = gate_values * sigmoid
        y *= up.asnumpy()
        return Tensor.from_numpy(y)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = (tensor.asnumpy() for tensor in ctx.saved_tensors)
        dy_values, sigmoid = dy.asnumpy(), ctx.sigmoid
        # silu = gate * sigmoid, and its derivative is sigmoid + silu * (1 - sigmoid).
        silu = gate * sigmoid
        d_up = dy_values * silu
        d_gate = 1 - sigmoid
        d_gate *= silu
        d_gate += sigmoid
        d_gate *= up
        d_gate *= dy_values
        return Tensor.from_numpy(d_gate), Tensor.from_numpy(d_up)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """See `Kernels.swiglu`."""
    return _SwiGLU.apply(gate, up)
