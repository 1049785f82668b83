"""Both dispatchers against the dense reference and against each other."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import ml_dtypes
import numpy as np
from dense_reference import KINDS, Array, Batch, d_matrices, expert_matrices, random_batch, reference, rows_of_experts
from device_mesh import Communicator
from moe_dispatch import AllToAllDispatcher, DeredundantDispatcher, Route

HIDDEN = 5
EXPERTS_PER_RANK = 2
TOLERANCE = {"float64": 1e-13, "float32": 2e-5}
# Ranks of the last group of a world that 8 does not divide are fewer: 3, 3 and 2.
NODES = {1: (1,), 2: (1, 2), 3: (), 4: (1, 2, 4), 8: (2, 4)}

CASES: dict[tuple[int, str], Callable[[Communicator], None]] = {}


def matches_the_dense_layer(comm: Communicator, ranks_per_node: int | None, kind: str, dtype: str) -> None:
    num_experts = EXPERTS_PER_RANK * comm.size
    batches = [random_batch(rank, kind, num_experts, HIDDEN, dtype) for rank in range(comm.size)]
    mine, matrices = batches[comm.rank], expert_matrices(num_experts, HIDDEN)
    held = range(comm.rank * EXPERTS_PER_RANK, (comm.rank + 1) * EXPERTS_PER_RANK)
    dispatcher = (
        AllToAllDispatcher(comm, num_experts)
        if ranks_per_node is None
        else DeredundantDispatcher(comm, num_experts, ranks_per_node)
    )

    route = dispatcher.route(mine.expert_ids)
    rows = route.dispatch(mine.tokens)
    expected_rows, counts = rows_of_experts(batches, held)
    assert route.counts.dtype == np.int64
    assert route.counts.tolist() == counts
    assert rows.dtype == np.dtype(dtype)
    np.testing.assert_array_equal(rows, expected_rows)

    out, d_tokens, d_weights, d_held = through_experts(route, rows, mine, matrices[held.start : held.stop])
    expected = reference(mine, matrices)
    for actual, right in ((out, expected.out), (d_tokens, expected.d_tokens), (d_weights, expected.d_weights)):
        assert actual.dtype == np.dtype(dtype)
        np.testing.assert_allclose(actual, right, rtol=TOLERANCE[dtype], atol=20 * TOLERANCE[dtype])
    right = d_matrices(batches, num_experts)[held.start : held.stop]
    np.testing.assert_allclose(d_held, right, rtol=TOLERANCE[dtype], atol=100 * TOLERANCE[dtype])


def through_experts(route: Route, rows: Array, batch: Batch, matrices: Array) -> tuple[Array, Array, Array, Array]:
    """Result, and gradients by tokens, weights and the matrices of this rank's experts."""
    matrices = matrices.astype(rows.dtype)
    ends = np.cumsum(route.counts)[:-1]
    results = np.concatenate([x @ matrix for x, matrix in zip(np.split(rows, ends), matrices, strict=True)])
    out = route.combine(results, batch.weights)
    d_results, d_weights = route.combine_gradient(batch.d_out, results, batch.weights)
    pieces = list(zip(np.split(rows, ends), np.split(d_results, ends), matrices, strict=True))
    d_rows = np.concatenate([d_y @ matrix.T for _, d_y, matrix in pieces])
    d_matrices = np.stack([x.T @ d_y for x, d_y, _ in pieces])
    return out, route.dispatch_gradient(d_rows), d_weights, d_matrices


def equals_the_plain_dispatcher(comm: Communicator, ranks_per_node: int, dtype: str) -> None:
    """Dispatched rows to the last bit, and sums of at most top_k + 1 terms to their rounding."""
    num_experts = EXPERTS_PER_RANK * comm.size
    batch = random_batch(comm.rank, "random", num_experts, HIDDEN, dtype)
    plain = AllToAllDispatcher(comm, num_experts).route(batch.expert_ids)
    once = DeredundantDispatcher(comm, num_experts, ranks_per_node).route(batch.expert_ids)
    rows = plain.dispatch(batch.tokens)
    np.testing.assert_array_equal(once.dispatch(batch.tokens), rows)
    np.testing.assert_array_equal(once.counts, plain.counts)
    for actual, right in zip(
        once.combine_gradient(batch.d_out, rows, batch.weights),
        plain.combine_gradient(batch.d_out, rows, batch.weights),
        strict=True,
    ):
        np.testing.assert_array_equal(actual, right)
    # Of each token come back top_k copies of it, so no sum has terms that cancel.
    rounding = (batch.expert_ids.shape[1] + 1) * np.finfo(dtype).eps
    for actual, right in (
        (once.combine(rows, batch.weights), plain.combine(rows, batch.weights)),
        (once.dispatch_gradient(rows), plain.dispatch_gradient(rows)),
    ):
        np.testing.assert_allclose(actual, right, rtol=rounding)


