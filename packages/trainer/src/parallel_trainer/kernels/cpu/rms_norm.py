"""Root-mean-square normalisation over the last dimension."""

from __future__ import annotations

from typing import Any

import numpy as np
from mindspore import Tensor
from mindspore.common import _Function


class _RmsNorm(_Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        x_rows = x.asnumpy().reshape(-1, x.shape[-1])
        mean_square = np.einsum("ij,ij->i", x_rows, x_rows) / x_rows.shape[1]
        inverse_rms = (1 / np.sqrt(mean_square + eps)).astype(x_rows.dtype)[:, None]
        y = x_rows * inverse_rms
        y *= weight.asnumpy()
        ctx.save_for_backward(x, weight)
        ctx.inverse_rms = inverse_rms
        return Tensor.from_numpy(y.reshape(x.shape))

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor | None, None]:
        x, weight = ctx.saved_tensors
        dy_rows = dy.asnumpy().reshape(-1, dy.shape[-1])
        x_hat = x.asnumpy().reshape(dy_rows.shape) * ctx.inverse_rms
        d_weight = Tensor.from_numpy(np.einsum("ij,ij->j", dy_rows, x_hat)) if ctx.needs_input_grad[1] else None
        dx = dy_rows * weight.asnumpy()
        x_hat *= np.einsum("ij,ij->i", dx, x_hat)[:, None] / dx.dtype.type(dx.shape[1])
        dx -= x_hat
        dx *= ctx.inverse_rms
        return Tensor.from_numpy(dx.reshape(x.shape)), d_weight, None


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See `Kernels.rms_norm`."""
    return _RmsNorm.apply(x, weight, eps)
