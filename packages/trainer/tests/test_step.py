"""The training step and the chunk under it, on one rank: what is refused, skipped, gathered, and in which order."""

from __future__ import annotations

import math
from typing import Any

import mindspore as ms
import numpy as np
import pytest
from attrs import evolve
from device_mesh import Communicator, connect
from mindspore import Tensor, mint
from parallel_config.schema import Training
from parallel_trainer.batch import MicroBatch
from parallel_trainer.errors import UserError
from parallel_trainer.kernels import kernels
from parallel_trainer.models.config import Qwen3Config
from parallel_trainer.models.qwen3 import Qwen3
from parallel_trainer.models.single import initial_weights, loss_and_gradients
from parallel_trainer.models.unit import Unit
from parallel_trainer.optim.adamw import AdamW
from parallel_trainer.parallel.chunk import Chunk
from parallel_trainer.parallel.fully_shard import ShardedWeight, ShardedWeights
from parallel_trainer.parallel.pipeline import Pipeline
from parallel_trainer.parallel.weights import Constant, Normal, Weight
from parallel_trainer.step import StepResult, skipped_in_a_row, training_step

ms.set_device("CPU")


class Slope(Unit):
    """loss = slope · w, the slope from `position_ids`."""

    def __init__(self) -> None:
        super().__init__([Weight("w", (1,), init=Constant(1.0))])

    def construct(self, x: Tensor, batch: MicroBatch, *weights: Tensor) -> Tensor:
        return mint.sum(weights[0] * Tensor(batch.position_ids).astype(weights[0].dtype)).reshape(1)


def part(slope: float, mask: list[float]) -> MicroBatch:
    ids = np.zeros((1, len(mask)), np.int32)
    return MicroBatch(ids, np.array([slope]), loss_mask=np.array([mask], np.float32))


def sharded(units: list[Unit], *, average: bool = False, dtype: str = "float64") -> ShardedWeights:
    alone = connect("single")
    groups: dict[str, Communicator] = {"fsdp": alone, "dp_replicate": alone, "tp": alone}
    declared = [weight for unit in units for weight in unit.weights]
    return ShardedWeights(declared, communicators=groups, dtype=np.dtype(dtype), seed=0, average=average)


def step(
    parts: list[MicroBatch], unit: Unit | None = None, dtype: str = "float64", **options: object
) -> tuple[StepResult, ShardedWeights]:
    unit = unit or Slope()
    weights = sharded([unit], dtype=dtype)
    chunk = Chunk([unit], weights, reshard_after_forward=True)
    settings = {"lr": 0.1, "max_norm": 0.0} | options
    optimizer = AdamW(weights.values, weight_decay=0.0)
    result = training_step(
        Pipeline([chunk]),
        weights,
        parts,
        world=connect("single"),
        loss_group=connect("single"),
        optimizer=optimizer,
        **settings,
    )
    return result, weights


def test_loss_and_gradient_are_means_over_valid_tokens() -> None:
    result, weights = step([part(6.0, [1, 1, 1, 0]), part(3.0, [1, 0, 0, 0])])
    assert result == StepResult(loss=9 / 4, grad_norm=9 / 4, valid_tokens=4, updated=True)
    np.testing.assert_allclose(weights.gradients, [9 / 4])
    np.testing.assert_allclose(weights.values, [1.0 - 0.1], rtol=1e-6)  # AdamW's first step is lr · sign


@pytest.mark.parametrize("tied", [True, False])
def test_step_has_the_gradients_of_the_model(tied: bool) -> None:
    """Those that units give when each has tensors of its own, as when the model was compared with Hugging Face's."""
    config = Qwen3Config(
        vocab_size=11,
        hidden_size=8,
        intermediate_size=12,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=4,
        tie_word_embeddings=tied,
    )
    model = Qwen3(config, kernels("cpu"))
    generator = np.random.default_rng(0)
    ids, labels = generator.integers(0, 11, (2, 2, 5), dtype=np.int32)
    batch = MicroBatch(ids, np.tile(np.arange(5, dtype=np.int32), (2, 1)), labels)
    values = initial_weights(model, seed=0, dtype="float64")
    loss, expected = loss_and_gradients(model, values, batch)

    weights = sharded(list(model.units))
    Pipeline([Chunk(model.units, weights, reshard_after_forward=True)]).run([batch, batch], Tensor(np.array([0.5])))
    assert set(expected) == {held.weight.name for held in weights}
    for held in weights:
        np.testing.assert_allclose(
            weights.gradients[held.slice], expected[held.weight.name].reshape(-1), rtol=1e-12, atol=1e-14 * loss
        )


