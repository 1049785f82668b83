"""Which floating-point type a run computes in."""

from __future__ import annotations

import numpy as np
from attrs import frozen
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


@frozen
class MixedPrecision:
    """Which type each number of a run has.

    param_dtype:  of what units see: gathered weights but those of routers, activations, and the gradients that a
        backward gives.
    reduce_dtype: of what is kept and added up: flat shards (the master weights), gradients from the moment they leave a
        unit (sums over micro-batches, reduce-scatter, all-reduce, norm), and the optimizer's moments.
    """

    param_dtype: str
    reduce_dtype: str


def ascend_precision(config: TrainConfig) -> tuple[MixedPrecision, str | None]:
    """The types of a run on Ascend, and a note where they are not those that the file asks for.

    What `model.compute_dtype` says is computed in; masters are float32, as the reference's optimizer keeps them, also
    for `params_dtype: bfloat16`. Raises UserError for types that a run on Ascend does not have.
    """
    params, compute = str(config.model.params_dtype), str(config.model.compute_dtype)
    problems = []
    if compute not in ("bfloat16", "float32"):
        problems.append(
            f"model.compute_dtype {compute}: on Ascend it has to be bfloat16 or float32; float16 would need a loss "
            "scale, which this version does not have, and float64 is for a CPU. Use bfloat16."
        )
    if params not in ("bfloat16", "float32"):
        problems.append(f"model.params_dtype {params}: on Ascend it has to be float32 or bfloat16. Use float32.")
    if problems:
        raise UserError("These types cannot run on Ascend:", problems)
    note = None if params == "float32" else f"model.params_dtype {params}: master weights are float32 on Ascend."
    return MixedPrecision(compute, "float32"), note
