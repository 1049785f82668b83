"""Expert parallelism: tokens travel to the ranks that hold their experts, and the results back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from attrs import frozen
from mindspore import Tensor
from mindspore.common import _Function

from parallel_trainer.batch import MicroBatch
from parallel_trainer.kernels.interface import Kernels


@frozen(eq=False)
class ExpertParallel:
    """The ranks that hold a model's experts, and what they do together."""

    kernels: Kernels

    @classmethod
    def none(cls, kernels: Kernels, layers: Sequence[str] = (), num_experts: int = 0) -> ExpertParallel:
        """No expert parallelism: one rank holds all experts of these layers."""
        return cls(kernels)

    def experts(
        self, layer: str, x_TH: Tensor, ids_TK: np.ndarray, weights_TK: Tensor, gate_up: Tensor, down: Tensor
    ) -> Tensor:
        """The sum over k of weights[t, k] times what expert ids[t, k] makes of token t: (T, H)."""
        order = np.argsort(ids_TK.reshape(-1), kind="stable")
        counts = np.bincount(ids_TK.reshape(-1), minlength=gate_up.shape[0])
        rows_RH = _Gather.apply(x_TH, order, ids_TK.shape[1])
        return _Combine.apply(self.kernels.grouped_mlp(rows_RH, counts, gate_up, down), weights_TK, order)

    def balanced(
        self,
        layer: str,
        weights_TK: Tensor,
        probabilities_TE: Tensor,
        ids_TK: np.ndarray,
        batch: MicroBatch,
        coefficient: float,
    ) -> Tensor:
        """`weights_TK`, whose backward pass adds the gradient of the sequence auxiliary loss to the probabilities'."""
        return weights_TK


class _Gather(_Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, order: np.ndarray, top_k: int) -> Tensor:
        ctx.order, ctx.top_k = order, top_k
        return Tensor.from_numpy(x.asnumpy()[order // top_k])

    @staticmethod
    def backward(ctx: Any, d_rows: Tensor) -> tuple[Tensor, None, None]:
        by_token = np.empty_like(d_rows.asnumpy())
        by_token[ctx.order] = d_rows.asnumpy()
        return Tensor.from_numpy(by_token.reshape(-1, ctx.top_k, by_token.shape[1]).sum(axis=1)), None, None


class _Combine(_Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, weights: Tensor, order: np.ndarray) -> Tensor:
        ctx.save_for_backward(weights)
        ctx.order = order
        ctx.by_token = np.empty_like(rows.asnumpy())
        ctx.by_token[order] = rows.asnumpy()
        return Tensor.from_numpy(np.einsum("tkh,tk->th", ctx.by_token.reshape(*weights.shape, -1), weights.asnumpy()))

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, None]:
        (weights,) = (tensor.asnumpy() for tensor in ctx.saved_tensors)
        d_by_token = np.einsum("th,tk->tkh", dy.asnumpy(), weights).reshape(ctx.by_token.shape)
        d_weights = np.einsum("th,tkh->tk", dy.asnumpy(), ctx.by_token.reshape(*weights.shape, -1))
        return Tensor.from_numpy(d_by_token[ctx.order]), Tensor.from_numpy(d_weights), None
