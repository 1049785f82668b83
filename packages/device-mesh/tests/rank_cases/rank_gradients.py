"""Gradients of the collectives in MindSpore against formulas in NumPy."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from device_mesh import Communicator
from rank_support import (
    case,
    check_equal,
    everyone,
    make,
    raises,
    reduced,
    uneven,
)

GRADIENT_WORLDS = (1, 2, 4, 8)
FORMS = ("float32 contiguous", "float16 contiguous", "bfloat16 contiguous", "float64 contiguous", "float64 transposed")


def gradient(
    call: Callable[[Any], Any], x: np.ndarray, weight: np.ndarray, layout: str = "contiguous"
) -> tuple[np.ndarray, np.ndarray]:
    """`call(x)` and the gradient of sum(weight * call(x)) by x, both through MindSpore."""
    import mindspore
    from mindspore import Tensor

    def loss(x: Tensor) -> tuple[Tensor, Tensor]:
        y = call(x.permute(1, 0) if layout == "transposed" else x)
        scaled = y * Tensor(_as_in_mindspore(weight))
        summed = scaled.permute(1, 0) if layout == "transposed" else scaled
        return (summed.float() if summed.dtype == mindspore.bfloat16 else summed).sum(), y  # has no sum on CPUs

    given = np.ascontiguousarray(x.T) if layout == "transposed" else x
    with operators_at_once():
        (_, y), grad = mindspore.value_and_grad(loss, has_aux=True)(Tensor(_as_in_mindspore(given)))
    y, grad = (tensor.asnumpy().view(x.dtype) for tensor in (y, grad.reshape(given.shape)))
    return y, grad.T if layout == "transposed" else grad


def _as_in_mindspore(x: np.ndarray) -> np.ndarray:
    from mindspore.common.np_dtype import bfloat16

    return x.view(bfloat16) if x.dtype.name == "bfloat16" else x


@contextmanager
def operators_at_once() -> Iterator[None]:
    """MindSpore runs operators in the calling thread: small ones are ten times faster where ranks share cores."""
    import mindspore

    mindspore.set_context(pynative_synchronize=True)
    try:
        yield
    finally:
        mindspore.set_context(pynative_synchronize=False)


@case(FORMS, worlds=GRADIENT_WORLDS, modes=("plain",), mccl=())
def gradient_of_all_reduce(comm: Communicator, form: str) -> None:
    from device_mesh import autograd

    dtype, layout = form.split()
    x, weight = everyone(comm, (4, 3), dtype), everyone(comm, (4, 3), dtype, salt=1)
    y, grad = gradient(lambda t: autograd.all_reduce(t, comm), x[comm.rank], weight[comm.rank], layout)
    check_equal(y, reduced(x, "sum"), dtype, exact=False)
    check_equal(grad, reduced(weight, "sum"), dtype, exact=False)


@case(FORMS, worlds=GRADIENT_WORLDS, modes=("plain",), mccl=())
def gradient_of_copy_to_group(comm: Communicator, form: str) -> None:
    from device_mesh import autograd

    dtype, layout = form.split()
    x, weight = make(0, (4, 3), dtype), everyone(comm, (4, 3), dtype, salt=1)
    y, grad = gradient(lambda t: autograd.copy_to_group(t, comm), x, weight[comm.rank], layout)
    check_equal(y, x, dtype)
    check_equal(grad, reduced(weight, "sum"), dtype, exact=False)


@case(FORMS, worlds=GRADIENT_WORLDS, modes=("plain",), mccl=())
def gradient_of_reduce_from_group(comm: Communicator, form: str) -> None:
    from device_mesh import autograd

    dtype, layout = form.split()
    x, weight = everyone(comm, (4, 3), dtype), make(0, (4, 3), dtype, salt=1)
    y, grad = gradient(lambda t: autograd.reduce_from_group(t, comm), x[comm.rank], weight, layout)
    check_equal(y, reduced(x, "sum"), dtype, exact=False)
    check_equal(grad, weight, dtype)


@case(FORMS, (0, -1), ("even", "uneven"), worlds=GRADIENT_WORLDS, modes=("plain",), mccl=())
def gradient_of_all_gather(comm: Communicator, form: str, dim: int, kind: str) -> None:
    from device_mesh import autograd

    dtype, layout = form.split()
    sizes = uneven(comm.size) if kind == "uneven" and comm.size > 1 else [2] * comm.size
    pieces = [make(rank, (rows, 3), dtype) for rank, rows in enumerate(sizes)]
    weight = everyone(comm, (sum(sizes), 3), dtype, salt=1)
    start = sum(sizes[: comm.rank])
    turn = np.asarray if dim == 0 else np.transpose
    y, grad = gradient(
        lambda t: autograd.all_gather(t, comm, dim=dim, sizes=sizes if kind == "uneven" else None),
        np.ascontiguousarray(turn(pieces[comm.rank])),
        np.ascontiguousarray(turn(weight[comm.rank])),
        layout,
    )
    check_equal(y, turn(np.concatenate(pieces)), dtype)
    expected = reduced(weight, "sum")[start : start + sizes[comm.rank]]
    check_equal(grad, turn(expected), dtype, exact=False)


@case(FORMS, (0, -1), ("even", "uneven"), worlds=GRADIENT_WORLDS, modes=("plain",), mccl=())
def gradient_of_reduce_scatter(comm: Communicator, form: str, dim: int, kind: str) -> None:
    from device_mesh import autograd

    dtype, layout = form.split()
    sizes = uneven(comm.size) if kind == "uneven" and comm.size > 1 else [2] * comm.size
    x = everyone(comm, (sum(sizes), 3), dtype)
    weights = [make(rank, (rows, 3), dtype, salt=1) for rank, rows in enumerate(sizes)]
    start = sum(sizes[: comm.rank])
    turn = np.asarray if dim == 0 else np.transpose
    y, grad = gradient(
        lambda t: autograd.reduce_scatter(t, comm, dim=dim, sizes=sizes if kind == "uneven" else None),
        np.ascontiguousarray(turn(x[comm.rank])),
        np.ascontiguousarray(turn(weights[comm.rank])),
        layout,
    )
    check_equal(y, turn(reduced(x, "sum")[start : start + sizes[comm.rank]]), dtype, exact=False)
    check_equal(grad, turn(np.concatenate(weights)), dtype)


@case(FORMS, ("even", "uneven"), worlds=GRADIENT_WORLDS, modes=("plain",), mccl=())
def gradient_of_all_to_all(comm: Communicator, form: str, kind: str) -> None:
    from device_mesh import autograd

    dtype, layout = form.split()
    ranks = range(comm.size)
    rows = np.array([[(i + 2 * j) % 3 if kind == "uneven" else 2 for j in ranks] for i in ranks])
    if comm.size == 1:
        rows[:] = 2
    blocks = [[make(i, (rows[i, j], 2), dtype, salt=j) for j in ranks] for i in ranks]
    weights = [[make(j, (rows[i, j], 2), dtype, salt=100 + i) for j in ranks] for i in ranks]
    sizes = {"send_sizes": rows[comm.rank].tolist(), "receive_sizes": rows[:, comm.rank].tolist()}
    y, grad = gradient(
        lambda t: autograd.all_to_all(t, comm, **(sizes if kind == "uneven" else {})),
        np.concatenate(blocks[comm.rank]),
        np.concatenate([weights[i][comm.rank] for i in ranks]),
        layout,
    )
    check_equal(y, np.concatenate([blocks[i][comm.rank] for i in ranks]), dtype)
    check_equal(grad, np.concatenate(weights[comm.rank]), dtype)


@case(("float32", "float64"), (0, -1), ("even", "uneven"), worlds=GRADIENT_WORLDS, modes=("plain",), mccl=())
def gradient_of_gather_from_group(comm: Communicator, dtype: str, dim: int, kind: str) -> None:
    """Every rank computes the same loss of the whole, and each piece has that loss's gradient once."""
    from device_mesh import autograd

    sizes = uneven(comm.size) if kind == "uneven" and comm.size > 1 else [2] * comm.size
    pieces = [make(rank, (rows, 3), dtype) for rank, rows in enumerate(sizes)]
    weight = make(0, (sum(sizes), 3), dtype, salt=1)
    turn = np.asarray if dim == 0 else np.transpose
    y, grad = gradient(
        lambda t: autograd.gather_from_group(t, comm, dim=dim, sizes=sizes if kind == "uneven" else None),
        np.ascontiguousarray(turn(pieces[comm.rank])),
        np.ascontiguousarray(turn(weight)),
    )
    start = sum(sizes[: comm.rank])
    check_equal(y, turn(np.concatenate(pieces)), dtype)
    check_equal(grad, turn(weight[start : start + sizes[comm.rank]]), dtype)


