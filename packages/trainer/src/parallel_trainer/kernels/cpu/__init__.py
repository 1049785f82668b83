"""The kernel set of a CPU: custom gradient functions over NumPy, whose matrix products are BLAS calls.

Tensor memory on a CPU is host memory, so `asnumpy` and `from_numpy` cost no copy.
"""

from __future__ import annotations

from parallel_trainer.kernels.cpu.attention import attention
from parallel_trainer.kernels.cpu.cross_entropy import cross_entropy_sum
from parallel_trainer.kernels.cpu.embedding import embedding
from parallel_trainer.kernels.cpu.features import concat, split
from parallel_trainer.kernels.cpu.grouped_mlp import grouped_mlp
from parallel_trainer.kernels.cpu.linear import linear, linear_reduce_scatter
from parallel_trainer.kernels.cpu.permute import permute, unpermute
from parallel_trainer.kernels.cpu.rms_norm import rms_norm
from parallel_trainer.kernels.cpu.rotary import rotary, rotary_table
from parallel_trainer.kernels.cpu.router import choose_experts, router_weights
from parallel_trainer.kernels.cpu.swiglu import swiglu

__all__ = [
    "attention",
    "choose_experts",
    "concat",
    "cross_entropy_sum",
    "embedding",
    "grouped_mlp",
    "linear",
    "linear_reduce_scatter",
    "permute",
    "rms_norm",
    "rotary",
    "rotary_table",
    "router_weights",
    "split",
    "swiglu",
    "unpermute",
]
