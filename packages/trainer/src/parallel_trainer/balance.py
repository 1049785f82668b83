"""How evenly the ranks of context parallelism share the work of attention, before anything is trained."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from attrs import evolve, frozen
from mask_compression import CompressedMask, Order, visible_pairs
from parallel_config import ParallelPlan

from parallel_trainer.job import Job
from parallel_trainer.parallel.sequence import attention_blocks

ORDERS: tuple[Order, ...] = ("contiguous", "zigzag")


@frozen
class AttentionWork:
    """The attention of one step, counted in pairs of a query and a key that it sees, for one head of one layer.

    pairs:          of the global batch.
    causal_pairs:   what they would be if documents were not kept apart.
    slowest_to_mean: by order of the sequence, work of the slowest rank over that of the mean rank, where the ranks of
        a context-parallel group wait for each other in every micro-batch. Only the orders that the length allows.
    """

    pairs: int
    causal_pairs: int
    slowest_to_mean: dict[Order, float]


def attention_work(job: Job, step: int) -> AttentionWork:
    """The attention of step `step`, counted from 0, on the samples that it trains on."""
    length = job.seq_length
    masks = [
        batch.mask
        for shard_index in range(job.plan.data_parallel)
        for batch in job.loader(shard_index).micro_batches(step * job.plan.global_batch_size)
    ]
    return AttentionWork(
        pairs=sum(mask.visible_pairs for mask in masks),
        causal_pairs=sum(mask.rows for mask in masks) * length * (length + 1) // 2,
        slowest_to_mean={order: _slowest_to_mean(job.plan, order, masks) for order in _orders(job.plan, length)},
    )


def _orders(plan: ParallelPlan, length: int) -> list[Order]:
    return [order for order in ORDERS if length % (2 * plan.cp if order == "zigzag" else plan.cp) == 0]


def _slowest_to_mean(plan: ParallelPlan, order: Order, masks: Sequence[CompressedMask]) -> float:
    """Ranks that share a block of tokens by heads have equal work: one number for each block will do."""
    blocks = attention_blocks(evolve(plan, context_parallel_order=order), masks[0].seq_length)
    pairs = np.array([[visible_pairs(mask, block) for block in blocks] for mask in masks])
    return float(pairs.max(axis=1).sum() / pairs.mean(axis=1).sum())
