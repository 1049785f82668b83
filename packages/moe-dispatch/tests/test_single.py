"""Dispatching on one rank, and what is refused."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from device_mesh import connect
from moe_dispatch import AllToAllDispatcher, BytesSent, DeredundantDispatcher, ExpertLoad

T, K, E, H = 3, 2, 4, 5
IDS = np.array([[0, 3], [3, 3], [1, 0]])


def group(size: int) -> Any:
    """What a dispatcher looks at before it talks to other ranks."""
    return SimpleNamespace(size=size, rank=0)


@pytest.mark.parametrize("make", [AllToAllDispatcher, lambda comm, experts: DeredundantDispatcher(comm, experts, 1)])
def test_one_rank_sends_nothing(make: Any) -> None:
    dispatcher = make(connect("single"), E)
    route = dispatcher.route(IDS)
    tokens = np.arange(T * H, dtype=np.float64).reshape(T, H)
    np.testing.assert_array_equal(route.dispatch(tokens), tokens[[0, 2, 2, 0, 1, 1]])
    np.testing.assert_array_equal(route.counts, [2, 1, 0, 3])
    weights = np.array([[0.25, 0.75], [0.5, 1.0], [2.0, -2.0]])
    out = route.combine(route.dispatch(tokens), weights)
    np.testing.assert_array_equal(out, tokens * weights.sum(1, keepdims=True))
    assert dispatcher.sent == BytesSent(0, 0)


def test_combine_needs_little_memory_beside_its_result() -> None:
    num_tokens, top_k, hidden = 4096, 8, 256
    ids = np.random.default_rng(0).integers(0, 16, (num_tokens, top_k))
    route = AllToAllDispatcher(connect("single"), 16).route(ids)
    rows, weights = np.ones((num_tokens * top_k, hidden), np.float32), np.ones((num_tokens, top_k), np.float32)
    tracemalloc.start()
    out = route.combine(rows, weights)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < out.nbytes + (1 << 21) < rows.nbytes / 4


@pytest.mark.parametrize(
    ("call", "error", "parts"),
    [
        (
            lambda r: r.dispatch(np.zeros((T, H), np.int32)),
            TypeError,
            ("tokens", "int32", "bfloat16, float16, float32"),
        ),
        (lambda r: r.dispatch(np.zeros((T + 1, H))), ValueError, ("tokens", "(4, 5)", "(3, H)")),
        (lambda r: r.dispatch(np.zeros((T, H, 1))), ValueError, ("tokens", "(3, 5, 1)", "(3, H)")),
        (lambda r: r.combine(np.zeros((5, H)), np.zeros((T, K))), ValueError, ("rows", "(5, 5)", "(6, H)")),
        (lambda r: r.combine(np.zeros((6, H)), np.zeros((T, 1))), ValueError, ("weights", "(3, 1)", "(3, 2)")),
        (lambda r: r.combine(np.zeros((6, H)), np.zeros((T, K), "f4")), ValueError, ("weights", "float32", "float64")),
        (
            lambda r: r.combine(np.zeros((6, H), "f2"), np.zeros((T, K), "f2")),
            ValueError,
            ("weights", "dtype float16", "rows are float16", "and dtype float32"),
        ),
        (lambda r: r.dispatch_gradient(np.zeros((T, H))), ValueError, ("d_rows", "(3, 5)", "(6, H)")),
        (
            lambda r: r.combine_gradient(np.zeros((T, H)), np.zeros((T, H)), np.zeros((T, K))),
            ValueError,
            ("rows", "(3, 5)", "(6, H)"),
        ),
        (
            lambda r: r.combine_gradient(np.zeros((6, H)), np.zeros((6, H)), np.zeros((T, K))),
            ValueError,
            ("d_out", "(6, 5)", "(3, H)"),
        ),
        (
            lambda r: r.combine_gradient(np.zeros((T, H), "f4"), np.zeros((6, H)), np.zeros((T, K))),
            ValueError,
            ("d_out", "(3, 5)", "float32", "(6, 5)", "float64"),
        ),
    ],
)
def test_wrong_arrays(call: Any, error: type[Exception], parts: tuple[str, ...]) -> None:
    route = AllToAllDispatcher(connect("single"), E).route(IDS)
    with pytest.raises(error) as raised:
        call(route)
    assert all(part in str(raised.value) for part in parts), raised.value


@pytest.mark.parametrize(
    ("size", "per_node", "parts"),
    [
        (4, 8, ("expert_parallel 4", "npu_nums_per_device", "8", "1, 2, 4", "expert_parallel 8")),
        (12, 8, ("expert_parallel 12", "8", "1, 2, 3, 4, 6, 12", "expert_parallel 16")),
        (3, 2, ("expert_parallel 3", "2", "1, 3", "expert_parallel 4")),
    ],
)
def test_nodes_that_do_not_divide_the_ranks(size: int, per_node: int, parts: tuple[str, ...]) -> None:
    with pytest.raises(ValueError, match="must be") as raised:
        DeredundantDispatcher(group(size), 24 * size, per_node)
    assert all(part in str(raised.value) for part in parts), raised.value


def test_experts_that_do_not_divide() -> None:
    with pytest.raises(ValueError, match="num_experts 6 must be a multiple of expert_parallel 4"):
        AllToAllDispatcher(group(4), 6)
    with pytest.raises(ValueError, match="num_experts 6 must be a multiple of expert_parallel 4"):
        DeredundantDispatcher(group(4), 6, 2)


def test_the_plain_dispatcher_takes_any_nodes() -> None:
    assert AllToAllDispatcher(group(3), 6).layout.num_nodes == 1
    assert AllToAllDispatcher(group(3), 6, ranks_per_node=2).layout.node_of_rank.tolist() == [0, 0, 1]
    assert AllToAllDispatcher(group(2), 6, ranks_per_node=8).layout.num_nodes == 1


def test_lists_given_for_arrays_are_refused_in_words() -> None:
    dispatcher = AllToAllDispatcher(connect("single"), num_experts=4)
    ids, tokens, weights = np.array([[0, 1], [0, 3]]), np.ones((2, 3)), np.ones((2, 2))
    route = dispatcher.route(ids)
    rows = route.dispatch(tokens)
    calls: dict[str, Callable[[], object]] = {
        "expert ids": lambda: dispatcher.route(ids.tolist()),
        "tokens": lambda: route.dispatch(tokens.tolist()),
        "rows": lambda: route.combine(rows.tolist(), weights),
        "weights": lambda: route.combine(rows, weights.tolist()),
        "d_rows": lambda: route.dispatch_gradient(rows.tolist()),
        "d_out": lambda: route.combine_gradient(tokens.tolist(), rows, weights),
        "a step's counts": lambda: ExpertLoad(4).record([1, 2, 3, 4]),  # type: ignore[arg-type]
    }
    for name, call in calls.items():
        with pytest.raises(TypeError, match=f"{name} are a list, but must be a NumPy array: pass numpy.asarray"):
            call()
