"""Products with a weight matrix, always as two-dimensional BLAS calls, by itself or with the ranks that share it.

The product that gives the weight its gradient can be put off: see `kernels/later.py`.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
from device_mesh import Communicator
from mindspore import Tensor
from mindspore.common import _Function

from parallel_trainer.kernels import later


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
            d_weight = later.gradient(weight, partial(_product, dy, x))
        if bias_needed:
            d_bias = Tensor.from_numpy(dy_rows.sum(axis=0))
        return dx, d_weight, d_bias


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """See `Kernels.linear`."""
    return _Linear.apply(x, weight, bias)


class _LinearReduceScatter(_Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, group: Communicator) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.group = group
        return Tensor.from_numpy(group.reduce_scatter(np.matmul(x.asnumpy(), weight.asnumpy().T)))

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor | None, None]:
        x_tensor, weight_tensor = ctx.saved_tensors
        x, weight, own = (tensor.asnumpy() for tensor in (x_tensor, weight_tensor, dy))
        products = later.running()
        if products is not None:
            gathered = ctx.group.all_gather(own)
            products.add(weight_tensor, partial(_product, Tensor.from_numpy(gathered), x_tensor))
            return Tensor.from_numpy(np.matmul(gathered, weight)), None, None
        gathered = np.empty((len(x), own.shape[1]), own.dtype)
        # Under way during the work that this rank's own tokens make possible.
        request = ctx.group.iall_gather(own, out=gathered)
        first, stop = len(own) * ctx.group.rank, len(own) * (ctx.group.rank + 1)
        d_weight = weight_gradient(own, x[first:stop])
        request.wait()
        dx = np.matmul(gathered, weight)
        for others in (slice(0, first), slice(stop, len(x))):
            if others.start < others.stop:
                d_weight += weight_gradient(gathered[others], x[others])
        return Tensor.from_numpy(dx), Tensor.from_numpy(d_weight), None


def linear_reduce_scatter(x: Tensor, weight: Tensor, group: Communicator) -> Tensor:
    """See `Kernels.linear_reduce_scatter`."""
    return _LinearReduceScatter.apply(x, weight, group)


def weight_gradient(dy: np.ndarray, x: np.ndarray) -> np.ndarray:
    """What tokens with inputs x (T, in) and output gradients dy (T, out) add to a weight's gradient, (out, in)."""
    return np.matmul(dy.T, x)


def _product(dy: Tensor, x: Tensor) -> np.ndarray:
    """`weight_gradient` of tensors of any dimensions, (..., out) and (..., in)."""
    return weight_gradient(dy.asnumpy().reshape(-1, dy.shape[-1]), x.asnumpy().reshape(-1, x.shape[-1]))
