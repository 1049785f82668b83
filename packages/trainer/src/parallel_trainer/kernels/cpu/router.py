"""Which experts a token goes to, and with which weights their results are added up."""

from __future__ import annotations

from typing import Any

import numpy as np
from mindspore import Tensor
from mindspore.common import _Function

from parallel_trainer.kernels.cpu.swiglu import sigmoid
from parallel_trainer.kernels.interface import Scoring

# Keeps a token whose scores are all 0 from a division by 0.
_TINY = 1e-20


def choose_experts(
    logits: Tensor, *, top_k: int, bias: Tensor | None = None, groups: int = 1, topk_group: int = 1
) -> np.ndarray:
    """See `Kernels.choose_experts`."""
    scores_TE = logits.asnumpy()
    tokens, experts = scores_TE.shape
    if experts % groups or not 1 <= topk_group <= groups or not 1 <= top_k <= experts // groups * topk_group:
        raise ValueError(
            f"choose_experts: {top_k} of {experts} experts out of {topk_group} of {groups} groups: groups have to be "
            "equally large, and the chosen ones have to have as many experts as are chosen"
        )
    if bias is not None or topk_group < groups:
        scores_TE = sigmoid(scores_TE)
    if bias is not None:
        scores_TE += bias.asnumpy()
    if topk_group < groups:
        scores_TGM = scores_TE.reshape(tokens, groups, experts // groups)
        # NumPy sorts groups of this size several times as fast as it partitions them.
        group_scores_TG = np.sort(scores_TGM)[..., -2:].sum(axis=-1)
        hidden_TG = np.ones((tokens, groups), np.bool_)
        np.put_along_axis(hidden_TG, _largest(group_scores_TG, topk_group), False, axis=1)
        scores_TGM[hidden_TG] = -np.inf
    return _largest(scores_TE, top_k)


def _largest(scores: np.ndarray, count: int) -> np.ndarray:
    """Places of the `count` largest scores of each row, int64, largest first; of equal ones the first."""
    # What was chosen is below everything that is left, also below a score of minus infinity.
    left, rows = np.maximum(scores, np.finfo(scores.dtype).min), np.arange(len(scores))
    places = np.empty((len(scores), count), np.int64)
    for number in range(count):
        places[:, number] = left.argmax(axis=1)
        left[rows, places[:, number]] = -np.inf
    return places


class _RouterWeights(_Function):
    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, ids: np.ndarray, scoring: Scoring, normalized: bool, scaling: float
    ) -> tuple[Tensor, Tensor]:
        logits_TE = logits.asnumpy()
        if scoring == "sigmoid":
            ctx.scores = sigmoid(logits_TE)
            ctx.sums = ctx.scores.sum(axis=1, keepdims=True) + logits_TE.dtype.type(_TINY)
            ctx.probabilities = ctx.scores / ctx.sums
        else:
            ctx.scores = np.exp(logits_TE - logits_TE.max(axis=1, keepdims=True))
            ctx.scores /= ctx.scores.sum(axis=1, keepdims=True)
            ctx.sums, ctx.probabilities = None, ctx.scores
        weights_TK = np.take_along_axis(ctx.scores, ids, axis=1)
        ctx.chosen_sums = None
        if normalized:
            ctx.chosen_sums = weights_TK.sum(axis=1, keepdims=True) + logits_TE.dtype.type(_TINY)
            weights_TK /= ctx.chosen_sums
        ctx.ids, ctx.shares, ctx.scaling = ids, weights_TK, logits_TE.dtype.type(scaling)
        return Tensor.from_numpy(weights_TK * ctx.scaling), Tensor.from_numpy(ctx.probabilities.copy())

    @staticmethod
    def backward(ctx: Any, d_weights: Tensor, d_probabilities: Tensor) -> tuple[Tensor, None, None, None, None]:
        d_chosen = d_weights.asnumpy() * ctx.scaling
        if ctx.chosen_sums is not None:
            d_chosen -= np.einsum("tk,tk->t", d_chosen, ctx.shares)[:, None]
            d_chosen /= ctx.chosen_sums
        d_scores = d_probabilities.asnumpy().copy()
        if ctx.sums is not None:
            d_scores -= np.einsum("te,te->t", d_scores, ctx.probabilities)[:, None]
            d_scores /= ctx.sums
        of_chosen = np.take_along_axis(d_scores, ctx.ids, axis=1)
        np.put_along_axis(d_scores, ctx.ids, of_chosen + d_chosen, axis=1)
        if ctx.sums is not None:
            d_scores *= 1 - ctx.scores
        else:
            d_scores -= np.einsum("te,te->t", d_scores, ctx.scores)[:, None]
        d_scores *= ctx.scores
        return Tensor.from_numpy(d_scores), None, None, None, None


def router_weights(
    logits: Tensor, ids: np.ndarray, *, scoring: Scoring, normalized: bool, scaling: float = 1.0
) -> tuple[Tensor, Tensor]:
    """See `Kernels.router_weights`."""
    return _RouterWeights.apply(logits, ids, scoring, normalized, scaling)
