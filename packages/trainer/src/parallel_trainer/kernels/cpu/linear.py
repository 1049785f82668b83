"""Products with a weight matrix, always as two-dimensional BLAS calls."""

from __future__ import annotations

from typing import Any

import numpy as np
from mindspore import Tensor
from mindspore.common import _Function


class _Linear(_Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        x_rows = x.asnumpy().reshape(-1, x.shape[-1])
        y = np.matmul(x_rows, weight.asnumpy().T)
        if bias is not None:
            y += bias.asnumpy()
        return Tensor.from_numpy(y.reshape(*x.shape[:-1], y.shape[-1]))

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        x_needed, weight_needed, bias_needed = ctx.needs_input_grad
        dy_rows = dy.asnumpy().reshape(-1, dy.shape[-1])
        dx = d_weight = d_bias = None
        if x_needed:
            dx = Tensor.from_numpy(np.matmul(dy_rows, weight.asnumpy()).reshape(x.shape))
        if weight_needed:
            d_weight = Tensor.from_numpy(np.matmul(dy_rows.T, x.asnumpy().reshape(-1, x.shape[-1])))
        if bias_needed:
            d_bias = Tensor.from_numpy(dy_rows.sum(axis=0))
        return dx, d_weight, d_bias


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """See `Kernels.linear`."""
    return _Linear.apply(x, weight, bias)
