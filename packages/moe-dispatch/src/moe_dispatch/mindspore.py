"""Dispatch and combine as MindSpore functions with gradients, for tensors in host memory (extra `mindspore`).

Forward and backward are collectives over the route's ranks. A rank that has no rows still calls them, with a tensor of
shape (0, H), and its backward takes part as well.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from mindspore import Tensor
from mindspore.common import _Function

from moe_dispatch.route import Route


def dispatch(x: Tensor, route: Route) -> Tensor:
    """`Route.dispatch` of a rank's tokens x (T, H): the rows (R, H) of its experts. Differentiable in x."""
    return _Dispatch.apply(x, route)


def combine(rows: Tensor, weights: Tensor, route: Route) -> Tensor:
    """`Route.combine` of rows (R, H) with weights (T, K): (T, H). Differentiable in both.

    Keeps both tensors for the backward pass, and nothing else of their size.
    """
    return _Combine.apply(rows, weights, route)


class _Dispatch(_Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, x: Tensor, route: Route) -> Tensor:
        ctx.route = route
        return _tensor(route.dispatch(x.asnumpy()))

    @staticmethod
    def backward(ctx: Any, d_rows: Tensor) -> tuple[Tensor, None]:
        return _tensor(ctx.route.dispatch_gradient(d_rows.asnumpy())), None


class _Combine(_Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, rows: Tensor, weights: Tensor, route: Route) -> Tensor:
        ctx.route = route
        ctx.save_for_backward(rows, weights)
        return _tensor(route.combine(rows.asnumpy(), weights.asnumpy()))

    @staticmethod
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor, Tensor, None]:
        rows, weights = (tensor.asnumpy() for tensor in ctx.saved_tensors)
        d_rows, d_weights = ctx.route.combine_gradient(d_out.asnumpy(), rows, weights)
        return _tensor(d_rows), _tensor(d_weights), None


def _tensor(x: np.ndarray[Any, Any]) -> Tensor:
    return Tensor.from_numpy(np.ascontiguousarray(x))
