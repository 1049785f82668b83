"""What a unit of a model costs a rank for one micro-batch: what it keeps, and what others send it.

A unit says its costs beside what it computes (`Unit.costs`), in terms of what `OnRank` says about the rank: how many
tokens it has, which part of a dimension, and what crossing borders, attending and sending tokens to experts costs.

Kept is what the CPU kernels save between forward and backward, shared memory once. Left out are token ids, masks,
rotary angles and the places of rows that go to experts, and the working memory of the kernels but for logits, which may
be larger than all else.
"""

from __future__ import annotations

import math
from collections import Counter

from attrs import Factory, frozen
from parallel_config import ParallelPlan

from parallel_trainer.models.router import Routing
from parallel_trainer.parallel.weights import split_evenly


@frozen
class Costs:
    """Costs of a micro-batch; those of parts that run one after the other add up.

    kept:     elements between its forward and its backward.
    left:     elements that the first half of a split backward leaves for the second: both sides of each product.
    at_work:  elements of logits while they are made, beside what is kept; the largest of the parts counts.
    received: bytes from other ranks, forward and backward, by mesh axis. What depends on where tokens go is counted for
        even routing, under a name that says so.
    """

    kept: int = 0
    left: int = 0
    at_work: int = 0
    received: Counter[str] = Factory(Counter)

    def __add__(self, other: Costs) -> Costs:
        return Costs(
            self.kept + other.kept,
            self.left + other.left,
            max(self.at_work, other.at_work),
            self.received + other.received,
        )


def all_reduce(ranks: int, nbytes: int) -> int:
    """Bytes that a rank receives in an all-reduce, as `device_mesh.Traffic` counts them."""
    return round(2 * nbytes * (ranks - 1) / ranks)


