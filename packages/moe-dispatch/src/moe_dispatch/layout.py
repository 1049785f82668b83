"""Which rank of an expert-parallel group holds which expert, and which ranks share a node."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from attrs import Factory, frozen

Array = npt.NDArray[Any]
Ints = npt.NDArray[np.int64]


@frozen
class ExpertLayout:
    """Rank r holds experts r·E/ranks to (r+1)·E/ranks - 1; a node is `ranks_per_node` consecutive ranks.

    Args:
        num_experts: E, a multiple of `num_ranks`.
        num_ranks: ranks of the expert-parallel group.
        ranks_per_node: all ranks are on one node if left out. The last node may have fewer.

    Raises ValueError for numbers below 1 and for experts that do not divide.

    >>> layout = ExpertLayout(num_experts=8, num_ranks=4, ranks_per_node=2)
    >>> layout.experts_per_rank, layout.num_nodes
    (2, 2)
    """

    num_experts: int
    num_ranks: int = 1
    ranks_per_node: int = Factory(lambda self: self.num_ranks, takes_self=True)

    def __attrs_post_init__(self) -> None:
        if min(self.num_experts, self.num_ranks, self.ranks_per_node) < 1:
            raise ValueError(
                f"expert layout with num_experts {self.num_experts}, num_ranks {self.num_ranks}, "
                f"ranks_per_node {self.ranks_per_node}: each must be 1 or more"
            )
        if self.num_experts % self.num_ranks:
            below = self.num_experts // self.num_ranks * self.num_ranks
            choices = [f"{number}" for number in (below, below + self.num_ranks) if number]
            divisors = [number for number in range(1, self.num_experts + 1) if self.num_experts % number == 0]
            raise ValueError(
                f"num_experts {self.num_experts} must be a multiple of expert_parallel {self.num_ranks}, the ranks of "
                f"the group: use {' or '.join(choices)} experts, or expert_parallel {', '.join(map(str, divisors))}"
            )

    @property
    def experts_per_rank(self) -> int:
        return self.num_experts // self.num_ranks

    @property
    def experts_per_node(self) -> int:
        return self.experts_per_rank * self.ranks_per_node

    @property
    def num_nodes(self) -> int:
        return -(-self.num_ranks // self.ranks_per_node)

    @property
    def node_of_rank(self) -> Ints:
        """The node of each rank, (num_ranks,)."""
        return np.arange(self.num_ranks) // self.ranks_per_node

    def nodes(self, expert_ids: Ints) -> Ints:
        """The node that holds each expert, of the same shape."""
        return expert_ids // self.experts_per_node


def check_array(x: object, name: str) -> None:
    """Raise TypeError for what is no NumPy array, such as a list."""
    if not isinstance(x, np.ndarray):
        raise TypeError(f"{name} are a {type(x).__name__}, but must be a NumPy array: pass numpy.asarray(value)")


def checked_expert_ids(expert_ids: Array, num_experts: int) -> Ints:
    """The ids as int64.

    Raises TypeError unless they are integers, ValueError unless (T, K) with K >= 1 and from 0 to num_experts-1.
    """
    check_array(expert_ids, "expert ids")
    if expert_ids.dtype.kind not in "iu":
        raise TypeError(f"expert ids have dtype {expert_ids.dtype}, but must be integers: pass ids.astype('int64')")
    if expert_ids.ndim != 2 or expert_ids.shape[1] < 1:
        raise ValueError(
            f"expert ids have shape {expert_ids.shape}, but must have shape (tokens, top_k) with top_k 1 or more; "
            "use ids.reshape(-1, top_k)"
        )
    if expert_ids.size and not (expert_ids.min() >= 0 and expert_ids.max() < num_experts):
        wrong = expert_ids[(expert_ids < 0) | (expert_ids >= num_experts)]
        raise ValueError(
            f"{wrong.size} of {expert_ids.size} expert ids do not exist, the first is {wrong[0]}: with num_experts "
            f"{num_experts} ids are 0 to {num_experts - 1}; a router of {num_experts} outputs gives such ids"
        )
    return expert_ids.astype(np.int64, copy=False)