@case(
    ("float32", "float64"),
    ("1 to 2", "2 to 1", "-1 to 0", "1 to 1"),
    worlds=GRADIENT_WORLDS,
    modes=("plain",),
    mccl=(),
)
def gradient_of_all_to_all_between_dims(comm: Communicator, dtype: str, dims: str) -> None:
    """What was divided over the ranks becomes whole, and another dimension is divided instead."""
    from device_mesh import autograd

    split, concat = map(int, dims.split(" to "))
    n = comm.size
    x = everyone(comm, (2 * n, 3 * n, n), dtype)
    pieces = [[np.split(x[i], n, split)[j] for j in range(n)] for i in range(n)]
    expected = np.concatenate([pieces[i][comm.rank] for i in range(n)], concat)
    weights = [make(rank, expected.shape, dtype, salt=1) for rank in range(n)]
    y, grad = gradient(
        lambda t: autograd.all_to_all(t, comm, split_dim=split, concat_dim=concat),
        x[comm.rank],
        weights[comm.rank],
    )
    check_equal(y, expected, dtype)
    check_equal(grad, np.concatenate([np.split(weights[j], n, concat)[comm.rank] for j in range(n)], split), dtype)


@case(worlds=GRADIENT_WORLDS, modes=("plain",), mccl=())
def gradients_of_two_exchanges_under_way(comm: Communicator) -> None:
    """The second starts before the first ends, forward and backward; each gets its own result and gradient."""
    from device_mesh import autograd

    n = comm.size
    x, weights = everyone(comm, (n, 2, 3), "float64"), everyone(comm, (n, 2, 3), "float64", salt=1)

    def both(t: Any) -> Any:
        first = autograd.start_all_to_all(t, comm)
        second = autograd.start_all_to_all(t * t, comm)
        return first() + second()

    y, grad = gradient(both, x[comm.rank], weights[comm.rank])
    check_equal(y, x[:, comm.rank] + x[:, comm.rank] ** 2, "float64", exact=False)
    check_equal(grad, weights[:, comm.rank] * (1 + 2 * x[comm.rank]), "float64", exact=False)


