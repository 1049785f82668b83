"""How evenly the ranks of context parallelism share the work of attention, before anything is trained."""

from __future__ import annotations

import numpy as np
from attrs import frozen
from mask_compression import Order, visible_pairs, work_per_rank

from parallel_trainer.job import Job

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
    cp, length = job.plan.cp, job.seq_length
    masks = [
        batch.mask
        for shard_index in range(job.plan.data_parallel)
        for batch in job.loader(shard_index).micro_batches(step)
    ]
    possible = [order for order in ORDERS if length % (2 * cp if order == "zigzag" else cp) == 0]
    work = {order: np.array([work_per_rank(mask, cp, order) for mask in masks]) for order in possible}
    return AttentionWork(
        pairs=sum(visible_pairs(mask, [(0, length)]) for mask in masks),
        causal_pairs=sum(mask.rows for mask in masks) * length * (length + 1) // 2,
        slowest_to_mean={
            order: float(pairs.max(axis=1).sum() / pairs.mean(axis=1).sum()) for order, pairs in work.items()
        },
    )
