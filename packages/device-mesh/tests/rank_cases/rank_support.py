"""What the cases share: registering a case, every rank's input values, comparing with NumPy.

A case takes a communicator and checks what its rank got; every rank can compute every other rank's input,
since inputs are made from the rank's number.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

import ml_dtypes
import numpy as np
from attrs import frozen
from device_mesh import Communicator

Mode = Literal["plain", "debug", "hold_core", "give_way"]
MODES: tuple[Mode, ...] = ("plain", "debug")
WITH_EACH_WAIT: tuple[Mode, ...] = (*MODES, "hold_core", "give_way")
WORLDS = (1, 2, 3, 4, 8)
SEVERAL = (2, 3, 4, 8)
CASES: dict[str, Case] = {}
DTYPES = ("float16", "bfloat16", "float32", "float64", "int64", "int32", "uint8")
FLOATS = ("float16", "bfloat16", "float32", "float64")
RTOL = {"float16": 2e-3, "bfloat16": 1.6e-2, "float32": 1e-6, "float64": 1e-14}
LAYOUTS = {
    "contiguous": lambda x: x,
    "transposed": lambda x: np.ascontiguousarray(np.swapaxes(x, 0, -1)).swapaxes(0, -1),
    "strided": lambda x: np.repeat(x, 2, axis=0)[::2],
    "reversed": lambda x: np.ascontiguousarray(x[::-1])[::-1],
}
REDUCTIONS = {"sum": np.sum, "max": np.max, "min": np.min}


@frozen
class Case:
    """A check, the world sizes it makes sense in, the communicators of MPI it is run with, and its worlds over mccl."""

    check: Callable[[Communicator], None]
    worlds: tuple[int, ...]
    modes: tuple[Mode, ...]
    mccl: tuple[int, ...]


def case(
    *parameters: tuple[Any, ...],
    worlds: tuple[int, ...] = WORLDS,
    modes: tuple[Mode, ...] = MODES,
    mccl: tuple[int, ...] = (2, 4),
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Register a case, or one for each combination of the parameters' values.

    `mccl` says where it is run over mccl too: by default on 2 ranks and, with the first of all values, on 4, unless it
    is for debug mode or other worlds.
    """
    if modes == ("debug",):
        mccl = ()

    def register(check: Callable[..., None]) -> Callable[..., None]:
        for number, values in enumerate(itertools.product(*parameters)):
            name = "-".join([check.__name__, *map(str, values)])
            both = tuple(world for world in mccl if world in worlds and (world == 2 or number == 0))
            CASES[name] = Case(lambda comm, values=values: check(comm, *values), worlds, modes, both)
        return check

    return register


def type_of(name: str) -> np.dtype:
    """NumPy's type of that name, or ml_dtypes': np.dtype("bfloat16") would be that of who was imported last."""
    return np.dtype(ml_dtypes.bfloat16 if name == "bfloat16" else name)


def make(rank: int, shape: tuple[int, ...], dtype: str, *, salt: int = 0) -> np.ndarray:
    """Rank `rank`'s values: floats around 0, or small whole numbers whose sum over 8 ranks fits in uint8."""
    generator = np.random.default_rng([rank, salt])
    values = generator.standard_normal(shape) if dtype in FLOATS else generator.integers(0, 30, shape)
    return values.astype(type_of(dtype))


def everyone(comm: Communicator, shape: tuple[int, ...], dtype: str, *, salt: int = 0) -> np.ndarray:
    return np.stack([make(rank, shape, dtype, salt=salt) for rank in range(comm.size)])


def reduced(stacked: np.ndarray, op: str) -> np.ndarray:
    wide = stacked.astype(np.float64) if stacked.dtype.name in FLOATS else stacked.astype(np.int64)
    return REDUCTIONS[op](wide, axis=0)


def check_equal(actual: np.ndarray, expected: np.ndarray, dtype: str, *, exact: bool = True) -> None:
    assert isinstance(actual, np.ndarray)
    assert actual.dtype == type_of(dtype), actual.dtype
    assert actual.shape == expected.shape, (actual.shape, expected.shape)
    if exact or dtype not in FLOATS:
        np.testing.assert_array_equal(actual, expected.astype(type_of(dtype)))
    else:
        # Sums may cancel, so the error is measured against the size of the summands, which is about 1.
        np.testing.assert_allclose(actual.astype(np.float64), expected, rtol=RTOL[dtype], atol=4 * RTOL[dtype])


def uneven(size: int) -> list[int]:
    """Row counts that differ between ranks, the first of them 0."""
    return [(2 * rank) % 5 for rank in range(size)]


@contextmanager
def raises(kind: type[Exception], *parts: str) -> Iterator[None]:
    try:
        yield
    except kind as error:
        missing = [part for part in parts if part not in str(error)]
        if missing:
            raise AssertionError(f"{missing} is not in: {error}") from error
    else:
        raise AssertionError(f"{kind.__name__} was not raised")
