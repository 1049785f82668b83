"""Context parallelism: every rank holds a part of each sequence, and attention sees the whole of it.

A model's blocks call an `Attention` on the queries, keys and values of the rank's own tokens. Which one decides what is
communicated:

- `LocalAttention`: nothing. The rank has all tokens.
- `GatheredAttention` (colossal): keys and values of all ranks are gathered, queries stay.
- `RingAttention` (colossal, asynchronous): see `ring_attention.py`.
- `UlyssesAttention`: tokens are traded for heads before and back after another attention, which then sees more tokens
  of fewer heads. Around `LocalAttention` this is ulysses, around one of the colossal two it is hybrid.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from typing import Any, Protocol

import numpy as np
from attrs import evolve, frozen
from device_mesh import Communicator, autograd
from device_mesh.half import wide
from mask_compression import CompressedMask, SequenceShard
from mindspore import Tensor
from mindspore.common import _Function
from parallel_config import ParallelPlan

from parallel_trainer.batch import MicroBatch, look_ahead
from parallel_trainer.kernels.interface import Kernels
from parallel_trainer.parallel.ring_attention import RingAttention
from parallel_trainer.parallel.sequence import Of, Ranges, attention_blocks


class Attention(Protocol):
    """Softmax attention of the rank's own tokens, within what the mask lets them see of the whole sequences.

    Queries, keys and values are each given to `bring` as soon as they are made, and may travel while the next are. Both
    methods are collective over the context-parallel group, and so is what `bring` returns.
    """

    def bring(self, x: Tensor, of: Of) -> Callable[[], Tensor]:
        """Send q (B, S, heads, D), k (B, S, kv_heads, D) or v (B, S, kv_heads, Dv) of the rank's S tokens to where they
        attend; `of` says which. What is returned is called, once, for what to attend with."""

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, *, scale: float, mask: CompressedMask) -> Tensor:
        """Of queries, keys and values that were brought, the result for the rank's own tokens, (B, S, heads, Dv).

        mask: of the B whole sequences.
        """


class Here:
    """Attention whose queries, keys and values stay on the rank that made them until all are there."""

    def bring(self, x: Tensor, of: Of) -> Callable[[], Tensor]:
        """See `Attention.bring`: nothing is sent."""
        return lambda: x


def cut(batch: MicroBatch, shard: SequenceShard) -> MicroBatch:
    """The tokens of every row that a rank holds, with their labels, which were shifted before; the mask stays whole."""
    if shard.cp == 1:
        return batch
    return evolve(
        batch,
        input_ids=shard.take(batch.input_ids),
        position_ids=shard.take(batch.position_ids),
        labels=None if batch.labels is None else shard.take(batch.labels),
        loss_mask=None if batch.loss_mask is None else shard.take(batch.loss_mask),
        ahead=None if batch.ahead is None else cut(batch.ahead, shard),
    )


def own_tokens(batches: Iterable[MicroBatch], shard: SequenceShard, losses: int) -> Iterator[MicroBatch]:
    """Of whole rows the part that a rank holds, for a model with so many losses."""
    if losses > 1:
        batches = map(look_ahead, batches)
    return (cut(batch, shard) for batch in batches)


def build_attention(kernels: Kernels, plan: ParallelPlan, seq_length: int, group: Communicator) -> Attention:
    """The attention that a plan asks for. `group`: the context-parallel ranks. Collective over them."""
    if plan.cp == 1:
        return LocalAttention(kernels)
    degree = plan.ulysses_degree
    blocks = attention_blocks(plan, seq_length)
    outer = group if degree == 1 else group.split(group.rank % degree)
    inner: Attention
    if len(blocks) == 1:
        inner = LocalAttention(kernels, blocks[0])
    elif plan.context_parallel_async:
        inner = RingAttention(outer, blocks)
    else:
        inner = GatheredAttention(kernels, outer, blocks)
    if degree == 1:
        return inner
    return UlyssesAttention(group.split(group.rank // degree), inner, under_way=plan.context_parallel_async)


@frozen(eq=False)
class LocalAttention(Here):
    """Attention of a rank that has all tokens; `ranges`: in which order, None for that of the sequence."""

    kernels: Kernels
    ranges: Ranges | None = None

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, *, scale: float, mask: CompressedMask) -> Tensor:
        return self.kernels.attention(q, k, v, scale, mask, query_ranges=self.ranges, key_ranges=self.ranges)


@frozen(eq=False)
class GatheredAttention(Here):
    """Keys and values of all ranks of `group` are gathered before attention, and their gradients reduced after it.

    blocks: the positions that each rank of the group holds.
    """

    kernels: Kernels
    group: Communicator
    blocks: Sequence[Ranges]

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, *, scale: float, mask: CompressedMask) -> Tensor:
        k, v = (autograd.all_gather(x, self.group, dim=1) for x in (k, v))
        return self.kernels.attention(
            q,
            k,
            v,
            scale,
            mask,
            query_ranges=self.blocks[self.group.rank],
            key_ranges=tuple(chain(*self.blocks)),
        )


@frozen(eq=False)
class UlyssesAttention:
    """Every rank of `group` gives up heads for tokens, attends with `inner`, and gets its tokens back with all heads.

    Key/value heads that the group's size does not divide are copied until it does; their gradients are summed. With
    `under_way` queries travel while keys are computed, and both while values are; in the backward pass the gradients of
    those that came first travel while that of the last is used.
    Jacobs et al., "DeepSpeed Ulysses", arXiv:2309.14509.
    """

    group: Communicator
    inner: Attention
    under_way: bool = False

    def bring(self, x: Tensor, of: Of) -> Callable[[], Tensor]:
        """See `Attention.bring`: all tokens of the group come, with a part of the heads."""
        heads = x.shape[2]
        repeated = repeat_heads(x, math.lcm(heads, self.group.size) // heads)
        arriving = autograd.start_all_to_all(repeated, self.group, split_dim=2, concat_dim=1)
        if self.under_way:
            return arriving
        brought = arriving()
        return lambda: brought

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, *, scale: float, mask: CompressedMask) -> Tensor:
        out = self.inner(q, k, v, scale=scale, mask=mask)
        return autograd.all_to_all(out, self.group, split_dim=1, concat_dim=2)


class _RepeatHeads(_Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, copies: int) -> Tensor:
        ctx.copies = copies
        return Tensor.from_numpy(np.repeat(x.asnumpy(), copies, axis=2))

    @staticmethod
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor, None]:
        rows, tokens, heads, size = d_out.shape
        of_copies = d_out.asnumpy().reshape(rows, tokens, heads // ctx.copies, ctx.copies, size)
        return Tensor.from_numpy(wide(of_copies).sum(axis=3).astype(of_copies.dtype, copy=False)), None


def repeat_heads(x: Tensor, copies: int) -> Tensor:
    """x (B, S, heads, D) with each head `copies` times in a row; the gradient of a head is the sum over its copies."""
    return x if copies == 1 else _RepeatHeads.apply(x, copies)
