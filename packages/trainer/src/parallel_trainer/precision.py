"""Which floating-point type a run computes in."""

from __future__ import annotations

import numpy as np
from parallel_config import TrainConfig

from parallel_trainer.errors import UserError

_ON_CPU = {"float64": "float64", "float32": "float32", "bfloat16": "float32", "float16": "float32"}


def compute_dtype(config: TrainConfig) -> tuple[np.dtype, str | None]:
    """The type of weights and arithmetic on a CPU, and a note where it is not the one the file asks for.

    A CPU has no bfloat16 matrix product in MindSpore 2.10, so bfloat16 and float16 compute in float32.
    Raises UserError for a type that does not exist.
    """
    asked = {name: getattr(config.model, name) for name in ("params_dtype", "compute_dtype")}
    for name, value in asked.items():
        if value not in _ON_CPU:
            raise UserError(f"model.{name} {value!r} is not a type this version knows: {', '.join(_ON_CPU)}.")
    names = list(asked.values())
    chosen = "float64" if "float64" in names else "float32"
    narrowed = [f"model.{name} {value}" for name, value in asked.items() if _ON_CPU[value] != value]
    note = f"{' and '.join(narrowed)}: on a CPU weights and arithmetic are {chosen}." if narrowed else None
    return np.dtype(chosen), note
