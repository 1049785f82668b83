"""The arithmetic of dispatching against counting and sorting in plain Python."""

from __future__ import annotations

import doctest
import importlib
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from moe_dispatch import ExpertLayout, arrival, plan
from moe_dispatch.node_plan import plan_nodes
from moe_dispatch.plan import inverse, stable_order


@st.composite
def routings(draw: st.DrawFn) -> tuple[list[np.ndarray], ExpertLayout]:
    """Expert ids of every rank, duplicates included, and a layout whose nodes divide the ranks."""
    per_node, nodes, per_rank = (draw(st.integers(1, 4)) for _ in range(3))
    made = ExpertLayout(per_node * nodes * per_rank, per_node * nodes, per_node)
    top_k = draw(st.integers(1, made.num_experts))
    dtype = draw(st.sampled_from(("int32", "int64", "uint8")))
    tokens = st.integers(0, 6).flatmap(
        lambda number: arrays(dtype, (number, top_k), elements=st.integers(0, made.num_experts - 1))
    )
    return [draw(tokens) for _ in range(made.num_ranks)], made


@settings(deadline=None)
@given(routings())
def test_counts_sizes_and_order_of_what_is_sent(routing: tuple[list[np.ndarray], ExpertLayout]) -> None:
    expert_ids, made = routing
    for ids in expert_ids:
        planned = plan(ids, made)
        chosen = ids.reshape(-1).tolist()
        occurrences = Counter(chosen)
        assert planned.counts.tolist() == [occurrences[expert] for expert in range(made.num_experts)]
        by_rank = Counter(expert // made.experts_per_rank for expert in chosen)
        assert planned.send_sizes.tolist() == [by_rank[rank] for rank in range(made.num_ranks)]
        assert planned.order.tolist() == sorted(range(len(chosen)), key=lambda slot: (chosen[slot], slot))
        assert planned.places.shape == ids.shape
        assert planned.places.reshape(-1)[planned.order].tolist() == list(range(len(chosen)))
        assert {a.dtype for a in (planned.counts, planned.send_sizes, planned.order)} == {np.dtype(np.int64)}


@settings(deadline=None)
@given(routings())
def test_what_arrives_is_sorted_by_expert_then_source_then_token(
    routing: tuple[list[np.ndarray], ExpertLayout],
) -> None:
    expert_ids, made = routing
    plans = [plan(ids, made) for ids in expert_ids]
    counts = np.stack([planned.counts for planned in plans])
    received_in_all = 0
    for rank in range(made.num_ranks):
        held = range(rank * made.experts_per_rank, (rank + 1) * made.experts_per_rank)
        come = arrival(counts[:, held.start : held.stop])
        labels = [
            (int(ids.reshape(-1)[slot]), source, int(slot))
            for source, (ids, planned) in enumerate(zip(expert_ids, plans, strict=True))
            for slot in planned.order
            if int(ids.reshape(-1)[slot]) in held
        ]
        arranged = labels if come.arrangement is None else [labels[place] for place in come.arrangement]
        assert arranged == sorted(labels)
        assert come.receive_sizes.tolist() == [int(planned.send_sizes[rank]) for planned in plans]
        assert come.counts.tolist() == [sum(label[0] == expert for label in labels) for expert in held]
        received_in_all += len(labels)
    assert received_in_all == sum(ids.size for ids in expert_ids)


@settings(deadline=None)
@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 4), st.data())
def test_origins_come_between_expert_and_source(sources: int, experts: int, origins: int, data: st.DataObject) -> None:
    counts = data.draw(arrays(np.int64, (sources, experts, origins), elements=st.integers(0, 3)))
    come = arrival(counts)
    cells = np.ndindex(counts.shape)
    labels = [(e, o, s, number) for s, e, o in cells for number in range(counts[s, e, o])]
    arranged = labels if come.arrangement is None else [labels[place] for place in come.arrangement]
    assert arranged == sorted(labels)


