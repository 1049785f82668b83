"""Tokens of one rank in the order of their experts, and back: a route of `moe_dispatch` that leaves no rank."""

from __future__ import annotations

import numpy as np
from device_mesh import connect
from mindspore import Tensor
from moe_dispatch import AllToAllDispatcher, Route
from moe_dispatch.mindspore import combine, dispatch


def permute(x: Tensor, ids: np.ndarray, num_experts: int) -> tuple[Tensor, np.ndarray, Route]:
    """See `Kernels.permute`."""
    route = AllToAllDispatcher(connect("single"), num_experts).route(ids)
    return dispatch(x, route), route.counts, route


def unpermute(rows: Tensor, weights: Tensor, order: Route) -> Tensor:
    """See `Kernels.unpermute`."""
    return combine(rows, weights, order)
