"""Which experts a token goes to, and with which weights their results are added up; in float32."""

from __future__ import annotations

import numpy as np
from mindspore import Tensor, mint

from parallel_trainer.kernels.ascend.tensors import wide
from parallel_trainer.kernels.cpu import router
from parallel_trainer.kernels.interface import Scoring

# Keeps a token whose scores are all 0 from a division by 0.
_TINY = 1e-20


def choose_experts(
    logits: Tensor, *, top_k: int, bias: Tensor | None = None, groups: int = 1, topk_group: int = 1
) -> np.ndarray:
    """See `Kernels.choose_experts`. The host needs the choice to send tokens away, so it chooses: as on a CPU."""
    bias = None if bias is None else wide(bias)
    return router.choose_experts(wide(logits), top_k=top_k, bias=bias, groups=groups, topk_group=topk_group)


def router_weights(
    logits: Tensor, ids: np.ndarray, *, scoring: Scoring, normalized: bool, scaling: float = 1.0
) -> tuple[Tensor, Tensor]:
    """See `Kernels.router_weights`."""
    scores_TE = mint.sigmoid(wide(logits)) if scoring == "sigmoid" else mint.softmax(wide(logits), -1)
    tiny, factor = (Tensor(number, scores_TE.dtype) for number in (_TINY, scaling))
    probabilities_TE = scores_TE
    if scoring == "sigmoid":
        probabilities_TE = scores_TE / (mint.sum(scores_TE, -1, True) + tiny)
    weights_TK = mint.gather(scores_TE, 1, Tensor(ids))
    if normalized:
        weights_TK = weights_TK / (mint.sum(weights_TK, -1, True) + tiny)
    return (weights_TK * factor).astype(logits.dtype), probabilities_TE.astype(logits.dtype)
