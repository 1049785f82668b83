"""The operators that MindSpore has for Ascend only, under its names.

Kernels look them up here at each call, which is where tests on a CPU put others with the documented meaning.
"""

from __future__ import annotations

from mindspore import ops
from mindspore.ops.function.math_func import gmm

__all__ = [
    "flash_attention_score",
    "gmm",
    "moe_token_permute",
    "moe_token_unpermute",
    "rms_norm",
    "rotary_position_embedding",
    "swiglu",
]

flash_attention_score = ops.flash_attention_score
moe_token_permute = ops.moe_token_permute
moe_token_unpermute = ops.moe_token_unpermute
rms_norm = ops.rms_norm
rotary_position_embedding = ops.rotary_position_embedding
swiglu = ops.swiglu
