"""Rotary position embedding, half-split layout: dimension i turns together with dimension i + D/2."""

from __future__ import annotations

from typing import Any

import numpy as np
from attrs import field, frozen
from mindspore import Tensor
from mindspore.common import _Function


@frozen(eq=False)
class RotaryTable:
    """Cosines and sines (B, S, 1, D/2), float64, and the copies in other dtypes that were asked for."""

    cos: np.ndarray
    sin: np.ndarray
    _cast: dict[np.dtype, tuple[np.ndarray, np.ndarray]] = field(factory=dict, init=False, repr=False)

    def in_dtype(self, dtype: np.dtype) -> tuple[np.ndarray, np.ndarray]:
        """(cos, sin) rounded to `dtype`."""
        if dtype not in self._cast:
            self._cast[dtype] = (self.cos.astype(dtype), self.sin.astype(dtype))
        return self._cast[dtype]


def rotary_table(position_ids: np.ndarray, *, head_dim: int, theta: float) -> RotaryTable:
    """See `Kernels.rotary_table`. Angles are float64: at large positions float32 loses their fraction."""
    if head_dim % 2:
        raise ValueError(
            f"rotary_table: head_dim {head_dim} is odd; dimensions turn in pairs, so it has to be even; "
            f"use {head_dim + 1}"
        )
    frequencies = theta ** (-np.arange(0, head_dim, 2) / head_dim)
    angles = np.asarray(position_ids, np.float64)[:, :, None, None] * frequencies
    return RotaryTable(np.cos(angles), np.sin(angles))


def _turn(x: np.ndarray, cos: np.ndarray, sin: np.ndarray, *, back: bool) -> np.ndarray:
    half = x.shape[-1] // 2
    first, second = x[..., :half], x[..., half:]
    turned = np.empty_like(x)
    part = first * sin
    np.multiply(first, cos, out=turned[..., :half])
    np.multiply(second, cos, out=turned[..., half:])
    if back:
        turned[..., half:] -= part
        turned[..., :half] += np.multiply(second, sin, out=part)
    else:
        turned[..., half:] += part
        turned[..., :half] -= np.multiply(second, sin, out=part)
    return turned


class _Rotary(_Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, table: RotaryTable) -> Tensor:
        ctx.table = table
        x_bshd = x.asnumpy()
        return Tensor.from_numpy(_turn(x_bshd, *table.in_dtype(x_bshd.dtype), back=False))

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        dy_bshd = dy.asnumpy()
        return Tensor.from_numpy(_turn(dy_bshd, *ctx.table.in_dtype(dy_bshd.dtype), back=True)), None


def rotary(x: Tensor, table: RotaryTable) -> Tensor:
    """See `Kernels.rotary`."""
    return _Rotary.apply(x, table)
