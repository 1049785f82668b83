"""Tokens of one rank in the order of their experts, and back: two fused operators.

They are given float32, so that sums are made in it: of results, and in the backward pass of a token's gradients.
"""

from __future__ import annotations

import numpy as np
from mindspore import Tensor

from parallel_trainer.kernels.ascend import operators
from parallel_trainer.kernels.ascend.tensors import wide


def permute(x: Tensor, ids: np.ndarray, num_experts: int) -> tuple[Tensor, np.ndarray, Tensor]:
    """See `Kernels.permute`."""
    rows, places = operators.moe_token_permute(wide(x), Tensor(ids.astype(np.int32)))
    return rows.astype(x.dtype), np.bincount(ids.reshape(-1), minlength=num_experts), places


def unpermute(rows: Tensor, weights: Tensor, order: Tensor) -> Tensor:
    """See `Kernels.unpermute`."""
    return operators.moe_token_unpermute(wide(rows), order, wide(weights)).astype(rows.dtype)
