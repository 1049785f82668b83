"""The feed-forward parts of many experts, each on its own rows: one product a weight for each expert that has rows.

Those that give the weights their gradients can be put off: see `kernels/later.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
from mindspore import Tensor
from mindspore.common import _Function

from parallel_trainer.kernels import later
from parallel_trainer.kernels.checks import check_counts
from parallel_trainer.kernels.cpu.swiglu import gated, gated_gradient, sigmoid


def _groups(counts: np.ndarray) -> Iterator[tuple[int, slice]]:
    """Each expert that has rows, and its rows."""
    stops = np.cumsum(counts)
    for expert in np.flatnonzero(counts).tolist():
        yield expert, slice(int(stops[expert] - counts[expert]), int(stops[expert]))


class _GroupedMLP(_Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, counts: np.ndarray, gate_up: Tensor, down: Tensor) -> Tensor:
        rows_RH, gate_up_EJH, down_EHI = rows.asnumpy(), gate_up.asnumpy(), down.asnumpy()
        hidden_RJ = np.empty((len(rows_RH), gate_up_EJH.shape[1]), rows_RH.dtype)
        for expert, own in _groups(counts):
            np.matmul(rows_RH[own], gate_up_EJH[expert].T, out=hidden_RJ[own])
        inner = down_EHI.shape[2]
        gate, up = hidden_RJ[:, :inner], hidden_RJ[:, inner:]
        gate_sigmoid = sigmoid(gate)
        inner_RI = gated(gate, gate_sigmoid, up)
        out_RH = np.empty_like(rows_RH)
        for expert, own in _groups(counts):
            np.matmul(inner_RI[own], down_EHI[expert].T, out=out_RH[own])
        ctx.save_for_backward(rows, gate_up, down)
        ctx.counts, ctx.hidden, ctx.sigmoid = counts, hidden_RJ, gate_sigmoid
        return Tensor.from_numpy(out_RH)

    @staticmethod
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor, None, Tensor | None, Tensor | None]:
        rows, gate_up, down = ctx.saved_tensors
        gate_up_EJH, down_EHI = gate_up.asnumpy(), down.asnumpy()
        dy_RH, hidden_RJ, inner = d_out.asnumpy(), ctx.hidden, down_EHI.shape[2]
        gate, up = hidden_RJ[:, :inner], hidden_RJ[:, inner:]
        inner_RI = gated(gate, ctx.sigmoid, up)
        d_down = later.gradient(down, partial(_products, d_out, Tensor.from_numpy(inner_RI), ctx.counts))
        d_inner_RI = np.empty_like(inner_RI)
        for expert, own in _groups(ctx.counts):
            np.matmul(dy_RH[own], down_EHI[expert], out=d_inner_RI[own])
        d_hidden_RJ = np.empty_like(hidden_RJ)
        gated_gradient(d_inner_RI, gate, ctx.sigmoid, up, d_gate=d_hidden_RJ[:, :inner], d_up=d_hidden_RJ[:, inner:])
        d_gate_up = later.gradient(gate_up, partial(_products, Tensor.from_numpy(d_hidden_RJ), rows, ctx.counts))
        d_rows = np.empty_like(dy_RH)
        for expert, own in _groups(ctx.counts):
            np.matmul(d_hidden_RJ[own], gate_up_EJH[expert], out=d_rows[own])
        return Tensor.from_numpy(d_rows), None, d_gate_up, d_down


def _products(dy: Tensor, x: Tensor, counts: np.ndarray) -> np.ndarray:
    """What rows with inputs x (R, in) and output gradients dy (R, out) give the experts' gradients, (E, out, in)."""
    dy_rows, x_rows = dy.asnumpy(), x.asnumpy()
    found = np.zeros((len(counts), dy_rows.shape[1], x_rows.shape[1]), dy_rows.dtype)
    for expert, own in _groups(counts):
        np.matmul(dy_rows[own].T, x_rows[own], out=found[expert])
    return found


def grouped_mlp(rows: Tensor, counts: np.ndarray, gate_up: Tensor, down: Tensor) -> Tensor:
    """See `Kernels.grouped_mlp`."""
    check_counts(counts, len(gate_up), len(rows))
    return _GroupedMLP.apply(rows, counts, gate_up, down)
