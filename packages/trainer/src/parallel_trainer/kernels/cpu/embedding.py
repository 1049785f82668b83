"""Rows of a table by id, and the sum of gradients per row."""

from __future__ import annotations

from typing import Any

import numpy as np
from mindspore import Tensor
from mindspore.common import _Function


class _Embedding(_Function):
    @staticmethod
    def forward(ctx: Any, ids: Tensor, weight: Tensor, first: int, vocab_size: int) -> Tensor:
        table, chosen = weight.asnumpy(), ids.asnumpy()
        if chosen.size and not (chosen.min() >= 0 and chosen.max() < vocab_size):
            wrong = chosen[(chosen < 0) | (chosen >= vocab_size)]
            raise ValueError(
                f"embedding: {wrong.size} of {chosen.size} token ids are outside the vocabulary, the first "
                f"is {wrong[0]}; ids have to be 0 to {vocab_size - 1} for vocab_size {vocab_size}; "
                f"use the tokenizer that belongs to the model or a vocab_size of at least {chosen.max() + 1}"
            )
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
