"""Ring attention: blocks of keys and values travel from rank to rank while each rank computes with the one in hand.

Partial results over different blocks merge by the logarithm of their sums of exponentials. In the backward pass the
blocks travel once more, and the gradient of each goes with it and comes home complete. However many ranks there are, a
rank holds two blocks that travel beside its own, and in the backward pass two of gradients as well. Blocks of 16 bits
travel as they are; the arithmetic, partial results and gradients are float32 then.
Liu, Zaharia and Abbeel, "Ring Attention", arXiv:2310.01889.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from attrs import frozen
from device_mesh import Communicator
from device_mesh.communicator import Array, Request
from device_mesh.half import wide
from mask_compression import CompressedMask
from mask_compression.attention import attention, merge
from mask_compression.attention_backward import attention_backward
from mindspore import Tensor
from mindspore.common import _Function

from parallel_trainer.parallel.sequence import Of, Ranges

Block = tuple[Array, ...]

_FIRST_GRADIENT_TAG = 2


@frozen(eq=False)
class RingAttention:
    """An `Attention` over the ranks of `group`; `blocks`: the positions that each of them holds."""

    group: Communicator
    blocks: Sequence[Ranges]

    def bring(self, x: Tensor, of: Of) -> Callable[[], Tensor]:
        """See `Attention.bring`: nothing is sent yet."""
        return lambda: x

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, *, scale: float, mask: CompressedMask) -> Tensor:
        return _Ring.apply(q, k, v, scale, mask, self.group, self.blocks)


class _Ring(_Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        scale: float,
        mask: CompressedMask,
        group: Communicator,
        blocks: Sequence[Ranges],
    ) -> Tensor:
        queries, own = wide(q.asnumpy()), blocks[group.rank]
        merged: tuple[Array, Array] | None = None
        for source, (keys, values) in travelling(group, (k.asnumpy(), v.asnumpy())):
            # Of a block that no query here sees the kernel visits no tile, and merging it changes nothing.
            held = {"query_ranges": own, "key_ranges": blocks[source]}
            part = attention(queries, wide(keys), wide(values), mask, scale=scale, **held)
            merged = part if merged is None else merge(*merged, *part)
        assert merged is not None, "a rank's own block comes first"
        out, ctx.log_sums = merged
        ctx.save_for_backward(q, k, v)
        ctx.out, ctx.scale, ctx.mask, ctx.group, ctx.blocks = out, scale, mask, group, blocks
        return Tensor.from_numpy(out.astype(q.asnumpy().dtype, copy=False))

    @staticmethod
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v = (tensor.asnumpy() for tensor in ctx.saved_tensors)
        group, own = ctx.group, ctx.blocks[ctx.group.rank]
        gradients, queries = wide(d_out.asnumpy()), wide(q)
        dq = np.zeros_like(queries)
        home = Homecoming(group)
        for source, (keys, values) in travelling(group, (k, v)):
            home.expect()
            dq_part, *part = attention_backward(
                gradients,
                queries,
                wide(keys),
                wide(values),
                ctx.out,
                ctx.log_sums,
                ctx.mask,
                scale=ctx.scale,
                query_ranges=own,
                key_ranges=ctx.blocks[source],
            )
            dq += dq_part
            home.pass_on(part)
        rounded = (gradient.astype(q.dtype, copy=False) for gradient in (dq, *home.arrived()))
        return *map(Tensor.from_numpy, rounded), None, None, None, None


def travelling(group: Communicator, own: Block) -> Iterator[tuple[int, Block]]:
    """Every rank's block once, with the rank that it came from, this rank's own first.

    While the caller works with a block, it is sent on to the next rank and another is received from the one before: two
    blocks beside the own one. A block must be done with when the next is asked for.
    """
    size, rank = group.size, group.rank
    spare = [tuple(np.empty_like(array) for array in own) for _ in range(min(2, size - 1))]
    hand = tuple(np.ascontiguousarray(array) for array in own)
    for turn in range(size):
        requests: list[Request] = []
        arriving = hand
        if turn < size - 1:
            arriving = spare[turn % 2]
            requests += [group.irecv(array, (rank - 1) % size, tag=tag) for tag, array in enumerate(arriving)]
            requests += [group.isend(array, (rank + 1) % size, tag=tag) for tag, array in enumerate(hand)]
        yield (rank - turn) % size, hand
        for request in requests:
            request.wait()
        hand = arriving


class Homecoming:
    """Gradients that go with their blocks around the ring, each rank adding its part, and arrive where they belong.

    In every turn: `expect` before the work, `pass_on` with this rank's part after it; `arrived` after the last turn.
    """

    def __init__(self, group: Communicator) -> None:
        self._group = group
        self._sums: Block = ()
        """The sums sent last; while they leave, the next arrive in the other buffer."""
        self._arriving: Block = ()
        self._receiving: list[Request] = []
        self._sending: list[Request] = []

    def expect(self) -> None:
        """Start to receive what the ranks that had the block in hand before have summed; in the first turn nothing."""
        if self._sums:
            before = (self._group.rank - 1) % self._group.size
            self._arriving = self._arriving or tuple(np.empty_like(array) for array in self._sums)
            self._receiving = [
                self._group.irecv(array, before, tag=_FIRST_GRADIENT_TAG + number)
                for number, array in enumerate(self._arriving)
            ]

    def pass_on(self, part: Sequence[Array]) -> None:
        """Add this rank's part and send the sum on."""
        if not self._sums:
            self._sums = tuple(np.ascontiguousarray(array) for array in part)
        else:
            self._swap()
            for total, array in zip(self._sums, part, strict=True):
                total += array
        after = (self._group.rank + 1) % self._group.size
        self._sending = [
            self._group.isend(array, after, tag=_FIRST_GRADIENT_TAG + number) for number, array in enumerate(self._sums)
        ]

    def arrived(self) -> Block:
        """The whole gradient of this rank's own block."""
        self.expect()
        self._swap()
        return self._sums

    def _swap(self) -> None:
        for request in (*self._receiving, *self._sending):
            request.wait()
        self._sums, self._arriving = self._arriving, self._sums
