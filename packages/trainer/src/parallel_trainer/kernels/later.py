"""Splitting a backward: products that give weights their gradients may wait until a schedule has time for them.

The gradient of an input is what other ranks wait for; that of a weight is needed at the end of the step only. While
`put_off` is entered, kernels whose weight gradient is a matrix product keep what it needs instead of computing it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import numpy as np
from mindspore import Tensor

Product = Callable[[], np.ndarray]
"""Computes what a use of a weight adds to the weight's gradient, an array of its shape."""


class Products:
    """The products that a backward left for later, in the order in which it came to them."""

    def __init__(self) -> None:
        self._products: list[tuple[Tensor, Product]] = []

    def add(self, weight: Tensor, product: Product) -> None:
        """Keep a product; it may hold tensors of the forward and the backward, but not the weight."""
        self._products.append((weight, product))

    def __len__(self) -> int:
        return len(self._products)

    def of(self, weight: Tensor) -> tuple[Product, ...]:
        """Those of one weight: the tensor object that was given to the forward."""
        return tuple(product for other, product in self._products if other is weight)


_running: ContextVar[Products | None] = ContextVar("_running", default=None)


@contextmanager
def put_off() -> Iterator[Products]:
    """Keep the weights' products of the backwards that run inside."""
    products = Products()
    token = _running.set(products)
    try:
        yield products
    finally:
        _running.reset(token)


def running() -> Products | None:
    """For the backward of a kernel: where to leave the product of its weight; None to compute it at once."""
    return _running.get()


def gradient(weight: Tensor, product: Product) -> Tensor | None:
    """For the backward of a kernel: the gradient of its weight, or None where the product is left for later."""
    products = running()
    if products is None:
        return Tensor.from_numpy(product())
    products.add(weight, product)
    return None
