"""Weights that no model here has and a model may: what ranks are asked about them."""

from __future__ import annotations

from typing import Any

import numpy as np
from device_mesh import Communicator, connect
from mindspore import Tensor, mint
from parallel_trainer.batch import MicroBatch
from parallel_trainer.kernels import kernels
from parallel_trainer.models.unit import Unit
from parallel_trainer.parallel.chunk import Chunk
from parallel_trainer.parallel.fully_shard import ShardedWeights
from parallel_trainer.parallel.tensor_parallel import TensorParallel
from parallel_trainer.parallel.weights import Normal, Weight, initial_values

HIDDEN, INNER, TOKENS = 6, 20, 8


class FusedFeedForward(Unit):
    """x -> down(silu(gate x) · up x) with gate and up in one weight, summed over all tokens and features."""

    def __init__(self, tp: TensorParallel) -> None:
        gate_up = Weight(
            "gate_up", (2 * INNER, HIDDEN), init=Normal(0.5), tp_dim=0, tp_block=4, tp_fused=(INNER, INNER)
        )
        super().__init__([gate_up, Weight("down", (HIDDEN, INNER), init=Normal(0.5), tp_dim=1, tp_block=4)])
        self._tp = tp

    def construct(self, x: Tensor, batch: MicroBatch, *weights: Tensor) -> Tensor:
        gate_up = self._tp.kernels.linear(self._tp.enter(x), weights[0])
        gate, up = mint.chunk(gate_up, 2, dim=-1)
        return mint.sum(self._tp.row_linear(self._tp.kernels.swiglu(gate, up), weights[1]))


def fused_weights(communicator: Communicator) -> dict[str, Any]:
    """Gradients of a fused weight split over tensor-parallel ranks, against those written out in NumPy."""
    alone, cpu = connect("single"), kernels("cpu")
    tp = TensorParallel(cpu, communicator)
    unit = FusedFeedForward(tp)
    groups = {"fsdp": alone, "dp_replicate": alone, "tp": communicator}
    weights = ShardedWeights(unit.weights, communicators=groups, dtype=np.dtype(np.float64), seed=3)
    x = np.random.default_rng(0).standard_normal((TOKENS, HIDDEN))
    mine = np.split(x, communicator.size)[communicator.rank]
    chunk = Chunk([unit], weights, reshard_after_forward=True)
    loss, tape = chunk.forward(Tensor(mine), MicroBatch(np.zeros((1, TOKENS), np.int32), np.zeros((1, TOKENS))))
    chunk.backward(tape, Tensor(np.ones(())))
    weights.finish_gradients()
    weights.values[...] = weights.gradients  # full_value joins values

    gate_up, down = (initial_values(weight, seed=3) for weight in unit.weights)
    gate, up = np.split(x @ gate_up.T, 2, axis=1)
    sigmoid = 1 / (1 + np.exp(-gate))
    d_inner = np.ones((TOKENS, HIDDEN)) @ down
    d_gate = d_inner * up * sigmoid * (1 + gate * (1 - sigmoid))
    expected = {
        "gate_up": np.concatenate([d_gate, d_inner * gate * sigmoid], axis=1).T @ x,
        "down": np.ones((HIDDEN, TOKENS)) @ (gate * sigmoid * up),
    }
    return {
        "loss": float(communicator.all_reduce(loss.asnumpy().reshape(1))[0]),
        "expected loss": float(((gate * sigmoid * up) @ down.T).sum()),
        "differences": {
            name: float(np.abs(weights.full_value(name) - value).max()) for name, value in expected.items()
        },
        "held": [int(size) for size in communicator.all_gather(np.array([weights["gate_up"].part.shape[0]]))],
    }
