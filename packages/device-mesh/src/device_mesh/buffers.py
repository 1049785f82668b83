"""What every backend does with its arguments: checks before anything is sent, counts, types of 16 bits."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from device_mesh.communicator import Array, ReduceOp
from device_mesh.half import is_bfloat16

_DTYPES: frozenset[np.dtype[Any]] = frozenset(
    np.dtype(name)
    for name in (
        *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
        *("float16", "float32", "float64"),
    )
)


def check_array(x: object, name: str) -> None:
    """Raises TypeError for what a communicator cannot send: not an array, or of another dtype."""
    if not isinstance(x, np.ndarray):
        raise TypeError(
            f"{name} is a {type(x).__module__}.{type(x).__qualname__}, but a communicator takes NumPy "
            "arrays: pass numpy.asarray(value), or tensor.asnumpy() of a MindSpore tensor"
        )
    if x.dtype not in _DTYPES and not is_bfloat16(x.dtype):
        known = ", ".join(sorted(dtype.name for dtype in _DTYPES))
        raise TypeError(
            f"{name} has dtype {x.dtype}, which cannot be sent: it must be one of {known}, in native "
            "byte order, or bfloat16"
        )


def contiguous(x: Array, name: str = "x") -> Array:
    """`x` itself where it is C-contiguous, else a copy that is. Raises TypeError for what cannot be sent."""
    check_array(x, name)
    return np.asarray(x, order="C")


def check_rows(x: Array, call: str) -> None:
    """Raises ValueError for an array without a dim 0 to join or divide."""
    if x.ndim == 0:
        raise ValueError(f"{call} works along dim 0, but x is a single {x.dtype} without dimensions: pass x.reshape(1)")


def output(out: Array | None, shape: tuple[int, ...], dtype: np.dtype[Any], call: str) -> Array:
    """Where the result goes: `out` after checking it, or a new array."""
    if out is None:
        return np.empty(shape, dtype)
    writable(out)
    if out.shape != shape or out.dtype != dtype:
        raise ValueError(
            f"{call} cannot write its result into out of shape {out.shape} and dtype {out.dtype}: "
            f"the result has shape {shape} and dtype {dtype}"
        )
    return out


def writable(out: Array) -> None:
    """Raises ValueError for an array that cannot be filled where it lies."""
    check_array(out, "out")
    if not out.flags.c_contiguous:
        raise ValueError(
            f"out of shape {out.shape} with strides {out.strides} is not C-contiguous, so it cannot be "
            "written in place: pass a contiguous array and copy from it"
        )
    if not out.flags.writeable:
        raise ValueError(f"out of shape {out.shape} is read-only: pass a writable array")


def apart(x: Array, out: Array) -> Array:
    """`x`, or a copy of it where writing `out` could change it."""
    return x.copy() if np.may_share_memory(x, out) else x


def split_sizes(rows: int, parts: int, sizes: Sequence[int] | None, call: str, name: str) -> list[int]:
    """How many of `rows` rows belong to each of `parts` ranks: `sizes`, checked, or equal parts."""
    if sizes is None:
        if rows % parts:
            raise ValueError(
                f"{call} cannot divide {rows} rows equally among {parts} ranks: "
                f"pass {name}= with {parts} row counts that add up to {rows}"
            )
        return [rows // parts] * parts
    checked = check_sizes(parts, sizes, call, name)
    if sum(checked) != rows:
        raise ValueError(
            f"{call} was given {name}={checked}, which adds up to {sum(checked)}, but x has {rows} rows: "
            "the sizes must add up to the rows of x"
        )
    return checked


def exchange_sizes(
    x: Array,
    parts: int,
    send_sizes: Sequence[int] | None,
    receive_sizes: Sequence[int] | None,
    call: str,
) -> tuple[list[int], list[int]]:
    """Row counts of an all_to_all of `x`: to each rank, and from each rank."""
    check_rows(x, call)
    if (send_sizes is None) != (receive_sizes is None):
        missing = "send_sizes" if send_sizes is None else "receive_sizes"
        raise ValueError(
            f"{call} needs both send_sizes and receive_sizes, or neither; {missing} is missing. "
            "Ranks that do not know what they will receive can exchange their send_sizes first"
        )
    sent = split_sizes(len(x), parts, send_sizes, call, "send_sizes")
    if receive_sizes is None:
        return sent, sent
    return sent, check_sizes(parts, receive_sizes, call, "receive_sizes")


def check_sizes(parts: int, sizes: Sequence[int], call: str, name: str) -> list[int]:
    """`sizes` as a list of ints. Raises ValueError unless there is one size >= 0 for each rank."""
    checked = [int(size) for size in sizes]
    if len(checked) != parts or min(checked) < 0:
        raise ValueError(
            f"{call} was given {name}={checked}, but needs one size of 0 or more for each of its {parts} ranks"
        )
    return checked


def check_reduction(dtype: np.dtype[Any], op: ReduceOp, call: str) -> None:
    """Raises for a reduction that does not exist, in general or for this dtype."""
    if op not in ("sum", "max", "min"):
        raise ValueError(f"{call} does not know op={op!r}: it is 'sum', 'max' or 'min' (a mean is 'sum' / size)")
    if op == "sum" and dtype == np.bool_:
        raise TypeError(
            f"{call} cannot sum bool: use op='max' for any, op='min' for all, or x.astype('int64') to count"
        )


def check_peer(peer: int, rank: int, size: int, call: str) -> None:
    """Raises ValueError unless `peer` is another rank of the group."""
    if not 0 <= peer < size or peer == rank:
        raise ValueError(
            f"{call} with rank {peer}, called by rank {rank} of a group of {size}: "
            f"use one of 0 to {size - 1} except {rank}"
        )


def check_root(root: int, size: int) -> None:
    """Raises ValueError unless `root` is a rank of the group."""
    if not 0 <= root < size:
        raise ValueError(f"broadcast from root {root} in a group of {size}: use 0 to {size - 1}")


def check_color(color: int) -> None:
    """Raises ValueError for a negative color."""
    if color < 0:
        raise ValueError(f"split with color {color}: a color must be 0 or more; ranks that give the same meet")


def check_subgroup(ranks: Sequence[int], rank: int, size: int) -> None:
    """Raises ValueError unless `ranks` are different ranks of the group, the calling one among them."""
    listed = [int(member) for member in ranks]
    if len(set(listed)) != len(listed) or not all(0 <= member < size for member in listed):
        raise ValueError(
            f"subgroup({listed}) of a group of {size}: list different ranks from 0 to {size - 1}, each once"
        )
    if rank not in listed:
        raise ValueError(f"subgroup({listed}) was called by rank {rank}: only the listed ranks may call it")


def own_sizes(rows: int, rank: int, size: int, sizes: Sequence[int] | None, call: str) -> list[int]:
    """How many rows each rank gives to an all_gather. Raises ValueError unless this one gives those of `sizes`."""
    if sizes is None:
        return [rows] * size
    checked = check_sizes(size, sizes, call, "sizes")
    if checked[rank] != rows:
        raise ValueError(
            f"{call} was given sizes={checked}, so rank {rank} must give {checked[rank]} rows, but x has {rows}"
        )
    return checked


def counts(rows: Sequence[int], x: Array, unit: int = 1) -> list[int]:
    """Elements of so many rows of `x` each, or with `unit=x.itemsize` bytes."""
    row = math.prod(x.shape[1:]) * unit
    return [count * row for count in rows]


def narrow(wide: Array, result: Array) -> Array:
    """Round a float32 result into `result`, an array of a type of 16 bits, and return that."""
    with np.errstate(over="ignore"):  # a sum beyond float16 is inf, as it is for the other dtypes
        result[...] = wide
    return result


def wrong_length(route: str, given: str, out: Array) -> str:
    """What to say of a message that is longer or shorter than the array it should fill."""
    return (
        f"message to {route} has {given}, but recv was given out of shape {out.shape} and dtype {out.dtype}, "
        f"{out.nbytes} bytes: both sides must use the same shape and dtype"
    )