@settings(deadline=None)
@given(routings())
def test_a_node_is_sent_each_token_once_and_every_slot(routing: tuple[list[np.ndarray], ExpertLayout]) -> None:
    expert_ids, made = routing
    per_node = made.experts_per_node
    for ids in expert_ids:
        planned = plan_nodes(ids.astype(np.int64), made)
        pairs = sorted({(int(expert) // per_node, token) for token, chosen in enumerate(ids) for expert in chosen})
        sent = planned.owners[planned.token_order].tolist()
        assert sent == [token for _, token in pairs]
        assert planned.token_sizes.tolist() == [
            sum(pair[0] == node for pair in pairs) for node in range(made.num_nodes)
        ]
        tokens_of = [[token for at, token in pairs if at == node] for node in range(made.num_nodes)]
        decoded = []
        for node, code in zip(
            np.repeat(np.arange(made.num_nodes), planned.slot_sizes), planned.codes[planned.slot_order], strict=True
        ):
            place, expert = divmod(int(code), per_node)
            decoded.append((tokens_of[node][place], int(node) * per_node + expert))
        expected = [(token, int(expert)) for token, chosen in enumerate(ids) for expert in chosen]
        assert decoded == sorted(expected, key=lambda slot: slot[1] // per_node)


@pytest.mark.parametrize("limit", [2, 256, 257, 65_536, 65_537])
def test_order_is_stable_for_every_width_of_number(limit: int) -> None:
    numbers = np.random.default_rng(0).integers(0, limit, 500)
    numbers[:100] = limit - 1
    order = stable_order(numbers, limit)
    assert order.tolist() == sorted(range(500), key=lambda place: (numbers[place], place))
    assert (inverse(order)[order] == np.arange(500)).all()


def test_counts_beyond_32_bits() -> None:
    assert arrival(np.full((1, 3), 1 << 40)).counts.tolist() == [1 << 40] * 3
    assert arrival(np.full((1, 3), 1 << 40)).receive_sizes.tolist() == [3 << 40]


def test_pub_moe_01() -> None:
    made = ExpertLayout(4, 2)
    first = [plan(np.array(ids), made) for ids in ([[0, 1], [0, 3], [1, 0]], [[0, 1], [1, 0]])]
    assert [planned.counts.tolist() for planned in first] == [[3, 2, 0, 1], [2, 2, 0, 0]]
    assert [planned.send_sizes.tolist() for planned in first] == [[5, 1], [4, 0]]
    counts = np.stack([planned.counts for planned in first])
    come = [arrival(counts[:, :2]), arrival(counts[:, 2:])]
    assert [each.receive_sizes.tolist() for each in come] == [[5, 4], [1, 0]]
    assert [each.counts.tolist() for each in come] == [[5, 4], [0, 1]]
    second = [plan(np.ones((number, 1), np.int32), made) for number in (3, 2)]
    assert [planned.counts.tolist() for planned in second] == [[0, 3, 0, 0], [0, 2, 0, 0]]
    assert [planned.send_sizes.tolist() for planned in second] == [[3, 0], [2, 0]]
    come = [arrival(np.stack([planned.counts for planned in second])[:, half]) for half in (slice(2), slice(2, 4))]
    assert [each.receive_sizes.tolist() for each in come] == [[3, 2], [0, 0]]
    assert [each.counts.tolist() for each in come] == [[0, 5], [0, 0]]


@pytest.mark.parametrize(
    ("expert_ids", "error", "parts"),
    [
        (np.zeros((2, 2)), TypeError, ("float64", "integers")),
        (np.zeros(4, np.int64), ValueError, ("(4,)", "(tokens, top_k)")),
        (np.zeros((4, 0), np.int64), ValueError, ("(4, 0)", "top_k 1 or more")),
        (np.array([[0, 4], [1, 5]]), ValueError, ("2 of 4", "first is 4", "0 to 3")),
        (np.array([[0, -1]]), ValueError, ("1 of 2", "first is -1", "0 to 3")),
    ],
)
def test_wrong_expert_ids(expert_ids: np.ndarray, error: type[Exception], parts: tuple[str, ...]) -> None:
    with pytest.raises(error) as raised:
        plan(expert_ids, ExpertLayout(4, 2))
    assert all(part in str(raised.value) for part in parts), raised.value


@pytest.mark.parametrize(
    ("numbers", "parts"),
    [
        ((10, 4), ("num_experts 10", "expert_parallel 4", "use 8 or 12 experts", "1, 2, 5, 10")),
        ((2, 4), ("num_experts 2", "use 4 experts", "1, 2")),
        ((0, 1), ("num_experts 0", "1 or more")),
        ((4, 2, 0), ("ranks_per_node 0", "1 or more")),
    ],
)
def test_wrong_layouts(numbers: tuple[int, ...], parts: tuple[str, ...]) -> None:
    with pytest.raises(ValueError, match="num_experts") as raised:
        ExpertLayout(*numbers)
    assert all(part in str(raised.value) for part in parts), raised.value


@pytest.mark.parametrize("name", ["layout", "plan", "node_plan", "savings", "load"])
def test_examples_in_docstrings(name: str) -> None:
    result = doctest.testmod(importlib.import_module(f"moe_dispatch.{name}"))
    assert result.attempted > 0
    assert result.failed == 0