def rows_of_16_bits_are_added_up_in_float32(comm: Communicator, ranks_per_node: int | None, dtype: str) -> None:
    """Rows to the last bit; sums near to float64's of the same rows, and exactly where one has that many bits."""
    num_experts, kind = EXPERTS_PER_RANK * comm.size, np.dtype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
    dispatcher = (
        AllToAllDispatcher(comm, num_experts)
        if ranks_per_node is None
        else DeredundantDispatcher(comm, num_experts, ranks_per_node)
    )
    batch = random_batch(comm.rank, "random", num_experts, HIDDEN, "float32")
    tokens, d_out = batch.tokens.astype(kind), batch.d_out.astype(kind)
    route = dispatcher.route(batch.expert_ids)
    rows = route.dispatch(tokens)
    out = route.combine(rows, batch.weights)
    d_rows, d_weights = route.combine_gradient(d_out, rows, batch.weights)
    d_tokens = route.dispatch_gradient(d_rows)
    # The first number plus 1 is itself in this type. All experts are on one rank, which one node is.
    eps = float(ml_dtypes.finfo(kind).eps)
    most = 2 / eps
    route = dispatcher.route(np.zeros((1, 5), np.int64))
    ones = route.dispatch(np.ones((1, HIDDEN), kind))
    total = route.combine(ones, np.array([[most, 1, 1, 1, 1]], np.float32))

    assert {x.dtype for x in (rows, out, d_rows, d_tokens)} == {kind}
    assert d_weights.dtype == np.float32
    exact_tokens, exact_d_out, weights = (x.astype(np.float64) for x in (tokens, d_out, batch.weights))
    # Rounded are scaled rows, sums on a node and sums: each by half of eps of the terms' size, or of the least number.
    size = np.abs(weights).sum(1, keepdims=True)
    for actual, exact in ((out, exact_tokens), (d_tokens, exact_d_out)):
        error = np.abs(actual.astype(np.float64) - weights.sum(1, keepdims=True) * exact)
        assert (error <= 1.51 * eps * size * np.abs(exact) + 2 * float(ml_dtypes.finfo(kind).smallest_subnormal)).all()
    right = np.repeat((exact_tokens * exact_d_out).sum(1, keepdims=True), weights.shape[1], axis=1)
    np.testing.assert_allclose(d_weights, right, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(total.astype(np.float64), np.full((1, HIDDEN), most + 4))


def two_batches_are_under_way(comm: Communicator, ranks_per_node: int | None) -> None:
    """To experts and back at a time, each awaited after the other was sent, they come as they do one by one."""
    num_experts = EXPERTS_PER_RANK * comm.size
    plain = AllToAllDispatcher(comm, num_experts)
    dispatcher = plain if ranks_per_node is None else DeredundantDispatcher(comm, num_experts, ranks_per_node)
    batches = [random_batch(comm.rank, kind, num_experts, HIDDEN, "float64") for kind in ("random", "some ranks empty")]
    routes = [dispatcher.route(batch.expert_ids) for batch in batches]
    both = list(zip(routes, batches, strict=True))
    rows = [route.dispatch(batch.tokens) for route, batch in both]
    out = [route.combine(x, batch.weights) for (route, batch), x in zip(both, rows, strict=True)]
    d_rows = [
        route.combine_gradient(batch.d_out, x, batch.weights) for (route, batch), x in zip(both, rows, strict=True)
    ]

    there = [route.start_dispatch(batch.tokens) for route, batch in both]
    for arriving, right in zip(there, rows, strict=True):
        np.testing.assert_array_equal(arriving(), right)
    back = [route.start_combine(x, batch.weights) for (route, batch), x in zip(both, rows, strict=True)]
    gradients = [route.start_combine_gradient(batch.d_out) for route, batch in both]
    of_tokens = [route.start_dispatch_gradient(x) for route, x in zip(routes, rows, strict=True)]
    for returning, right in zip(back, out, strict=True):
        np.testing.assert_array_equal(returning(), right)
    for arriving, (_, batch), x, right in zip(gradients, both, rows, d_rows, strict=True):
        for actual, expected in zip(arriving(x, batch.weights), right, strict=True):
            np.testing.assert_array_equal(actual, expected)
    for returning, route, x in zip(of_tokens, routes, rows, strict=True):
        np.testing.assert_array_equal(returning(), route.dispatch_gradient(x))


def sends_a_token_to_a_node_once(comm: Communicator, ranks_per_node: int) -> None:
    num_experts, top_k, dtype = 4 * comm.size, 4, "float32"
    expert_ids = random_batch(comm.rank, "all experts", num_experts, HIDDEN, dtype).expert_ids[:, :top_k]
    tokens = np.ones((len(expert_ids), HIDDEN), dtype)
    node = comm.rank // ranks_per_node
    nodes = [{expert // (4 * ranks_per_node) for expert in chosen} - {node} for chosen in expert_ids.tolist()]
    away = [e for chosen in expert_ids.tolist() for e in chosen if e // (4 * ranks_per_node) != node]
    plain = AllToAllDispatcher(comm, num_experts, ranks_per_node)
    once = DeredundantDispatcher(comm, num_experts, ranks_per_node)
    for dispatcher, rows in ((plain, len(away)), (once, sum(map(len, nodes)))):
        route = dispatcher.route(expert_ids)
        before = dispatcher.sent.between_nodes
        route.dispatch(tokens)
        assert dispatcher.sent.between_nodes - before == rows * HIDDEN * 4
    same_node = [e for chosen in expert_ids.tolist() for e in chosen if e // (4 * ranks_per_node) == node]
    rows = sum(expert // 4 != comm.rank for expert in same_node)
    counts = (ranks_per_node - 1) * 4 * 8  # an int64 for each of its experts to each other rank
    assert plain.sent.within_nodes == rows * HIDDEN * 4 + counts


def case_two_ranks(comm: Communicator, ranks_per_node: int | None) -> None:
    """PUB-MOE-01: an unused expert; and a rank that receives nothing."""
    dispatcher = (
        AllToAllDispatcher(comm, 4) if ranks_per_node is None else DeredundantDispatcher(comm, 4, ranks_per_node)
    )
    tokens = np.array([[[1.0], [2.0], [3.0]], [[4.0], [5.0]]][comm.rank])
    factors = np.array([2.0 * comm.rank + 1, 2.0 * comm.rank + 2])

    expert_ids = np.array([[[0, 1], [0, 3], [1, 0]], [[0, 1], [1, 0]]][comm.rank])
    weights = np.array([[[0.75, 0.25], [0.5, 0.5], [0.6, 0.4]], [[0.5, 0.5], [0.9, 0.1]]][comm.rank])
    route = dispatcher.route(expert_ids)
    assert route.counts.tolist() == [[5 + 0, 4 + 0], [0, 1]][comm.rank]
    scale = np.repeat(factors, route.counts)[:, None]
    rows = route.dispatch(tokens)
    out = route.combine(scale * rows, weights)
    np.testing.assert_allclose(out[:, 0], [[1.25, 5.0, 4.8], [6.0, 9.5]][comm.rank], rtol=1e-15)
    d_rows, d_weights = route.combine_gradient(np.ones_like(out), scale * rows, weights)
    # Of the sum of all results: by a token the sum of weight times factor, by a weight factor times token.
    np.testing.assert_allclose(d_weights, (expert_ids + 1) * tokens, rtol=1e-15)
    d_tokens = route.dispatch_gradient(scale * d_rows)
    np.testing.assert_allclose(d_tokens[:, 0], ((expert_ids + 1) * weights).sum(1), rtol=1e-15)
    by_factor = [float(piece.sum()) for piece in np.split(d_rows * rows, np.cumsum(route.counts)[:-1])]
    right = [[0.75 + 1 + 1.2 + 2 + 0.5, 0.25 + 1.8 + 2 + 4.5], [0.0, 1.0]][comm.rank]
    np.testing.assert_allclose(by_factor, right, rtol=1e-15)

    route = dispatcher.route(np.ones((len(tokens), 1), np.int64))
    assert route.counts.tolist() == [[0, 5], [0, 0]][comm.rank]
    scale = np.repeat(factors, route.counts)[:, None]
    rows = route.dispatch(tokens)
    assert rows.shape == (int(route.counts.sum()), 1)
    out = route.combine(scale * rows, np.ones((len(tokens), 1)))
    np.testing.assert_array_equal(out[:, 0], [[2.0, 4.0, 6.0], [8.0, 10.0]][comm.rank])
    d_rows, d_weights = route.combine_gradient(np.ones_like(out), scale * rows, np.ones((len(tokens), 1)))
    np.testing.assert_array_equal(d_weights, 2 * tokens)
    np.testing.assert_array_equal(route.dispatch_gradient(scale * d_rows), np.full_like(tokens, 2.0))
    assert float((d_rows * rows).sum()) == [15.0, 0.0][comm.rank]


for world, nodes in NODES.items():
    for per_node in (None, *nodes):
        way = "plain" if per_node is None else f"nodes of {per_node}"
        for kind in KINDS:
            for dtype in ("float64", "float32") if kind == "random" else ("float64",):
                CASES[world, f"{way}, {kind}, {dtype}"] = partial(
                    matches_the_dense_layer, ranks_per_node=per_node, kind=kind, dtype=dtype
                )
        for dtype in ("bfloat16", "float16"):
            CASES[world, f"{way}, {dtype}"] = partial(
                rows_of_16_bits_are_added_up_in_float32, ranks_per_node=per_node, dtype=dtype
            )
        CASES[world, f"{way}, under way"] = partial(two_batches_are_under_way, ranks_per_node=per_node)
        if per_node is not None:
            for dtype in ("float64", "float32"):
                CASES[world, f"{way}, plain, {dtype}"] = partial(
                    equals_the_plain_dispatcher, ranks_per_node=per_node, dtype=dtype
                )
            CASES[world, f"{way}, bytes"] = partial(sends_a_token_to_a_node_once, ranks_per_node=per_node)
        if world == 2:
            CASES[world, f"{way}, PUB-MOE-01"] = partial(case_two_ranks, ranks_per_node=per_node)