@pytest.mark.parametrize(("max_norm", "clipped"), [(1.0, 1.0), (2.0, 2.0), (100.0, 3.0), (0.0, 3.0), (-1.0, 3.0)])
def test_gradients_are_clipped_to_the_norm(max_norm: float, clipped: float) -> None:
    result, weights = step([part(6.0, [1, 1])], max_norm=max_norm)
    assert result.grad_norm == pytest.approx(3.0)
    np.testing.assert_allclose(weights.gradients, [clipped], rtol=1e-5)


def test_batch_without_a_valid_token_is_skipped_and_nothing_is_computed_or_changed(monkeypatch) -> None:
    unit = Slope()
    weights = sharded([unit])
    weights.gradients[...] = 7.0
    optimizer = AdamW(weights.values, weight_decay=0.1)
    monkeypatch.setattr(Pipeline, "run", lambda *arguments: pytest.fail("nothing is to be computed"))
    result = training_step(
        Pipeline([Chunk([unit], weights, reshard_after_forward=True)]),
        weights,
        [part(1.0, [0, 0]), part(float("nan"), [0, 0])],
        world=connect("single"),
        loss_group=connect("single"),
        optimizer=optimizer,
        lr=0.1,
        max_norm=1.0,
    )
    assert (result.valid_tokens, result.updated, result.mtp_loss) == (0, False, None)
    assert [math.isnan(number) for number in (result.loss, result.grad_norm)] == [True, True]
    np.testing.assert_array_equal(weights.values, [1.0])
    assert (optimizer.steps, *optimizer.first_moment, *optimizer.second_moment) == (0, 0.0, 0.0)


def test_batch_without_a_valid_token_has_no_loss_of_a_further_prediction() -> None:
    nothing = evolve(part(6.0, [0, 0]), ahead=part(1.0, [0, 0]))
    result, _ = step([nothing], unit=TwoSlopes(), loss_weights=(1.0, 0.25))
    assert result.mtp_loss is not None
    assert math.isnan(result.mtp_loss)


def test_skipped_steps_are_counted_until_the_limit() -> None:
    section = Training(max_consecutive_skipped_steps=3)
    counts = [0]
    for updated in (False, False, True, False, False):
        counts.append(skipped_in_a_row(counts[-1], section, updated=updated))
    assert counts == [0, 1, 2, 0, 1, 2]
    with pytest.raises(UserError, match=r"3 steps in a row.*no token was valid.*max_consecutive_skipped_steps is 3"):
        skipped_in_a_row(2, section, updated=False)
    assert skipped_in_a_row(2, Training(), updated=False) == 3, "0 is no limit"


def test_ignored_labels_do_not_count() -> None:
    labels = np.array([[2, 3, -100, -100]])
    assert MicroBatch(labels, labels, labels).valid_tokens() == 2
    assert MicroBatch(labels, labels, labels, np.array([[0, 1, 1, 1]])).valid_tokens() == 1
    assert MicroBatch(labels, labels).valid_tokens() == 4


def test_masked_micro_batch_beside_a_valid_one_adds_nothing() -> None:
    result, _ = step([part(0.0, [0, 0]), part(4.0, [1, 1])])
    assert result.loss == 2.0


class TwoSlopes(Slope):
    """Two losses, as `Slope` for the tokens and for those ahead of them."""

    def construct(self, x: Tensor, batch: MicroBatch, *weights: Tensor) -> Tensor:
        assert batch.ahead is not None
        return mint.cat([Slope.construct(self, x, tokens, *weights) for tokens in (batch, batch.ahead)])


@pytest.mark.parametrize(("further", "loss", "norm"), [([0, 0], 0.0, 3.0), ([1, 1], 5.0, 3.0 + 0.25 * 5.0)])
def test_second_loss_is_the_mean_over_its_own_tokens_and_zero_without_any(
    further: list[float], loss: float, norm: float
) -> None:
    ahead = part(10.0 * max(further), further)
    result, _ = step([evolve(part(6.0, [1, 1]), ahead=ahead)], unit=TwoSlopes(), loss_weights=(1.0, 0.25))
    assert (result.loss, result.mtp_loss, result.updated) == (3.0, loss, True)
    assert result.grad_norm == pytest.approx(norm)


