"""Which positions of a sequence the ranks of context parallelism hold, before and after they trade tokens for heads."""

from __future__ import annotations

from itertools import chain
from typing import Literal, cast

from mask_compression import Order, Range, SequenceShard
from parallel_config import ParallelPlan

Of = Literal["q", "k", "v"]
OF: tuple[Of, ...] = ("q", "k", "v")
"""What travels for attention."""

Ranges = tuple[Range, ...]
"""Positions of a sequence, in the order in which a tensor holds them."""


def shards(plan: ParallelPlan, seq_length: int) -> tuple[SequenceShard, ...]:
    """What each rank of the context-parallel group holds of a sequence."""
    order = cast(Order, plan.context_parallel_order)
    return tuple(SequenceShard(seq_length, plan.cp, rank, order) for rank in range(plan.cp))


def attention_blocks(plan: ParallelPlan, seq_length: int) -> tuple[Ranges, ...]:
    """The queries that ranks attend with: after an exchange within `ulysses_degree` consecutive ranks, each of them has
    the tokens of all, with a part of the heads. One entry for each such group."""
    held, degree = [shard.ranges for shard in shards(plan, seq_length)], plan.ulysses_degree
    return tuple(tuple(chain(*held[first : first + degree])) for first in range(0, plan.cp, degree))
