"""Collectives with gradients for MindSpore tensors on CPU (extra `mindspore`).

Each rank computes a loss from tensors it got from others. The gradients here are those of the *sum of all
ranks' losses*: what a rank sent out collects a gradient from every rank that used it. That gives the pairs

- `all_reduce`: backward all_reduce.
- `all_gather`: backward reduce_scatter, and the reverse.
- `all_to_all`: backward the all_to_all that brings everything back.

Where instead every rank of the group computes one and the same loss, as in tensor parallelism, a sum over
ranks would count it `size` times. Three functions are for that case (the first two are Megatron-LM's f and g,
arXiv:1909.08053, section 3):

- `copy_to_group`: forward nothing, backward all_reduce; where a value known to all enters work that is split.
- `reduce_from_group`: forward all_reduce, backward nothing; where the pieces of split work are added up.
- `gather_from_group`: forward all_gather, backward this rank's piece; where pieces of split work are joined.

`start_all_to_all`, and `start` for functions of one's own, return while messages are under way. They are two functions
with a tensor between them that carries nothing but their order, so the backward pass has the same overlap: it starts
where the forward ended, and ends where that started, after the gradients of all that was computed between the two.

A backward makes its collective call even if the gradient is zero, so all ranks of a group must
differentiate the same calls. In a group of one rank every function returns its input. Sums of bfloat16 and
float16 are accumulated in float32.

Tensor memory is passed to the communicator as it is and results are wrapped without a copy. A result made
this way borrows NumPy's memory, so `untyped_storage().resize_` must not be used on it; who wants to free a
gathered tensor under the tape, as FSDP does, gathers into a tensor of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
from attrs import define

try:
    from mindspore import Tensor
    from mindspore.common import _Function
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "device_mesh.autograd needs MindSpore, which is not installed: pip install 'device-mesh[mindspore]'",
        name=error.name,
    ) from error

from device_mesh.communicator import Array, Communicator


def all_reduce(x: Tensor, communicator: Communicator) -> Tensor:
    """The sum of every rank's `x`, of the same shape. Backward: the sum of every rank's gradient."""
    return x if communicator.size == 1 else _AllReduce.apply(x, communicator)


def copy_to_group(x: Tensor, communicator: Communicator) -> Tensor:
    """`x`, which all ranks hold alike. Backward: the sum of every rank's gradient."""
    return x if communicator.size == 1 else _CopyToGroup.apply(x, communicator)


def reduce_from_group(x: Tensor, communicator: Communicator) -> Tensor:
    """The sum of every rank's `x`, of the same shape. Backward: the gradient as it is, alike on all ranks."""
    return x if communicator.size == 1 else _ReduceFromGroup.apply(x, communicator)


def all_gather(x: Tensor, communicator: Communicator, *, dim: int = 0, sizes: Sequence[int] | None = None) -> Tensor:
    """Every rank's `x` joined along `dim` in rank order. Backward: reduce_scatter along `dim`.

    Args:
        x: this rank's piece, of one or more dimensions.
        communicator: the group.
        dim: the dimension to join; negative counts from the last.
        sizes: the pieces' sizes along `dim`, one for each rank; equal if left out.
    """
    _check_dim(x, dim, "all_gather")
    return x if communicator.size == 1 else _AllGather.apply(x, communicator, dim, sizes)


def gather_from_group(
    x: Tensor, communicator: Communicator, *, dim: int = 0, sizes: Sequence[int] | None = None
) -> Tensor:
    """As `all_gather`. Backward: this rank's piece along `dim` of the gradient, which is alike on all ranks."""
    _check_dim(x, dim, "gather_from_group")
    return x if communicator.size == 1 else _GatherFromGroup.apply(x, communicator, dim, sizes)


def reduce_scatter(
    x: Tensor, communicator: Communicator, *, dim: int = 0, sizes: Sequence[int] | None = None
) -> Tensor:
    """This rank's piece along `dim` of the sum of every rank's `x`. Backward: all_gather along `dim`.

    Args:
        x: of the same shape on every rank, with one or more dimensions.
        communicator: the group.
        dim: the dimension to divide; negative counts from the last.
        sizes: the pieces' sizes along `dim`, one for each rank; if left out, `dim` is divided equally and
        must divide.
    """
    _check_dim(x, dim, "reduce_scatter")
    return x if communicator.size == 1 else _ReduceScatter.apply(x, communicator, dim, sizes)


