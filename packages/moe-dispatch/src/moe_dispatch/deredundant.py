"""The dispatcher that sends a token to each node at most once (`alltoall_deredundancy`).

Rank i of a node talks to rank i of every other node (*outer*) and to the ranks of its own node (*inner*). A token goes
to rank i of each node that holds one of its experts, and from there to the experts. On the way back each node adds up
its weighted results before they leave it.
"""

from __future__ import annotations

import numpy as np
from attrs import field, frozen
from device_mesh import Communicator

from moe_dispatch.exchange import BytesSent, Exchange, Link, Spread
from moe_dispatch.layout import Array, ExpertLayout, Ints, checked_expert_ids
from moe_dispatch.node_plan import plan_nodes
from moe_dispatch.plan import Arrival, arrival, count, stable_order, starts_of
from moe_dispatch.route import Route


@frozen(eq=False)
class DeredundantDispatcher:
    """Routes as `AllToAllDispatcher` does, with fewer bytes between nodes; results are equal up to rounding.

    Where the reference gathers all tokens of all nodes, only the tokens that a node needs are sent to it.

    Args:
        group: the expert-parallel ranks; rank r holds experts r·E/ranks to (r+1)·E/ranks - 1. Making a dispatcher
            is collective over them.
        num_experts: E, a multiple of the ranks.
        ranks_per_node: consecutive ranks of the group on one node; the ranks are a multiple of it.

    Attributes:
        layout: experts and nodes.
        sent: bytes this rank has sent so far.

    Raises ValueError, before it talks to other ranks, for numbers that do not divide.
    """

    group: Communicator
    num_experts: int
    ranks_per_node: int
    layout: ExpertLayout = field(init=False)
    sent: BytesSent = field(init=False, factory=BytesSent)
    _outer: Link = field(init=False)
    _inner: Link = field(init=False)

    @layout.default
    def _lay_out(self) -> ExpertLayout:
        size, per_node = self.group.size, self.ranks_per_node
        layout = ExpertLayout(self.num_experts, size, per_node)
        if size % per_node:
            divisors = [str(number) for number in range(1, size + 1) if size % number == 0]
            raise ValueError(
                f"expert_parallel {size}, the ranks of the group, must be npu_nums_per_device (ranks_per_node) "
                f"{per_node} or a multiple of it: use npu_nums_per_device {', '.join(divisors)}, or expert_parallel "
                f"{-(-size // per_node) * per_node}, or the plain alltoall"
            )
        return layout

    @_outer.default
    def _connect_outer(self) -> Link:
        place = self.group.rank % self.ranks_per_node
        return Link(self.group.split(place), np.arange(self.layout.num_nodes), self.sent)

    @_inner.default
    def _connect_inner(self) -> Link:
        node = self.group.rank // self.ranks_per_node
        return Link(self.group.split(node), np.zeros(self.ranks_per_node, np.int64), self.sent)

    def route(self, expert_ids: Array) -> Route:
        """The way of tokens whose experts are `expert_ids`, integers (T, K), K >= 1; T may differ between ranks.

        Collective: three exchanges of numbers, 8 bytes for each (token, expert) the longest. Raises TypeError and
        ValueError as `moe_dispatch.plan` does.
        """
        made = plan_nodes(checked_expert_ids(expert_ids, self.num_experts), self.layout)
        num_tokens, top_k = expert_ids.shape
        coming_tokens, coming_slots = self._outer.swap(np.stack((made.token_sizes, made.slot_sizes), axis=1)).T
        to_nodes = Exchange(self._outer, made.token_order, made.token_sizes, _as_they_come(coming_tokens))
        tokens = Spread.over(to_nodes, made.owners, num_tokens)
        slots = Exchange(self._outer, made.slot_order, made.slot_sizes, _as_they_come(coming_slots))

        places, experts = np.divmod(slots.there(made.codes), self.layout.experts_per_node)
        origins = np.repeat(np.arange(self.layout.num_nodes), coming_slots)
        within = self._within_node(experts, origins)
        to_experts = Spread.over(within, places + starts_of(coming_tokens)[origins], int(coming_tokens.sum()))
        return Route(within.arrival.counts, num_tokens, top_k, (tokens, to_experts), (slots,))

    def _within_node(self, experts: Ints, origins: Ints) -> Exchange:
        """Slots that came to this rank, to the experts of its node; `origins` are the nodes that they came from."""
        nodes, ranks, num_experts = self.layout.num_nodes, self.ranks_per_node, self.layout.experts_per_node
        counts = count(experts * nodes + origins, num_experts * nodes).reshape(ranks, -1, nodes)
        return Exchange(
            self._inner,
            stable_order(experts, num_experts),
            counts.sum((1, 2)),
            arrival(self._inner.swap(counts)),
        )


def _as_they_come(receive_sizes: Ints) -> Arrival:
    return Arrival(receive_sizes, receive_sizes, None)
