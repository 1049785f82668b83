"""Gradients through MindSpore on two ranks, one of which may hold no rows."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
from dense_reference import random_batch
from device_mesh import Communicator
from moe_dispatch import AllToAllDispatcher, DeredundantDispatcher

NUM_EXPERTS = 4
HIDDEN = 3
CASES: dict[tuple[int, str], Callable[[Communicator], None]] = {}


def gradients_are_those_of_the_route(comm: Communicator, ranks_per_node: int | None, kind: str) -> None:
    import mindspore
    from mindspore import Tensor, ops
    from moe_dispatch import mindspore as functions

    batch = random_batch(comm.rank, kind, NUM_EXPERTS, HIDDEN, "float64")
    dispatcher = (
        AllToAllDispatcher(comm, NUM_EXPERTS)
        if ranks_per_node is None
        else DeredundantDispatcher(comm, NUM_EXPERTS, ranks_per_node)
    )
    route = dispatcher.route(batch.expert_ids if kind != "rank 1 idle" else batch.expert_ids // 2)
    assert kind != "rank 1 idle" or comm.rank == 0 or route.num_rows == 0

    def layer(x: Tensor, weights: Tensor) -> Tensor:
        rows = functions.dispatch(x, route)
        return functions.combine(rows * rows, weights, route)

    # A sum as the loss would not do: of a tensor without elements MindSpore 2.10 gives what lies in memory.
    mindspore.set_context(pynative_synchronize=True)
    inputs = Tensor(batch.tokens), Tensor(batch.weights)
    out = layer(*inputs).asnumpy()
    gradients = ops.GradOperation(get_all=True, sens_param=True)(layer)(*inputs, Tensor(batch.d_out))
    squared, weight_sums = batch.tokens**2, batch.weights.sum(1, keepdims=True)
    d_weights = np.repeat((squared * batch.d_out).sum(1, keepdims=True), route.top_k, axis=1)
    right = weight_sums * squared, 2 * batch.tokens * weight_sums * batch.d_out, d_weights
    for actual, expected in zip((out, *(gradient.asnumpy() for gradient in gradients)), right, strict=True):
        assert actual.shape == expected.shape
        np.testing.assert_allclose(actual, expected, rtol=1e-12)


def bfloat16_has_gradients(comm: Communicator) -> None:
    """As the route's, in the types of rows and weights."""
    import mindspore
    from mindspore import Tensor, ops
    from mindspore.common.np_dtype import bfloat16
    from moe_dispatch import mindspore as functions

    batch = random_batch(comm.rank, "random", NUM_EXPERTS, HIDDEN, "float32")
    route = AllToAllDispatcher(comm, NUM_EXPERTS).route(batch.expert_ids)
    tokens, d_out = batch.tokens.astype(bfloat16), batch.d_out.astype(bfloat16)

    def layer(x: Tensor, weights: Tensor) -> Tensor:
        return functions.combine(functions.dispatch(x, route), weights, route)

    mindspore.set_context(pynative_synchronize=True)
    inputs = Tensor(tokens), Tensor(batch.weights)
    gradients = ops.GradOperation(get_all=True, sens_param=True)(layer)(*inputs, Tensor(d_out))
    rows = route.dispatch(tokens)
    d_rows, d_weights = route.combine_gradient(d_out, rows, batch.weights)
    right = route.combine(rows, batch.weights), route.dispatch_gradient(d_rows), d_weights
    for actual, expected in zip((layer(*inputs), *gradients), right, strict=True):
        assert actual.asnumpy().dtype == expected.dtype
        np.testing.assert_array_equal(actual.astype(mindspore.float32).asnumpy(), expected.astype(np.float32))


CASES[2, "bfloat16"] = bfloat16_has_gradients
for per_node in (None, 1, 2):
    for kind in ("random", "rank 1 idle", "some ranks empty"):
        way = "plain" if per_node is None else f"nodes of {per_node}"
        CASES[2, f"{way}, {kind}"] = partial(gradients_are_those_of_the_route, ranks_per_node=per_node, kind=kind)
