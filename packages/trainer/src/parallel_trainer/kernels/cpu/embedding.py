"""Rows of a table by id, and the sum of gradients per row."""

from __future__ import annotations

from typing import Any

import numpy as np
from mindspore import Tensor
from mindspore.common import _Function

from parallel_trainer.kernels.checks import check_ids


class _Embedding(_Function):
    @staticmethod
    def forward(ctx: Any, ids: Tensor, weight: Tensor, first: int, vocab_size: int) -> Tensor:
        table, chosen = weight.asnumpy(), ids.asnumpy()
        check_ids(chosen, vocab_size)
        rows = chosen.reshape(-1) - first
        ctx.places = np.flatnonzero((rows >= 0) & (rows < len(table)))
        ctx.ids, ctx.weight_shape = rows[ctx.places], table.shape
        out = np.zeros((rows.size, table.shape[1]), table.dtype)
        out[ctx.places] = table[ctx.ids]
        return Tensor.from_numpy(out.reshape(*chosen.shape, table.shape[1]))

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[None, Tensor | None, None, None]:
        if not ctx.needs_input_grad[1]:
            return None, None, None, None
        dy_rows = dy.asnumpy().reshape(-1, ctx.weight_shape[1])[ctx.places]
        d_weight = np.zeros(ctx.weight_shape, dy_rows.dtype)
        if ctx.ids.size:
            # Equal ids side by side, in their order of appearance: one fixed order of summation.
            order = np.argsort(ctx.ids, kind="stable")
            ids, starts = np.unique(ctx.ids[order], return_index=True)
            d_weight[ids] = np.add.reduceat(dy_rows[order], starts, axis=0)
        return None, Tensor.from_numpy(d_weight), None, None


def embedding(ids: Tensor, weight: Tensor, *, first: int = 0, vocab_size: int | None = None) -> Tensor:
    """See `Kernels.embedding`."""
    return _Embedding.apply(ids, weight, first, len(weight) if vocab_size is None else vocab_size)
