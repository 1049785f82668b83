"""The arithmetic of dispatching: how many rows go where, and in which order. Nothing is sent here.

A *slot* is one of the T·K choices of a rank's tokens: slot t·K + k is token t with its k-th expert. All numbers are
int64, and nothing loops over tokens or experts.
"""

from __future__ import annotations

import numpy as np
from attrs import frozen

from moe_dispatch.layout import Array, ExpertLayout, Ints, checked_expert_ids


@frozen(eq=False)
class DispatchPlan:
    """What one rank sends. Made by `plan`.

    Attributes:
        counts: (E,) slots of each expert.
        send_sizes: (ranks,) rows for each rank.
        order: (T·K,) slots in the order of their experts, equal ones as they come.
        places: (T, K) where a slot stands in that order: the inverse of `order`.
    """

    counts: Ints
    send_sizes: Ints
    order: Ints
    places: Ints


@frozen(eq=False)
class Arrival:
    """What one rank receives. Made by `arrival`.

    Attributes:
        receive_sizes: (sources,) rows from each rank.
        counts: (experts,) rows for each expert of this rank.
        arrangement: (rows,) the received row that comes at each place in the order of experts; None for rows that
            arrive in that order.
    """

    receive_sizes: Ints
    counts: Ints
    arrangement: Ints | None


def plan(expert_ids: Array, layout: ExpertLayout) -> DispatchPlan:
    """Counts, sizes and order for the experts that a rank's tokens have chosen, integers (T, K) with K >= 1.

    A token may choose an expert twice. Raises TypeError for other dtypes, ValueError for other shapes and for ids
    outside 0 to E-1.

    >>> made = plan(np.array([[2, 0], [2, 3]]), ExpertLayout(num_experts=4, num_ranks=2))
    >>> made.counts.tolist(), made.send_sizes.tolist(), made.order.tolist(), made.places.tolist()
    ([1, 0, 2, 1], [1, 3], [1, 0, 2, 3], [[1, 0], [2, 3]])
    """
    chosen = checked_expert_ids(expert_ids, layout.num_experts).reshape(-1)
    counts = count(chosen, layout.num_experts)
    order = stable_order(chosen, layout.num_experts)
    return DispatchPlan(
        counts=counts,
        send_sizes=counts.reshape(layout.num_ranks, -1).sum(1),
        order=order,
        places=inverse(order).reshape(expert_ids.shape),
    )


def arrival(counts_by_source: Ints) -> Arrival:
    """Sizes and order of the rows that come to a rank: (sources, experts) or (sources, experts, origins) int64.

    Rows come source by source, each source's by expert, then origin; they are put in the order expert, origin, source.

    >>> arrival(np.array([[1, 2], [1, 0]])).arrangement.tolist()
    [0, 3, 1, 2]
    """
    sources, experts = counts_by_source.shape[:2]
    sizes = counts_by_source.reshape(sources, -1)
    starts = starts_of(sizes.reshape(-1)).reshape(sizes.shape)
    arrangement: Ints | None = None
    if sources > 1 and sizes.shape[1] > 1:
        pieces = sizes.T.reshape(-1)
        shifts: Ints = np.repeat(starts.T.reshape(-1) - starts_of(pieces), pieces)
        arrangement = shifts + np.arange(shifts.size)
    return Arrival(sizes.sum(1), sizes.reshape(sources, experts, -1).sum((0, 2)), arrangement)


def count(numbers: Array, limit: int) -> Ints:
    """How often each of 0 to limit-1 occurs, (limit,)."""
    return np.bincount(numbers, minlength=limit).astype(np.int64, copy=False)


def stable_order(numbers: Array, limit: int) -> Ints:
    """The order that sorts numbers from 0 to limit-1, equal ones as they come."""
    # NumPy sorts integers of up to 16 bits by radix, in linear time, and wider ones by comparing.
    narrow = np.uint8 if limit <= 1 << 8 else np.uint16 if limit <= 1 << 16 else np.int64
    return np.argsort(numbers.astype(narrow, copy=False), kind="stable")


def inverse(order: Ints) -> Ints:
    """Where each number stands in a permutation."""
    places = np.empty_like(order)
    places[order] = np.arange(order.size)
    return places


def starts_of(sizes: Ints) -> Ints:
    """Where each piece begins when pieces of these sizes are joined."""
    return np.cumsum(sizes) - sizes
