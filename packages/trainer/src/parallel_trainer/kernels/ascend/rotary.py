"""Rotary position embedding: a fused operator, in float32.

It takes x (B, S, heads, D) with one table for all rows, so rows are laid end to end: (1, B·S, heads, D) and a table
(1, B·S, 1, D), which both of its modes take whatever the positions.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from attrs import field, frozen
from mindspore import Tensor, mint

from parallel_trainer.kernels.ascend import operators
from parallel_trainer.kernels.ascend.tensors import wide
from parallel_trainer.kernels.checks import check_pairs

_HALVES, _INTERLEAVED = 0, 1
"""Modes of the operator: dimension i turns with i + D/2, or 2i with 2i + 1."""


@frozen(eq=False)
class RotaryTable:
    """Angles (B·S, pairs), float64, and a factor for what they turn; and the operator's tables that were asked for."""

    angles: np.ndarray
    scale: float
    _tables: dict[Any, tuple[Tensor, Tensor]] = field(factory=dict, init=False, repr=False)

    def cos_sin(self, dtype: Any, *, interleaved: bool) -> tuple[Tensor, Tensor]:
        """Cosines and sines (1, B·S, 1, 2·pairs) of this MindSpore dtype, each pair's at both of its dimensions."""
        key = (str(dtype), interleaved)
        if key not in self._tables:
            angles = np.repeat(self.angles, 2, axis=1) if interleaved else np.tile(self.angles, 2)
            of_tokens = angles[None, :, None, :]
            self._tables[key] = tuple(Tensor(table(of_tokens)).astype(dtype) for table in (np.cos, np.sin))
        return self._tables[key]


def rotary_table(position_ids: np.ndarray, frequencies: np.ndarray, *, scale: float = 1.0) -> RotaryTable:
    """See `Kernels.rotary_table`. Angles are float64: at large positions float32 loses their fraction."""
    angles = np.asarray(position_ids, np.float64).reshape(-1, 1) * np.asarray(frequencies, np.float64)
    return RotaryTable(angles, scale)


def rotary(x: Tensor, table: RotaryTable, *, interleaved: bool = False) -> Tensor:
    """See `Kernels.rotary`."""
    check_pairs(table.angles.shape[1], x.shape[-1])
    turning_size = 2 * table.angles.shape[1]
    still_size = x.shape[-1] - turning_size
    turning = mint.narrow(x, -1, still_size, turning_size)
    flat = wide(turning).reshape(1, -1, *turning.shape[2:])
    cos, sin = table.cos_sin(flat.dtype, interleaved=interleaved)
    turned = operators.rotary_position_embedding(flat, cos, sin, _INTERLEAVED if interleaved else _HALVES)
    if table.scale != 1:
        # The operator documents tables of -1 to 1. A tensor, because MindSpore rounds numbers to float32.
        turned = turned * Tensor(table.scale, flat.dtype)
    turned = turned.reshape(turning.shape).astype(x.dtype)
    return mint.cat((mint.narrow(x, -1, 0, still_size), turned), -1) if still_size else turned