def start(
    forward: Callable[..., Callable[[], Array]],
    backward: Callable[[Array], Callable[..., Array | tuple[Array, ...]]],
    *inputs: Tensor,
    keep: bool = False,
) -> Callable[[], Tensor]:
    """Begin a function that communicates; what is returned is called, once, for its result.

    Args:
        forward: takes the inputs as arrays, starts, and returns what is called for the result.
        backward: takes the gradient by the result, starts, and returns what is called for the gradients by the inputs:
            an array, or a tuple of them.
        inputs: must be left unchanged until the result is there.
        keep: keep the inputs for the backward pass, where what `backward` returns is called with them.
    """
    journey = _Journey(forward, backward, keep)
    ticket = _Start.apply(journey, *inputs)
    return lambda: _End.apply(journey, ticket)


def all_to_all(
    x: Tensor,
    communicator: Communicator,
    *,
    split_dim: int = 0,
    concat_dim: int = 0,
    send_sizes: Sequence[int] | None = None,
    receive_sizes: Sequence[int] | None = None,
) -> Tensor:
    """Pieces exchanged between all pairs of ranks: piece j along `split_dim` goes to rank j, and the pieces that come
    are joined along `concat_dim` in rank order. Backward: gradients travel back.

    With the same dimension for both this is `Communicator.all_to_all`; with two, a dimension that was divided over the
    ranks becomes whole and the other is divided instead (Jacobs et al., "DeepSpeed Ulysses", arXiv:2309.14509).

    Args:
        x: the pieces for rank 0, 1, … one after the other along `split_dim`.
        communicator: the group.
        split_dim: the dimension to divide; negative counts from the last.
        concat_dim: the dimension to join; negative counts from the last.
        send_sizes: how much along the dimension goes to each rank.
        receive_sizes: how much comes from each rank. Without both the dimension is divided equally and must divide;
            with them the two dimensions must be the same.

    Raises:
        ValueError: `x` lacks a dimension, its size does not divide, or sizes are given for two different dimensions.
    """
    sizes = {"send_sizes": send_sizes, "receive_sizes": receive_sizes}
    return start_all_to_all(x, communicator, split_dim=split_dim, concat_dim=concat_dim, **sizes)()


def start_all_to_all(
    x: Tensor,
    communicator: Communicator,
    *,
    split_dim: int = 0,
    concat_dim: int = 0,
    send_sizes: Sequence[int] | None = None,
    receive_sizes: Sequence[int] | None = None,
) -> Callable[[], Tensor]:
    """Begin an `all_to_all`; what is returned is called, once, for its result, and `x` left unchanged until then."""
    _check_dim(x, split_dim, "all_to_all")
    _check_dim(x, concat_dim, "all_to_all")
    split, concat = split_dim % x.ndim, concat_dim % x.ndim
    if split != concat and (send_sizes is not None or receive_sizes is not None):
        raise ValueError(
            f"all_to_all from dim {split} to dim {concat} with sizes {send_sizes} and {receive_sizes}: pieces of "
            "different sizes join along the dimension that is divided only; use the same dim, or equal pieces"
        )
    if x.shape[split] % communicator.size and send_sizes is None:
        raise ValueError(
            f"all_to_all along dim {split} of a tensor of shape {tuple(x.shape)} over {communicator.size} ranks: "
            f"{x.shape[split]} must be a multiple of {communicator.size}, or send_sizes and receive_sizes be given"
        )
    if communicator.size == 1:
        return lambda: x
    there = partial(_start_exchange, communicator, split, concat, send_sizes, receive_sizes)
    back = partial(_start_exchange, communicator, concat, split, receive_sizes, send_sizes)
    return start(there, back, x)


@define(eq=False)
class _Journey:
    """What is under way between the two functions of a pair: the result, or in the backward pass the gradients."""

    forward: Callable[..., Callable[[], Array]]
    backward: Callable[[Array], Callable[..., Array | tuple[Array, ...]]]
    keep: bool
    _arriving: Callable[..., Any] | None = None

    def start(self, arriving: Callable[..., Any]) -> None:
        self._arriving = arriving

    def arrive(self, *arguments: Array) -> Any:
        assert self._arriving is not None, "what start() returns is called once, and so is each half of the backward"
        arriving, self._arriving = self._arriving, None
        return arriving(*arguments)


