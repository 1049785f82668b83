"""Plans trained in bfloat16 by the kernels of Ascend on several ranks, with CPU stand-ins of the operators of NPUs.

The stand-ins are those of the kernels' own tests: what a CPU lacks in bfloat16 is computed in float32 and rounded.
"""

from __future__ import annotations

import sys
from pathlib import Path

import mindspore as ms
import pytest
from cases import STEPS, Case, Model, corpora
from device_mesh import Communicator, connect
from parallel_config import loads
from parallel_trainer.job import prepare
from parallel_trainer.kernels import kernels
from parallel_trainer.step import StepResult
from parallel_trainer.trace import on_one_rank
from parallel_trainer.trainer import Trainer

sys.path.append(str(Path(__file__).parents[1] / "packages" / "trainer" / "tests"))
from ascend_operators import AscendOperators

_DENSE = Model(dtype="bfloat16", text="packed", batch=4)
_EXPERTS = Model(dtype="bfloat16", architecture="qwen3_moe", batch=4)
_LATENT = Model(dtype="bfloat16", architecture="deepseek_v3", mtp=1, kv_heads=8, batch=4)
_CASES = (
    Case(tp=2, ep=2, loss_parallel=True, model=_LATENT),
    Case(cp=2, model=_DENSE),
    Case(cp=2, asynchronous=True, model=_DENSE),
    Case(cp=2, method="ulysses", asynchronous=True, model=_LATENT),
    Case(dp_shard=2, ep=2, model=_EXPERTS),
    Case(pp=2, accumulation=2, model=_DENSE),
    Case(dp_shard=2, tp=2, ep=4, node=2, model=_EXPERTS),
    Case(cp=4, method="hybrid", ulysses=2, model=_DENSE),
    Case(cp=2, tp=2, asynchronous=True, order="zigzag", model=_EXPERTS),
    Case(pp=2, tp=2, ep=2, accumulation=2, model=_LATENT),
)


def bfloat16_plans(communicator: Communicator) -> dict[str, dict[str, list[float | None]]]:
    """By name of the case and of the number, all steps: of one rank in float32 on a CPU, then of the ranks."""
    found = {}
    for case in (case for case in _CASES if case.world == communicator.size):
        config = loads(case.yaml(corpora()))
        one = _train(Trainer(prepare(on_one_rank(config, case.world), 1, dtype="float32"), connect("single")))
        with pytest.MonkeyPatch.context() as patch:
            kernels("ascend")
            AscendOperators().install(patch)
            patch.setattr(ms, "set_device", lambda _: None)
            many = _train(Trainer(prepare(config, communicator.size, device="ascend"), communicator))
        found[case.name] = {
            name: [getattr(result, name) for result in (*one, *many)] for name in ("loss", "mtp_loss", "grad_norm")
        }
    return found


def _train(trainer: Trainer) -> list[StepResult]:
    return [trainer.train_step() for _ in range(STEPS)]
