"""Several all-to-all exchanges under way at the same time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from device_mesh import Communicator
from device_mesh.communicator import Array, Request
from mindspore import Tensor
from mindspore.common import _Function


def exchange_together(
    tensors: Sequence[Tensor], group: Communicator, *, split_dim: int, concat_dim: int
) -> tuple[Tensor, ...]:
    """`device_mesh.autograd.all_to_all` of each tensor; the messages of one travel while the next is packed.

    Backward: likewise, between the dimensions exchanged.
    """
    if group.size == 1:
        return tuple(tensors)
    return _ExchangeTogether.apply(group, split_dim, concat_dim, *tensors)


class _ExchangeTogether(_Function):
    @staticmethod
    def forward(ctx: Any, group: Communicator, split: int, concat: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.arguments = group, concat, split
        return _tensors(_exchange([tensor.asnumpy() for tensor in tensors], group, split, concat))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, None, *_tensors(_exchange([grad.asnumpy() for grad in gradients], *ctx.arguments))


def _exchange(arrays: Sequence[Array], group: Communicator, split: int, concat: int) -> list[Array]:
    requests: list[Request] = []
    received: list[list[Array]] = []
    others = [peer for peer in range(group.size) if peer != group.rank]
    for number, array in enumerate(arrays):
        pieces = [np.ascontiguousarray(piece) for piece in np.split(array, group.size, split)]
        arriving = [np.empty_like(piece) for piece in pieces]
        arriving[group.rank] = pieces[group.rank]
        requests += [group.irecv(arriving[peer], peer, tag=number) for peer in others]
        requests += [group.isend(pieces[peer], peer, tag=number) for peer in others]
        received.append(arriving)
    for request in requests:
        request.wait()
    return [np.concatenate(pieces, concat) for pieces in received]


def _tensors(arrays: Sequence[Array]) -> tuple[Tensor, ...]:
    return tuple(Tensor.from_numpy(array) for array in arrays)