class _Start(_Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, journey: _Journey, *inputs: Tensor) -> Tensor:
        ctx.journey = journey
        if journey.keep:
            ctx.save_for_backward(*inputs)
        journey.start(journey.forward(*(tensor.asnumpy() for tensor in inputs)))
        return _ticket(inputs[0])

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor | None, ...]:
        kept = ctx.saved_tensors if ctx.journey.keep else ()
        gradients = ctx.journey.arrive(*(tensor.asnumpy() for tensor in kept))
        return None, *map(_tensor, gradients if isinstance(gradients, tuple) else (gradients,))


class _End(_Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, journey: _Journey, ticket: Tensor) -> Tensor:
        ctx.journey = journey
        return _tensor(journey.arrive())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor]:
        ctx.journey.start(ctx.journey.backward(grad.asnumpy()))
        return None, _ticket(grad)


class _AllReduce(_Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, x: Tensor, communicator: Communicator) -> Tensor:
        ctx.communicator = communicator
        return _tensor(communicator.all_reduce(x.asnumpy()))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _tensor(ctx.communicator.all_reduce(grad.asnumpy())), None


class _CopyToGroup(_Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, x: Tensor, communicator: Communicator) -> Tensor:
        ctx.communicator = communicator
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _tensor(ctx.communicator.all_reduce(grad.asnumpy())), None


class _ReduceFromGroup(_Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, x: Tensor, communicator: Communicator) -> Tensor:
        return _tensor(communicator.all_reduce(x.asnumpy()))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class _AllGather(_Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, x: Tensor, communicator: Communicator, dim: int, sizes: Sequence[int] | None) -> Tensor:
        ctx.arguments = communicator, dim, sizes
        return _tensor(_gather(x.asnumpy(), communicator, dim, sizes))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return _tensor(_scatter(grad.asnumpy(), *ctx.arguments)), None, None, None


class _GatherFromGroup(_Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, x: Tensor, communicator: Communicator, dim: int, sizes: Sequence[int] | None) -> Tensor:
        rows = [x.shape[dim]] * communicator.size if sizes is None else list(sizes)
        ctx.dim, ctx.start, ctx.rows = dim, sum(rows[: communicator.rank]), rows[communicator.rank]
        return _tensor(_gather(x.asnumpy(), communicator, dim, sizes))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        mine = np.moveaxis(grad.asnumpy(), ctx.dim, 0)[ctx.start : ctx.start + ctx.rows]
        return _tensor(np.moveaxis(mine, 0, ctx.dim).copy()), None, None, None


class _ReduceScatter(_Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, x: Tensor, communicator: Communicator, dim: int, sizes: Sequence[int] | None) -> Tensor:
        ctx.arguments = communicator, dim, sizes
        return _tensor(_scatter(x.asnumpy(), communicator, dim, sizes))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return _tensor(_gather(grad.asnumpy(), *ctx.arguments)), None, None, None


def _gather(x: Array, communicator: Communicator, dim: int, sizes: Sequence[int] | None) -> Array:
    return np.moveaxis(communicator.all_gather(np.moveaxis(x, dim, 0), sizes=sizes), 0, dim)


def _scatter(x: Array, communicator: Communicator, dim: int, sizes: Sequence[int] | None) -> Array:
    return np.moveaxis(communicator.reduce_scatter(np.moveaxis(x, dim, 0), sizes=sizes), 0, dim)


def _start_exchange(
    communicator: Communicator,
    split: int,
    concat: int,
    send_sizes: Sequence[int] | None,
    receive_sizes: Sequence[int] | None,
    x: Array,
) -> Callable[[], Array]:
    if split == concat:
        sent = np.moveaxis(x, split, 0)
        rows = len(sent) if receive_sizes is None else sum(receive_sizes)
        received = np.empty((rows, *sent.shape[1:]), x.dtype)
    else:
        sent = np.stack(np.split(x, communicator.size, split))
        received = np.empty_like(sent)
    request = communicator.iall_to_all(sent, send_sizes=send_sizes, receive_sizes=receive_sizes, out=received)

    def arrived() -> Array:
        request.wait()
        return np.moveaxis(received, 0, split) if split == concat else np.concatenate(list(received), concat)

    return arrived


def _tensor(x: Array) -> Tensor:
    return Tensor.from_numpy(np.asarray(x, order="C"))


def _ticket(like: Tensor) -> Tensor:
    return Tensor(np.zeros(1, np.float32), like.dtype)


def _check_dim(x: Tensor, dim: int, call: str) -> None:
    if not -x.ndim <= dim < x.ndim:
        choice = f"use {-x.ndim} to {x.ndim - 1}" if x.ndim else "it has none; reshape it to (1,) first"
        raise ValueError(f"{call} along dim {dim} of a tensor of shape {tuple(x.shape)}: {choice}")
