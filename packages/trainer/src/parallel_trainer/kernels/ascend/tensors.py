"""The types that kernels compute in, and the order of a tensor's tokens."""

from __future__ import annotations

import mindspore as ms
import numpy as np
from mindspore import Tensor, ops

HALVES = (ms.bfloat16, ms.float16)


def wide(x: Tensor) -> Tensor:
    """float32 for bfloat16 and float16; others as they are."""
    return x.astype(ms.float32) if x.dtype in HALVES else x


def half(x: Tensor) -> Tensor:
    """bfloat16 for what is neither that nor float16."""
    return x if x.dtype in HALVES else x.astype(ms.bfloat16)


def take(x: Tensor, order: np.ndarray) -> Tensor:
    """x (B, S, ...) with its tokens in another order, int (S,); itself where that is the order they are in."""
    if (order == np.arange(len(order))).all():
        return x
    return ops.gather(x, Tensor(order.astype(np.int32)), 1)