def expected_nodes(routing: Routing, nodes: int) -> float:
    """On how many of `nodes` the experts of a token are on average, if all that a router may choose is as likely.

    A token chooses among the experts of `topk_group` groups; as long as nodes hold whole groups or parts of one, by the
    chance that a node is spared. Where borders cross, as if there were no groups.
    """
    groups, chosen = routing.groups, routing.topk_group
    if groups % nodes and nodes % groups:
        groups = chosen = 1
    on_node = max(1, groups // nodes)
    among, of_group = routing.experts // groups * chosen, routing.experts // nodes // on_node

    def sparing(here: int) -> int:
        """Choices that have so many groups on a node and none of its experts."""
        of_groups = math.comb(on_node, here) * math.comb(groups - on_node, chosen - here)
        return of_groups * math.comb(among - here * of_group, routing.top_k)

    spared = sum(map(sparing, range(min(on_node, chosen) + 1)))
    return nodes * (1 - spared / (math.comb(groups, chosen) * math.comb(among, routing.top_k)))


@frozen(eq=False)
class OnRank:
    """What a rank has of a micro-batch and of a model, and what is done there costs.

    tokens:        of the micro-batch within a region of split weights; between regions it has 1/tp of them.
    itemsize:      bytes of an element.
    loss_parallel: logits stay split over the vocabulary.
    """

    plan: ParallelPlan
    tp_rank: int
    tokens: int
    itemsize: int
    loss_parallel: bool

    @property
    def own_tokens(self) -> int:
        """Tokens of the micro-batch between regions of split weights."""
        return self.tokens // self.plan.tp

    def part(self, number: int) -> int:
        """How many of `number` heads, inner features or rows of a vocabulary are the rank's; at least one."""
        first, stop = split_evenly(number, self.plan.tp, self.tp_rank)
        return max(1, stop - first)

    def border(self, width: int) -> Costs:
        """`width` numbers for each token enter or leave a region of split weights, and as many gradients go back."""
        return Costs(received=Counter(tp=2 * (self.plan.tp - 1) * self.own_tokens * width * self.itemsize))

    def attention(self, heads: int, kv_heads: int, qk_size: int, v_size: int) -> Costs:
        """Attention of the rank's queries with `heads` heads, over the context-parallel ranks.

        Kept are queries, keys and values as attention takes them, of all ranks where they are gathered; a log-sum for
        each head; the result as attention keeps it and as the projection takes it, which in a ring is one array unless
        tokens and heads are traded in between.
        """
        plan, degree = self.plan, self.plan.ulysses_degree
        blocks, kv_heads = plan.cp // degree, math.lcm(kv_heads, degree)
        ring = blocks > 1 and plan.context_parallel_async
        results = 1 if ring and degree == 1 else 2
        keys_values = kv_heads * (qk_size + v_size)
        kept = heads * (1 + qk_size + results * v_size) + keys_values * (1 if ring else blocks)
        # Queries, keys and values there and back, the result there and back.
        traded = 2 * (heads * (qk_size + v_size) + keys_values) * self.tokens * self.itemsize * (degree - 1) // degree
        # Keys and values once around, and their gradients home; in a ring the backward pass needs them once more.
        rounds = 2 * (blocks - 1) + (blocks if ring else 0)
        return Costs(
            kept=self.tokens * kept,
            received=Counter(cp=traded + rounds * keys_values * self.tokens * self.itemsize),
        )

    def experts(self, hidden: int, routing: Routing) -> Costs:
        """Tokens sent to experts and back, for even routing.

        Kept are rows, results, gate, up and its sigmoid; left are rows, the experts' product, and gradients of results,
        gate and up: as many numbers.
        """
        rows = self.own_tokens * routing.top_k
        received = self._to_nodes(rows, hidden, routing) if self._by_nodes else self._to_ranks(rows, hidden, routing)
        numbers = rows * (2 * hidden + 3 * routing.inner)
        return Costs(kept=numbers, left=numbers, received=received)

    def balance(self, routing: Routing) -> Costs:
        """How often experts are chosen, over the ranks whose tokens the auxiliary loss balances together."""
        plan, of_tokens = self.plan, routing.experts * 8
        nbytes = of_tokens * (plan.local_batch_size if routing.balanced_over == "sequence" else 1)
        received = Counter(tp=all_reduce(plan.tp, nbytes))
        if routing.balanced_over == "global_batch":
            received["loss"] = all_reduce(plan.data_parallel * plan.cp, nbytes)
        else:
            received["cp"] = all_reduce(plan.cp, nbytes)
        return Costs(received=received)

    def prediction(self, hidden: int, vocab_size: int) -> Costs:
        """A loss of normed hidden states: they are kept, gathered, and a gradient for each of the logits."""
        tp, held = self.plan.tp, self.part(vocab_size)
        whole = tp > 1 and not self.loss_parallel
        if whole:
            received = self.tokens * (vocab_size - held) * self.itemsize
        else:  # the largest logit, the sum and the label's logit of each token
            received = all_reduce(tp, self.tokens * self.itemsize) + all_reduce(tp, 2 * self.tokens * 8)
        return self.border(hidden) + Costs(
            kept=self.tokens * (hidden + (vocab_size if whole else held)),
            left=self.tokens * (hidden + held),
            at_work=self.tokens * (held + whole * vocab_size),
            received=Counter(tp=received),
        )

    @property
    def _by_nodes(self) -> bool:
        return self.plan.moe_token_dispatcher_type == "alltoall_deredundancy"

    def _to_ranks(self, rows: int, hidden: int, routing: Routing) -> Counter[str]:
        """The plain dispatcher: how many rows, and the rows."""
        return Counter({"ep (even routing)": round(self._there_and_back(rows, hidden, routing, self.plan.ep))})

    def _to_nodes(self, rows: int, hidden: int, routing: Routing) -> Counter[str]:
        """The dispatcher that sends a token to each node once: tokens between nodes, the rows of experts within them.

        Between nodes also travel, for each row, the place that it goes to and three times its weight or the gradient.
        """
        per_node = self.plan.npu_nums_per_device
        nodes = self.plan.ep // per_node
        tokens = self.own_tokens * expected_nodes(routing, nodes)
        to_node = 4 * tokens * hidden * self.itemsize + rows * (8 + 3 * self.itemsize)
        between = 16 * (nodes - 1) + to_node * (nodes - 1) / nodes
        within = self._there_and_back(rows, hidden, routing, per_node)
        return Counter(
            {"ep within nodes (even routing)": round(within), "ep between nodes (even routing)": round(between)}
        )

    def _there_and_back(self, rows: int, hidden: int, routing: Routing, ranks: int) -> float:
        """Rows there and back in each pass, weights and their gradients in one, and how many are for each expert."""
        numbers = rows * (4 * hidden + 2) * self.itemsize + routing.experts * 8
        return numbers * (ranks - 1) / ranks
