"""The feed-forward parts of many experts, each on its own rows: one grouped product a weight for all experts.

Those that give the weights their gradients can be put off: see `kernels/later.py`.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
from mindspore import Tensor, mint, ops
from mindspore.common import _Function

from parallel_trainer.kernels.ascend import operators
from parallel_trainer.kernels.ascend.linear import gradient
from parallel_trainer.kernels.checks import check_counts

_ROWS, _INNER = 0, 2
"""What the operator divides among experts: rows of the first factor, or the dimension that both factors share."""


class _GroupedLinear(_Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, counts: np.ndarray) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.counts = counts
        return _rows_by_weight(x, mint.transpose(weight, 1, 2), counts)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor | None, None]:
        x, weight = ctx.saved_tensors
        d_weight = gradient(weight, partial(_products, dy, x, ctx.counts))
        return _rows_by_weight(dy, weight, ctx.counts), d_weight, None


def _rows_by_weight(x: Tensor, weight: Tensor, counts: np.ndarray) -> Tensor:
    """Rows x (R, in) times the weight (E, in, out) of their expert, (R, out)."""
    if not len(x):
        return mint.zeros((0, weight.shape[2]), dtype=x.dtype)
    return operators.gmm([x], [weight], group_list=_ends(counts), group_type=_ROWS)[0]


def _products(dy: Tensor, x: Tensor, counts: np.ndarray) -> Tensor:
    """What rows with inputs x (R, in) and output gradients dy (R, out) give the experts' gradients, (E, out, in)."""
    if not len(x):
        return mint.zeros((len(counts), dy.shape[1], x.shape[1]), dtype=dy.dtype)
    found = operators.gmm([mint.transpose(dy, 0, 1)], [x], group_list=_ends(counts), group_type=_INNER)[0]
    idle = counts == 0
    # What the operator leaves where an expert has no rows is not documented.
    return ops.masked_fill(found, Tensor(idle[:, None, None]), Tensor(0, found.dtype)) if idle.any() else found


def _ends(counts: np.ndarray) -> Tensor:
    return Tensor(np.cumsum(counts, dtype=np.int64))


def grouped_mlp(rows: Tensor, counts: np.ndarray, gate_up: Tensor, down: Tensor) -> Tensor:
    """See `Kernels.grouped_mlp`."""
    check_counts(counts, len(gate_up), len(rows))
    hidden = _GroupedLinear.apply(rows, gate_up, counts)
    inner = operators.swiglu(hidden, -1) if len(rows) else hidden[:, : down.shape[2]]
    return _GroupedLinear.apply(inner, down, counts)
