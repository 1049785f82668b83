"""Features of a token put beside each other, and taken apart again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from mindspore import Tensor
from mindspore.common import _Function

from parallel_trainer.kernels.checks import check_sizes


class _Split(_Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, sizes: tuple[int, ...]) -> tuple[Tensor, ...]:
        ctx.sizes = sizes
        parts = np.split(x.asnumpy(), np.cumsum(sizes)[:-1], axis=-1)
        return tuple(Tensor.from_numpy(np.ascontiguousarray(part)) for part in parts)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return Tensor.from_numpy(np.concatenate([gradient.asnumpy() for gradient in gradients], axis=-1)), None


def split(x: Tensor, sizes: Sequence[int]) -> tuple[Tensor, ...]:
    """See `Kernels.split`."""
    check_sizes(sizes, x.shape[-1])
    return _Split.apply(x, tuple(sizes))


class _Concat(_Function):
    @staticmethod
    def forward(ctx: Any, *parts: Tensor) -> Tensor:
        arrays = [part.asnumpy() for part in parts]
        ctx.shapes = [array.shape for array in arrays]
        dims = np.broadcast_shapes(*(shape[:-1] for shape in ctx.shapes))
        spread = [np.broadcast_to(array, (*dims, array.shape[-1])) for array in arrays]
        return Tensor.from_numpy(np.concatenate(spread, axis=-1))

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, ...]:
        stops = np.cumsum([shape[-1] for shape in ctx.shapes])
        parts = np.split(dy.asnumpy(), stops[:-1], axis=-1)
        return tuple(Tensor.from_numpy(_summed(part, shape)) for part, shape in zip(parts, ctx.shapes, strict=True))


def _summed(gradient: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Sum over the dimensions along which something of this shape was copied."""
    copied = tuple(dim for dim, size in enumerate(shape) if size != gradient.shape[dim])
    return gradient.sum(axis=copied, keepdims=True) if copied else np.ascontiguousarray(gradient)


def concat(*parts: Tensor) -> Tensor:
    """See `Kernels.concat`."""
    return _Concat.apply(*parts)
