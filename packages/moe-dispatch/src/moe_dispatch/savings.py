"""How many tokens travel between nodes: counted for experts that were chosen, and expected where choices are even."""

from __future__ import annotations

from math import comb

from attrs import frozen

from moe_dispatch.layout import Array, ExpertLayout, checked_expert_ids
from moe_dispatch.node_plan import needed_nodes


@frozen
class RowsBetweenNodes:
    """Rows of hidden numbers that leave a node one way, in dispatch or in combine, by how it is done.

    Attributes:
        copies: a row for each expert elsewhere: `AllToAllDispatcher`.
        once: a row for each other node that holds an expert: `DeredundantDispatcher`.
        gathered: every token to every other node, as an all-gather does.
    """

    copies: int
    once: int
    gathered: int


def rows_between_nodes(expert_ids: Array, layout: ExpertLayout, node: int) -> RowsBetweenNodes:
    """For tokens that are on `node`, with experts (T, K); raises as `moe_dispatch.plan` does for those.

    >>> import numpy as np
    >>> rows_between_nodes(np.array([[0, 4, 5], [6, 7, 2]]), ExpertLayout(8, num_ranks=8, ranks_per_node=4), node=0)
    RowsBetweenNodes(copies=4, once=2, gathered=2)
    """
    chosen = checked_expert_ids(expert_ids, layout.num_experts)
    needed = needed_nodes(chosen, layout)
    return RowsBetweenNodes(
        copies=int((layout.nodes(chosen) != node).sum()),
        once=int(needed.sum() - needed[:, node].sum()),
        gathered=len(chosen) * (layout.num_nodes - 1),
    )


def expected_nodes(num_experts: int, num_nodes: int, top_k: int) -> float:
    """On how many nodes the experts of a token are, on average, if all choices of K different experts are as likely.

    A node is spared if all K are among the E - E/nodes others: nodes · (1 - C(E - E/nodes, K) / C(E, K)). By symmetry a
    share of (nodes - 1) / nodes of them are other nodes than the token's.

    Raises ValueError unless num_nodes divides num_experts and K is from 1 to E.

    >>> round(expected_nodes(num_experts=256, num_nodes=8, top_k=8), 3)
    5.295
    """
    if num_nodes < 1 or num_experts % num_nodes or not 1 <= top_k <= num_experts:
        raise ValueError(
            f"expected_nodes with num_experts {num_experts}, num_nodes {num_nodes}, top_k {top_k}: num_nodes must "
            f"divide num_experts, and top_k must be 1 to {num_experts}"
        )
    others = num_experts - num_experts // num_nodes
    return num_nodes * (1 - comb(others, top_k) / comb(num_experts, top_k))
