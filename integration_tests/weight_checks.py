"""Weights that no model here has and a model may: what ranks are asked about them."""

from __future__ import annotations

from typing import Any

import mindspore as ms
import numpy as np
from device_mesh import Communicator, Traffic, connect
from mindspore import Tensor, mint
from parallel_trainer.batch import MicroBatch
from parallel_trainer.kernels import kernels
from parallel_trainer.models.unit import Unit
from parallel_trainer.parallel.chunk import Chunk
from parallel_trainer.parallel.dtypes import BFLOAT16
from parallel_trainer.parallel.fully_shard import ShardedWeights
from parallel_trainer.parallel.pipeline import Pipeline
from parallel_trainer.parallel.tensor_parallel import TensorParallel
from parallel_trainer.parallel.weights import Constant, Normal, Weight, initial_values

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


def narrow_weights(communicator: Communicator) -> dict[str, Any]:
    """Weights gathered in bfloat16 and gradients of float16, of shards in float32, over all ranks."""
    traffic, alone = Traffic(), connect("single")
    groups = {"fsdp": traffic.count(communicator, "fsdp"), "dp_replicate": alone, "tp": alone}
    found = {}
    for name, dtype in (("float32", np.dtype(np.float32)), ("bfloat16", BFLOAT16)):
        weights = ShardedWeights(
            [Weight("w", (8, 16), init=Normal(1.0))],
            communicators=groups,
            dtype=np.dtype(np.float32),
            param_dtype=dtype,
            seed=0,
        )
        (held,) = weights
        with traffic.during(name):
            held.gather()
            held.wait()
        found[name] = held.tensor.astype(ms.float32).asnumpy()
    # float16 has 11 bits: in it 2048 + 1 is 2048.
    weights.add_gradient(held, weights.widened(np.full((8, 16), 1 if communicator.rank else 2048, np.float16)))
    weights.finish_gradients()
    return {
        "bytes": traffic.received_bytes(lambda call: call.during if call.operation == "all_gather" else "other"),
        "largest rounding": float(np.abs(found["bfloat16"] / found["float32"] - 1).max()),
        "gradients": sorted(set(weights.gradients.tolist())),
    }


class Factor(Unit):
    """x -> x · w, (TOKENS, HIDDEN): the first takes 1 for x, the last returns the sum in float32."""

    def __init__(self, stage: int, stages: int) -> None:
        super().__init__([Weight(f"w{stage}", (TOKENS, HIDDEN), init=Constant(1.5))])
        self._first, self._last = stage == 0, stage == stages - 1

    def construct(self, x: Tensor, batch: MicroBatch, *weights: Tensor) -> Tensor:
        (w,) = weights
        out = (Tensor(np.ones(w.shape), w.dtype) if self._first else x) * w
        return mint.sum(out.astype(ms.float32)).reshape(1) if self._last else out


def narrow_stages(communicator: Communicator) -> dict[str, Any]:
    """Hidden states in bfloat16 from stage to stage and their gradients back, one stage a rank, two micro-batches."""
    alone = connect("single")
    unit = Factor(communicator.rank, communicator.size)
    weights = ShardedWeights(
        unit.weights,
        communicators={"fsdp": alone, "dp_replicate": alone, "tp": alone},
        dtype=np.dtype(np.float32),
        param_dtype=BFLOAT16,
        seed=0,
    )
    pipeline = Pipeline([Chunk([unit], weights, reshard_after_forward=True)], communicator, width=HIDDEN)
    batch = MicroBatch(np.zeros((1, TOKENS), np.int32), np.zeros((1, TOKENS)))
    losses = pipeline.run([batch, batch], Tensor(np.ones(1, np.float32)))
    weights.finish_gradients()
    return {
        "loss": float(communicator.all_reduce(losses)[0]),
        "gradients": communicator.all_gather(weights.gradients[:1]).tolist(),
    }
