"""Linear maps. The product that gives a weight its gradient can be put off: see `kernels/later.py`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from device_mesh import Communicator, autograd
from mindspore import Tensor, mint
from mindspore.common import _Function

from parallel_trainer.kernels import later
from parallel_trainer.kernels.ascend.tensors import wide


class _Linear(_Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        y = mint.matmul(_rows(x), mint.transpose(weight, 0, 1))
        if bias is not None:
            y = y + bias
        return y.reshape(*x.shape[:-1], y.shape[-1])

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        x_needed, weight_needed, bias_needed = ctx.needs_input_grad
        dx = d_weight = d_bias = None
        if x_needed:
            dx = mint.matmul(_rows(dy), weight).reshape(x.shape)
        if weight_needed:
            d_weight = gradient(weight, partial(_product, dy, x))
        if bias_needed:
            d_bias = mint.sum(wide(_rows(dy)), 0).astype(dy.dtype)
        return dx, d_weight, d_bias


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """See `Kernels.linear`. A weight that is float32 where activations are narrower, a router's, gives float32."""
    return _Linear.apply(x if x.dtype == weight.dtype else x.astype(weight.dtype), weight, bias)


def linear_reduce_scatter(x: Tensor, weight: Tensor, group: Communicator) -> Tensor:
    """See `Kernels.linear_reduce_scatter`. The ranks' products are added up in float32."""
    return autograd.reduce_scatter(linear(x, weight), group)


def gradient(weight: Tensor, product: Callable[[], Tensor]) -> Tensor | None:
    """For the backward of a kernel: the gradient of its weight, or None where the product is left for later."""
    products = later.running()
    if products is None:
        return product()
    products.add(weight, partial(_on_host, product))
    return None


def _on_host(product: Callable[[], Tensor]) -> np.ndarray:
    return wide(product()).asnumpy()


def _product(dy: Tensor, x: Tensor) -> Tensor:
    """What tokens with inputs x (..., in) and output gradients dy (..., out) add to a weight's gradient, (out, in)."""
    return mint.matmul(mint.transpose(_rows(dy), 0, 1), _rows(x))


def _rows(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])
