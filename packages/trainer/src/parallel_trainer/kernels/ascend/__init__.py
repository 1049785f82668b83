"""The kernel set of an Ascend NPU: MindSpore's fused operators, and plain ones where it has none.

Tensors are bfloat16, float16 or float32. What adds up many numbers (norms, the loss, a router's scores, sums over
ranks, gradients of table rows and biases) or turns by an angle is computed in float32; attention in bfloat16 or float16
alone, which its operator takes. Losses are float32.

Never run on an NPU: on a CPU the tests put plain operators in place of `operators`, with the meaning that MindSpore
documents, so the arguments, layouts, types and gradients are run, and the fused operators are not.
"""

from __future__ import annotations

from parallel_trainer.kernels.ascend.attention import attention
from parallel_trainer.kernels.ascend.cross_entropy import cross_entropy_sum
from parallel_trainer.kernels.ascend.embedding import embedding
from parallel_trainer.kernels.ascend.features import concat, split
from parallel_trainer.kernels.ascend.grouped_mlp import grouped_mlp
from parallel_trainer.kernels.ascend.linear import linear, linear_reduce_scatter
from parallel_trainer.kernels.ascend.permute import permute, unpermute
from parallel_trainer.kernels.ascend.rms_norm import rms_norm
from parallel_trainer.kernels.ascend.rotary import rotary, rotary_table
from parallel_trainer.kernels.ascend.router import choose_experts, router_weights
from parallel_trainer.kernels.ascend.swiglu import swiglu

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
