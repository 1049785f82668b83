"""Types of 16 bits: float16, and bfloat16 as a library adds it to NumPy. What is added up of them is float32."""

from __future__ import annotations

from typing import Any

import numpy as np

from device_mesh.communicator import Array


def is_bfloat16(dtype: np.dtype[Any]) -> bool:
    """Whether this is a library's bfloat16, which is known by its name: MindSpore and ml_dtypes each have one."""
    return dtype.name == "bfloat16" and dtype.itemsize == 2


def is_half(dtype: np.dtype[Any]) -> bool:
    """Whether it is float16 or bfloat16."""
    return dtype == np.float16 or is_bfloat16(dtype)


def wide_type(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """In which numbers of this type are added up: float32 for those of 16 bits, else as they are."""
    return np.dtype(np.float32) if is_half(dtype) else dtype


def wide(x: Array) -> Array:
    """`x` in the type in which it is added up: itself, or a copy."""
    return x.astype(wide_type(x.dtype), copy=False)
