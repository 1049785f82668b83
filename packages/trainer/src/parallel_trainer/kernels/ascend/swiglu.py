"""SwiGLU: a fused operator over gate and up beside each other."""

from __future__ import annotations

from mindspore import Tensor, mint

from parallel_trainer.kernels.ascend import operators


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """See `Kernels.swiglu`."""
    return operators.swiglu(mint.cat((gate, up), -1), -1)
