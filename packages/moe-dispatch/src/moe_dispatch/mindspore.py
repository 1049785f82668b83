"""Dispatch and combine as MindSpore functions with gradients, for tensors in host memory (extra `mindspore`).

Forward and backward are collectives over the route's ranks. A rank that has no rows still calls them, with a tensor of
shape (0, H), and its backward takes part as well. `start_dispatch` and `start_combine` return while rows are under way;
in the backward pass gradients are, while what was computed meanwhile is differentiated (`device_mesh.autograd.start`).
"""

from __future__ import annotations

from collections.abc import Callable

try:
    from device_mesh import autograd
    from mindspore import Tensor
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "moe_dispatch.mindspore needs MindSpore, which is not installed: pip install 'moe-dispatch[mindspore]'",
        name=error.name,
    ) from error

from moe_dispatch.route import Route


def dispatch(x: Tensor, route: Route) -> Tensor:
    """`Route.dispatch` of a rank's tokens x (T, H): the rows (R, H) of its experts. Differentiable in x."""
    return start_dispatch(x, route)()


def combine(rows: Tensor, weights: Tensor, route: Route) -> Tensor:
    """`Route.combine` of rows (R, H) with weights (T, K): (T, H). Differentiable in both.

    Keeps both tensors for the backward pass, and nothing else of their size.
    """
    return start_combine(rows, weights, route)()


def start_dispatch(x: Tensor, route: Route) -> Callable[[], Tensor]:
    """Send tokens; what is returned is called, once, for what `dispatch` returns. `x` is left unchanged until then."""
    return autograd.start(route.start_dispatch, route.start_dispatch_gradient, x)


def start_combine(rows: Tensor, weights: Tensor, route: Route) -> Callable[[], Tensor]:
    """Send rows back; what is returned is called, once, for what `combine` returns. Both stay unchanged until then."""
    return autograd.start(route.start_combine, route.start_combine_gradient, rows, weights, keep=True)