@pytest.mark.parametrize("slope", [float("nan"), float("inf")])
def test_non_finite_loss_is_refused_or_skipped_and_changes_no_weight(slope: float) -> None:
    with pytest.raises(UserError, match="training cannot go on"):
        step([part(slope, [1])])
    result, weights = step([part(slope, [1])], skip_non_finite=True)
    assert not result.updated
    np.testing.assert_array_equal(weights.values, [1.0])


@pytest.mark.parametrize(("max_norm", "updated"), [(0.0, False), (1.0, True)])
def test_gradients_whose_squares_overflow_are_refused_or_skipped_unless_clipped(max_norm: float, updated: bool) -> None:
    """1e25 is a number of float32 and its square is not: 1/inf would leave the weight where it is for ever."""
    steep: dict[str, Any] = {"parts": [part(1e25, [1])], "max_norm": max_norm, "dtype": "float32"}
    result, weights = step(**steep, skip_non_finite=True)
    assert result.updated is updated
    np.testing.assert_allclose(weights.values, [0.9 if updated else 1.0], rtol=1e-6)
    if not updated:
        with pytest.raises(UserError, match=r"norm is 1e\+25 after clipping.*float32.*9.2e\+18.*those before"):
            step(**steep)


@pytest.mark.parametrize("skip", [False, True])
def test_an_update_that_is_not_finite_ends_the_run_and_says_that_weights_are_lost(skip: bool) -> None:
    for settings in ({"lr": 1e309}, {"lr": -math.inf}):
        with pytest.raises(UserError, match=r"update of this step .* not finite.*nothing is saved.*are lost"):
            step([part(6.0, [1])], skip_non_finite=skip, **settings)


class Scale(Unit):
    """x -> x · w."""

    def construct(self, x: Tensor, batch: MicroBatch, *weights: Tensor) -> Tensor:
        return x * weights[0]


class Sum(Unit):
    """x -> sum(x)."""

    def construct(self, x: Tensor, batch: MicroBatch, *weights: Tensor) -> Tensor:
        return mint.sum(x)


def test_backwards_in_any_order_give_the_gradients_of_their_own_micro_batch() -> None:
    shape = (1, 3)
    units: list[Unit] = [Scale([Weight(f"w{i}", shape, init=Normal(1.0))]) for i in range(2)]
    units.append(Sum([]))
    inputs = [np.full((2, 3), i + 1.0) for i in range(4)]
    for order in ((0, 1, 2, 3), (2, 0, 3, 1)):
        weights = sharded(units)
        chunk = Chunk(units, weights, reshard_after_forward=True)
        tapes = [chunk.forward(Tensor(x), part(0.0, [1]))[1] for x in inputs]
        w0, w1 = (weights[f"w{i}"].values.reshape(shape) for i in range(2))
        expected = np.zeros_like(weights.gradients)
        for i in order:
            dx = chunk.backward(tapes[i], Tensor(np.array(1.0)))
            np.testing.assert_allclose(dx.asnumpy(), np.broadcast_to(w0 * w1, (2, 3)))
            column = inputs[i].sum(0, keepdims=True)
            expected += np.concatenate([(column * w1).reshape(-1), (column * w0).reshape(-1)])
            np.testing.assert_allclose(weights.gradients, expected)


@pytest.mark.parametrize(("reshard", "gathers_by_unit"), [(True, 6), (False, 1)])
def test_resharding_decides_how_often_a_unit_is_gathered(reshard: bool, gathers_by_unit: int, monkeypatch) -> None:
    units: list[Unit] = [Scale([Weight(f"w{i}", (1, 3), init=Normal(1.0))]) for i in range(2)]
    units.append(Sum([]))
    weights = sharded(units)
    chunk = Chunk(units, weights, reshard_after_forward=reshard)
    filled: list[str] = []
    gather = ShardedWeight.gather

    def counted(self: ShardedWeight) -> None:
        if self.users == 0:
            filled.append(self.weight.name)
        gather(self)

    monkeypatch.setattr(ShardedWeight, "gather", counted)
    for _ in range(3):  # three micro-batches of one step
        _, tape = chunk.forward(Tensor(np.ones((1, 3))), part(0.0, [1]))
        chunk.backward(tape, Tensor(np.array(1.0)))
    chunk.end_step()
    assert filled.count("w0") == filled.count("w1") == gathers_by_unit
    assert all(sharded.users == 0 for sharded in weights)
