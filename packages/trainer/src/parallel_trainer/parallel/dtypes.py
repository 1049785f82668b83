"""Floating-point types of tensors and of arrays. MindSpore adds bfloat16 to those of NumPy."""

from __future__ import annotations

import mindspore as ms
import numpy as np
from mindspore.common.np_dtype import bfloat16

BFLOAT16 = np.dtype(bfloat16)

MINDSPORE_DTYPES = {
    BFLOAT16: ms.bfloat16,
    np.dtype(np.float16): ms.float16,
    np.dtype(np.float32): ms.float32,
    np.dtype(np.float64): ms.float64,
}
"""MindSpore's floating-point types by those of arrays."""

DTYPES = {str(dtype).lower(): array_dtype for array_dtype, dtype in MINDSPORE_DTYPES.items()}
"""Types of arrays by their names in a configuration."""
