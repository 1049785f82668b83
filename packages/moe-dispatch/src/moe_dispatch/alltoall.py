"""The plain dispatcher: a copy of a token for each of its experts, by all-to-all."""

from __future__ import annotations

import numpy as np
from attrs import field, frozen
from device_mesh import Communicator

from moe_dispatch.exchange import BytesSent, Exchange, Link, Spread
from moe_dispatch.layout import Array, ExpertLayout
from moe_dispatch.plan import arrival, plan
from moe_dispatch.route import Route


@frozen(eq=False)
class AllToAllDispatcher:
    """Sends each token straight to the ranks of its experts.

    There are no padding rows: an expert without tokens gets an empty group, a rank without rows an array of none.

    Args:
        group: the expert-parallel ranks; rank r holds experts r·E/ranks to (r+1)·E/ranks - 1.
        num_experts: E, a multiple of the ranks (else ValueError).
        ranks_per_node: consecutive ranks of the group on one node, for the account of bytes only; all if left out.

    Attributes:
        layout: experts and nodes.
        sent: bytes this rank has sent so far.
    """

    group: Communicator
    num_experts: int
    ranks_per_node: int | None = None
    layout: ExpertLayout = field(init=False)
    sent: BytesSent = field(init=False, factory=BytesSent)
    _link: Link = field(init=False)

    @layout.default
    def _lay_out(self) -> ExpertLayout:
        size = self.group.size
        return ExpertLayout(self.num_experts, size, size if self.ranks_per_node is None else self.ranks_per_node)

    @_link.default
    def _connect(self) -> Link:
        return Link(self.group, self.layout.node_of_rank, self.sent)

    def route(self, expert_ids: Array) -> Route:
        """The way of tokens whose experts are `expert_ids`, integers (T, K), K >= 1; T may differ between ranks.

        Collective: the ranks tell each other how many rows they will send. Raises TypeError and ValueError as
        `moe_dispatch.plan` does.
        """
        made = plan(expert_ids, self.layout)
        coming = arrival(self._link.swap(made.counts.reshape(self.layout.num_ranks, -1)))
        exchange = Exchange(self._link, made.order, made.send_sizes, coming)
        num_tokens, top_k = expert_ids.shape
        spread = Spread.over(exchange, np.arange(num_tokens * top_k) // top_k, num_tokens)
        return Route(coming.counts, num_tokens, top_k, (spread,))