@case(worlds=GRADIENT_WORLDS, modes=("plain",), mccl=())
def all_to_all_refuses_what_it_cannot_divide(comm: Communicator) -> None:
    from device_mesh import autograd
    from mindspore import Tensor

    x = Tensor(np.zeros((2 * comm.size, 3), np.float32))
    with raises(ValueError, "dim 2"):
        autograd.all_to_all(x, comm, split_dim=2)
    with raises(ValueError, "different sizes"):
        autograd.all_to_all(x, comm, concat_dim=1, send_sizes=[2] * comm.size, receive_sizes=[2] * comm.size)
    if comm.size == 2:
        with raises(ValueError, "3 must be a multiple of 2"):
            autograd.all_to_all(x, comm, split_dim=1, concat_dim=0)


@case(worlds=GRADIENT_WORLDS, modes=("plain",), mccl=())
def forwards_of_whole_numbers(comm: Communicator) -> None:
    from device_mesh import autograd
    from mindspore import Tensor

    x = everyone(comm, (comm.size, 2), "int64")
    tensor = Tensor(x[comm.rank])
    check_equal(autograd.all_reduce(tensor, comm).asnumpy(), x.sum(axis=0), "int64")
    check_equal(autograd.all_gather(tensor, comm).asnumpy(), np.concatenate(list(x)), "int64")
    check_equal(autograd.all_to_all(tensor, comm).asnumpy(), x[:, comm.rank], "int64")


@case(worlds=GRADIENT_WORLDS, modes=("plain",))
def gradient_of_a_split_layer(comm: Communicator) -> None:
    """tanh(x A) B with A split by columns and B by rows: all gradients equal those of the whole layer.

    MindSpore's own threads run the operators here, so the collectives must wait for the values they send.
    """
    import mindspore
    from device_mesh import autograd
    from mindspore import Tensor, mint

    x, a, b, weight = (
        make(0, shape, "float64", salt=salt)
        for salt, shape in enumerate([(5, 4), (4, 2 * comm.size), (2 * comm.size, 3), (5, 3)])
    )
    own = slice(2 * comm.rank, 2 * comm.rank + 2)

    def loss(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
        hidden = mint.tanh(mint.matmul(autograd.copy_to_group(x, comm), a))
        return (autograd.reduce_from_group(mint.matmul(hidden, b), comm) * Tensor(weight)).sum()

    value, grads = mindspore.value_and_grad(loss, grad_position=(0, 1, 2))(Tensor(x), Tensor(a[:, own]), Tensor(b[own]))
    hidden = np.tanh(x @ a)
    through = (weight @ b.T) * (1 - hidden**2)
    expected = [through @ a.T, (x.T @ through)[:, own], (hidden.T @ weight)[own]]
    np.testing.assert_allclose(value.asnumpy(), ((hidden @ b) * weight).sum(), rtol=1e-12)
    for actual, right in zip(grads, expected, strict=True):
        np.testing.assert_allclose(actual.asnumpy(), right, rtol=1e-12, atol=1e-13)


@case(worlds=GRADIENT_WORLDS, modes=("plain",), mccl=())
def tensors_that_cannot_work(comm: Communicator) -> None:
    import mindspore
    from device_mesh import autograd
    from mindspore import Tensor

    with raises(ValueError, "dim 2", "(2, 3)", "use -2 to 1"):
        autograd.all_gather(Tensor(np.zeros((2, 3))), comm, dim=2)
    with raises(ValueError, "reduce_scatter along dim 0", "reshape it to (1,)"):
        autograd.reduce_scatter(Tensor(1.0), comm)
    if comm.size > 1:
        with raises(TypeError, "complex64", "cannot be sent"):
            autograd.all_reduce(Tensor([1.0], mindspore.complex64), comm)
