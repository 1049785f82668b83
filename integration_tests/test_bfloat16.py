"""What plans trained in bfloat16 on several ranks must be near to: `bfloat16_checks.py` trained them.

Parity to the last digits is that of the matrix, in float64 and float32. Here a number is rounded to 8 bits wherever an
NPU would, so losses and norms have to be near to those of one rank in float32. A sum over ranks that is missing, or
made twice, changes the first step's gradient norm by tenths.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from cases import STEPS

Reports = dict[int, dict[str, Any]]

ROUNDED = 5e-3
"""Of losses, and of the first gradient norm."""
AFTER_A_STEP = 1e-1
"""Of the norms after Adam has moved weights whose gradients rounding can turn around."""


@pytest.mark.parametrize("world", [2, 4])
def test_every_kind_of_parallelism_trains_in_bfloat16(reports: Reports, world: int) -> None:
    found = reports[world]["checks"]["bfloat16_plans"]
    assert len(found) == {2: 6, 4: 4}[world]
    for case, numbers in found.items():
        for name, values in numbers.items():
            if values[0] is None:
                assert set(values) == {None}, (case, name)
                continue
            one, many = np.array(values).reshape(2, STEPS)
            allowed = np.full(STEPS, ROUNDED)
            allowed[1:] = AFTER_A_STEP if name == "grad_norm" else ROUNDED
            assert (np.abs(many - one) <= allowed * np.abs(one)).all(), (case, name, one, many)
            assert (many != one).any(), f"{case}: {name} is not that of bfloat16"
