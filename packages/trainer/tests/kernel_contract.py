"""The kernel sets that a machine can run, and what results of a dtype have to be near to.

With an Ascend NPU, the `ascend` set runs on it. Elsewhere it runs with `ascend_operators` in place of the operators
that only an NPU has, beside the set of a CPU. Both have the same tests.
"""

from __future__ import annotations

from glob import glob
from typing import Any

import mindspore as ms
import numpy as np
from ascend_operators import AscendOperators
from attrs import frozen
from mindspore import Tensor
from parallel_trainer.kernels import kernels
from parallel_trainer.kernels.interface import Kernels
from parallel_trainer.parallel.dtypes import DTYPES

ON_NPU = bool(glob("/dev/davinci[0-9]*"))
ms.set_device("Ascend" if ON_NPU else "CPU")
if not ON_NPU:
    # As the trainer does: these tests take a fifth of the time without MindSpore's own threads.
    ms.runtime.launch_blocking()

TYPES = {"cpu": ("float32", "float64"), "ascend": ("bfloat16", "float16", "float32")}
SETS = ("ascend",) if ON_NPU else tuple(TYPES)

# 8 bits, 11, 24 and 53.
TOLERANCE = {"bfloat16": 8e-2, "float16": 1e-2, "float32": 2e-5, "float64": 1e-12}
# Ascend's attention rounds float32 to bfloat16, which has 8 bits.
ATTENTION_TOLERANCE = TOLERANCE | {"float32": 2e-2}


def kernel_set(name: str, monkeypatch: Any, *, exact: bool = False) -> Kernels:
    """The kernels, with operators in place that this machine can run; `exact` where these do not round to halves."""
    if name == "ascend" and not ON_NPU:
        AscendOperators(exact=exact).install(monkeypatch)
    return kernels(name)


@frozen
class Contract:
    """A kernel set computing in a dtype."""

    kernels: Kernels
    name: str
    dtype: str

    def tensor(self, array: Any) -> Tensor:
        """Rounded to the dtype."""
        return Tensor.from_numpy(np.array(array).astype(DTYPES[self.dtype]))

    def tensors(self, *arrays: Any) -> list[Tensor]:
        return [self.tensor(array) for array in arrays]

    def check(self, result: Tensor, expected: Any, *, dtype: str | None = None) -> None:
        """The result has the dtype and is near to what was expected."""
        self._near(result, expected, dtype or self.dtype, TOLERANCE[self.dtype])

    def check_loss(self, result: Tensor, expected: Any) -> None:
        """The same for a loss, which is float32 where the dtype is narrower."""
        self.check(result, expected, dtype={"bfloat16": "float32", "float16": "float32"}.get(self.dtype))

    def check_attention(self, result: Tensor, expected: Any) -> None:
        """The same for attention."""
        tolerance = (TOLERANCE if self.name == "cpu" else ATTENTION_TOLERANCE)[self.dtype]
        self._near(result, expected, self.dtype, tolerance)

    def _near(self, result: Tensor, expected: Any, dtype: str, tolerance: float) -> None:
        values = result.asnumpy()
        assert values.dtype == DTYPES[dtype]
        # Sums may cancel: their rounding is that of their largest terms.
        largest = np.abs(expected).max(initial=1.0)
        np.testing.assert_allclose(values.astype(np.float64), expected, rtol=tolerance, atol=tolerance * largest)
