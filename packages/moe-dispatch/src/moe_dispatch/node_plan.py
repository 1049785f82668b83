"""The arithmetic of sending a token to each node at most once. Nothing is sent here."""

from __future__ import annotations

import numpy as np
from attrs import frozen

from moe_dispatch.layout import ExpertLayout, Ints
from moe_dispatch.plan import count, stable_order


@frozen(eq=False)
class NodePlan:
    """What one rank sends to the nodes. Made by `plan_nodes`; P is the number of (token, node) pairs that are needed.

    Attributes:
        token_sizes: (nodes,) tokens for each node.
        owners: (P,) the token of each pair, ascending.
        token_order: (P,) pairs by node, then token.
        slot_sizes: (nodes,) slots for each node.
        slot_order: (T·K,) slots by node, then token.
        codes: (T·K,) for each slot, p · experts_per_node + e: its token is the p-th of those that this rank sends to
            the node, and it is for expert e of the node.
    """

    token_sizes: Ints
    owners: Ints
    token_order: Ints
    slot_sizes: Ints
    slot_order: Ints
    codes: Ints


def plan_nodes(expert_ids: Ints, layout: ExpertLayout) -> NodePlan:
    """For experts (T, K) that `moe_dispatch.layout.checked_expert_ids` has seen."""
    needed = needed_nodes(expert_ids, layout)
    owners, node_of_pair = np.nonzero(needed)
    node_of_slot = layout.nodes(expert_ids)
    place_of_token = np.take_along_axis(np.cumsum(needed, axis=0) - 1, node_of_slot, axis=1)
    codes = place_of_token * layout.experts_per_node + expert_ids % layout.experts_per_node
    return NodePlan(
        token_sizes=needed.sum(0),
        owners=owners,
        token_order=stable_order(node_of_pair, layout.num_nodes),
        slot_sizes=count(node_of_slot.reshape(-1), layout.num_nodes),
        slot_order=stable_order(node_of_slot.reshape(-1), layout.num_nodes),
        codes=codes.reshape(-1),
    )


def needed_nodes(expert_ids: Ints, layout: ExpertLayout) -> np.ndarray[tuple[int, int], np.dtype[np.bool_]]:
    """Whether a token has an expert on a node: bool (T, nodes) for experts (T, K).

    >>> needed_nodes(np.array([[0, 1], [1, 3]]), ExpertLayout(4, num_ranks=4, ranks_per_node=2)).astype(int).tolist()
    [[1, 0], [1, 1]]
    """
    needed = np.zeros((len(expert_ids), layout.num_nodes), np.bool_)
    np.put_along_axis(needed, layout.nodes(expert_ids), True, axis=1)
    return needed
