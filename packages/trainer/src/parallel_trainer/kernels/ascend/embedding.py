"""Rows of a table by id, and the sum of gradients per row, in float32."""

from __future__ import annotations

from typing import Any

import numpy as np
from mindspore import Tensor, ops
from mindspore.common import _Function

from parallel_trainer.kernels.ascend.tensors import wide
from parallel_trainer.kernels.checks import check_ids


class _Embedding(_Function):
    @staticmethod
    def forward(ctx: Any, ids: Tensor, weight: Tensor, first: int, vocab_size: int) -> Tensor:
        chosen = ids.asnumpy()
        check_ids(chosen, vocab_size)
        rows = chosen - first
        here = (rows >= 0) & (rows < len(weight))
        ctx.rows, ctx.table_size = Tensor(np.where(here, rows, 0).astype(np.int32)), len(weight)
        # Rows of other parts are looked up in row 0 and multiplied by 0, and so are their gradients.
        ctx.here = None if here.all() else Tensor(here[..., None])
        return _masked(ops.gather(weight, ctx.rows, 0), ctx.here)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[None, Tensor | None, None, None]:
        if not ctx.needs_input_grad[1]:
            return None, None, None, None
        d_weight = ops.unsorted_segment_sum(_masked(wide(dy), ctx.here), ctx.rows, ctx.table_size)
        return None, d_weight.astype(dy.dtype), None, None


def _masked(rows: Tensor, here: Tensor | None) -> Tensor:
    return rows if here is None else rows * here.astype(rows.dtype)


def embedding(ids: Tensor, weight: Tensor, *, first: int = 0, vocab_size: int | None = None) -> Tensor:
    """See `Kernels.embedding`. Ids are checked on the host."""
    return _Embedding.apply(ids, weight, first, len(weight) if vocab_size is None else vocab_size)
