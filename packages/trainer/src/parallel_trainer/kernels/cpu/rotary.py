"""Rotary position embedding: pairs of dimensions turn by an angle that grows with the position."""

from __future__ import annotations

from typing import Any

import numpy as np
from attrs import field, frozen
from mindspore import Tensor
from mindspore.common import _Function

from parallel_trainer.kernels.checks import check_pairs


@frozen(eq=False)
class RotaryTable:
    """Cosines and sines (B, S, 1, pairs), float64, and the copies in other dtypes that were asked for."""

    cos: np.ndarray
    sin: np.ndarray
    _cast: dict[np.dtype, tuple[np.ndarray, np.ndarray]] = field(factory=dict, init=False, repr=False)

    def in_dtype(self, dtype: np.dtype) -> tuple[np.ndarray, np.ndarray]:
        """(cos, sin) rounded to `dtype`."""
        if dtype not in self._cast:
            self._cast[dtype] = (self.cos.astype(dtype), self.sin.astype(dtype))
        return self._cast[dtype]


def rotary_table(position_ids: np.ndarray, frequencies: np.ndarray, *, scale: float = 1.0) -> RotaryTable:
    """See `Kernels.rotary_table`. Angles are float64: at large positions float32 loses their fraction."""
    angles = np.asarray(position_ids, np.float64)[:, :, None, None] * np.asarray(frequencies, np.float64)
    return RotaryTable(scale * np.cos(angles), scale * np.sin(angles))


def _pairs(x: np.ndarray, pairs: int, interleaved: bool) -> tuple[np.ndarray, np.ndarray]:
    """The first and the second dimension of each pair among the last 2·pairs of x, as views."""
    turning = x[..., x.shape[-1] - 2 * pairs :]
    return (turning[..., ::2], turning[..., 1::2]) if interleaved else (turning[..., :pairs], turning[..., pairs:])


def _turn(x: np.ndarray, table: RotaryTable, interleaved: bool, *, back: bool) -> np.ndarray:
    cos, sin = table.in_dtype(x.dtype)
    pairs = cos.shape[-1]
    turned = np.empty_like(x)
    still = x.shape[-1] - 2 * pairs
    turned[..., :still] = x[..., :still]
    (first, second), (turned_first, turned_second) = _pairs(x, pairs, interleaved), _pairs(turned, pairs, interleaved)
    part = first * sin
    np.multiply(first, cos, out=turned_first)
    np.multiply(second, cos, out=turned_second)
    if back:
        turned_second -= part
        turned_first += np.multiply(second, sin, out=part)
    else:
        turned_second += part
        turned_first -= np.multiply(second, sin, out=part)
    return turned


class _Rotary(_Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, table: RotaryTable, interleaved: bool) -> Tensor:
        ctx.table, ctx.interleaved = table, interleaved
        return Tensor.from_numpy(_turn(x.asnumpy(), table, interleaved, back=False))

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        return Tensor.from_numpy(_turn(dy.asnumpy(), ctx.table, ctx.interleaved, back=True)), None, None


def rotary(x: Tensor, table: RotaryTable, *, interleaved: bool = False) -> Tensor:
    """See `Kernels.rotary`."""
    check_pairs(table.cos.shape[-1], x.shape[-1])
    return _Rotary.apply(x, table, interleaved)
