"""Units that are given bfloat16 or float16 while shards, sums of gradients and moments are float32; on one rank."""

from __future__ import annotations

import mindspore as ms
import numpy as np
import pytest
from device_mesh import Communicator, connect
from mindspore import Tensor, mint
from parallel_trainer.batch import MicroBatch
from parallel_trainer.models.unit import Unit
from parallel_trainer.optim.adamw import AdamW
from parallel_trainer.parallel.chunk import Chunk
from parallel_trainer.parallel.dtypes import BFLOAT16, MINDSPORE_DTYPES
from parallel_trainer.parallel.fully_shard import ShardedWeights
from parallel_trainer.parallel.pipeline import Pipeline
from parallel_trainer.parallel.weights import Constant, Normal, Weight
from parallel_trainer.step import training_step

ms.set_device("CPU")
FLOAT16 = np.dtype(np.float16)


def sharded(unit: Unit, param_dtype: np.dtype) -> ShardedWeights:
    alone = connect("single")
    groups: dict[str, Communicator] = {"fsdp": alone, "dp_replicate": alone, "tp": alone}
    return ShardedWeights(
        unit.weights, communicators=groups, dtype=np.dtype(np.float32), param_dtype=param_dtype, seed=0
    )


def rounded_to_bfloat16(values: np.ndarray) -> np.ndarray:
    """To the nearest number of 8 bits, of two equally near ones to the even one; finite float32 to float32."""
    bits = values.view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000).astype(np.uint32).view(np.float32)


class Slope(Unit):
    """loss = slope · w in the type of w, the slope from `position_ids`; notes what it is given."""

    def __init__(self) -> None:
        super().__init__([Weight("w", (1,), init=Constant(1.0))])
        self.given: list[tuple[object, float]] = []

    def construct(self, x: Tensor, batch: MicroBatch, *weights: Tensor) -> Tensor:
        (w,) = weights
        self.given.append((w.dtype, float(w.asnumpy()[0])))
        return mint.sum((w * Tensor(batch.position_ids, w.dtype)).astype(ms.float32)).reshape(1)


def slopes(*values: float) -> list[MicroBatch]:
    return [MicroBatch(np.zeros((1, 1), np.int32), np.array([[value]])) for value in values]


def test_a_gathered_weight_is_its_shard_rounded_and_its_memory_is_given_back() -> None:
    unit = Unit([Weight("w", (40, 30), init=Normal(1.0))])
    weights = sharded(unit, BFLOAT16)
    (held,) = weights
    master = weights.values.copy()
    assert not held.stays
    assert held.tensor.untyped_storage().size() == 0
    held.gather()
    held.wait()
    assert held.tensor.dtype == ms.bfloat16
    np.testing.assert_array_equal(held.tensor.astype(ms.float32).asnumpy().reshape(-1), rounded_to_bfloat16(master))
    assert held.tensor.untyped_storage().size() == 2 * 40 * 30
    held.release()
    assert held.tensor.untyped_storage().size() == 0
    np.testing.assert_array_equal(weights.values, master)


def test_without_another_type_the_tensor_is_the_shard() -> None:
    weights = sharded(Slope(), np.dtype(np.float32))
    (held,) = weights
    assert held.stays
    weights.values[...] = 3
    assert held.tensor.asnumpy() == 3


@pytest.mark.parametrize("reshard", [True, False])
def test_gradients_of_micro_batches_are_added_up_in_float32(reshard: bool) -> None:
    # float16 has 11 bits: 2048 + 1 is 2048 there.
    unit = Slope()
    weights = sharded(unit, FLOAT16)
    chunk = Chunk([unit], weights, reshard_after_forward=reshard)
    for batch in slopes(2048, 1, 1):
        _, tape = chunk.forward(Tensor(batch.input_ids), batch)
        chunk.backward(tape, Tensor(np.ones(1, np.float32)))
    chunk.reduce_gradients()
    weights.finish_gradients()
    assert {dtype for dtype, _ in unit.given} == {ms.float16}
    assert weights.gradients.dtype == np.float32
    assert weights.gradients.tolist() == [2050]


@pytest.mark.parametrize("param_dtype", [BFLOAT16, FLOAT16], ids=["bfloat16", "float16"])
def test_steps_too_small_for_the_narrow_type_add_up_in_the_master(param_dtype: np.dtype) -> None:
    unit = Slope()
    weights = sharded(unit, param_dtype)
    optimizer = AdamW(weights.values, weight_decay=0.0)
    alone, lr = connect("single"), 2.0**-13
    pipeline = Pipeline([Chunk([unit], weights, reshard_after_forward=True)])
    for _ in range(32):
        training_step(
            pipeline, weights, slopes(1.0), world=alone, loss_group=alone, optimizer=optimizer, lr=lr, max_norm=0.0
        )
    # Adam's step for a constant gradient is lr. Below 1, bfloat16 has steps of 2^-8 and float16 of 2^-11.
    np.testing.assert_allclose(weights.values, [1 - 32 * lr], rtol=1e-6)
    seen = [value for _, value in unit.given]
    assert seen[0] == seen[1] == 1.0
    assert seen[-1] == pytest.approx(1 - 2.0**-8, abs=2.0**-12)
    assert {dtype for dtype, _ in unit.given} == {MINDSPORE_DTYPES[param_dtype]}
