"""The halves of a backward, on one rank: what each adds, what is kept between them, and nothing computed twice."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np
import pytest
from device_mesh import Communicator, connect
from kernel_contract import kernel_set
from mindspore import Tensor, mint, ops
from mindspore.common import _Function
from parallel_trainer.batch import MicroBatch
from parallel_trainer.kernels import kernels, later
from parallel_trainer.kernels.interface import Kernels
from parallel_trainer.models.config import Qwen3Config
from parallel_trainer.models.qwen3 import Qwen3
from parallel_trainer.models.single import initial_weights, loss_and_gradients
from parallel_trainer.models.unit import Unit
from parallel_trainer.parallel.chunk import Chunk
from parallel_trainer.parallel.fully_shard import ShardedWeights
from parallel_trainer.parallel.weights import Normal, Weight

ONE = np.array([1.0])
MICRO_BATCHES = 3


def sharded(units: list[Unit]) -> ShardedWeights:
    alone = connect("single")
    groups: dict[str, Communicator] = {"fsdp": alone, "dp_replicate": alone, "tp": alone}
    declared = [weight for unit in units for weight in unit.weights]
    return ShardedWeights(declared, communicators=groups, dtype=np.dtype(np.float64), seed=0)


def qwen3(*, tied: bool, kernel_set: Kernels | None = None) -> Qwen3:
    config = Qwen3Config(
        vocab_size=11,
        hidden_size=8,
        intermediate_size=12,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=4,
        attention_bias=True,
        tie_word_embeddings=tied,
    )
    return Qwen3(config, kernel_set or kernels("cpu"))


def batches() -> list[MicroBatch]:
    ids, labels = np.random.default_rng(0).integers(0, 11, (2, MICRO_BATCHES, 2, 5), dtype=np.int32)
    positions = np.tile(np.arange(5, dtype=np.int32), (2, 1))
    return [MicroBatch(ids[number], positions, labels[number]) for number in range(MICRO_BATCHES)]


def whole_gradients(model: Qwen3) -> dict[str, np.ndarray]:
    """Of all micro-batches, each unit with tensors of its own, as when the model was compared with Hugging Face's."""
    values = initial_weights(model, seed=0, dtype="float64")
    found: dict[str, np.ndarray] = {}
    for batch in batches():
        for name, gradient in loss_and_gradients(model, values, batch)[1].items():
            found[name] = found.get(name, 0) + gradient.reshape(-1)
    return found


def is_product(name: str) -> bool:
    """Whether a weight is a matrix that something is multiplied with: all but norms, biases and the embedding."""
    return name.endswith("weight") and "norm" not in name and "embed" not in name


@pytest.mark.parametrize(
    ("tied", "reshard", "device"),
    [(tied, reshard, "cpu") for tied in (True, False) for reshard in (True, False)] + [(True, True, "ascend")],
)
def test_halves_add_up_to_the_backward_and_products_are_in_the_second(
    tied: bool, reshard: bool, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = qwen3(tied=tied, kernel_set=kernel_set(device, monkeypatch, exact=True))
    expected = whole_gradients(qwen3(tied=tied))
    weights = sharded(list(model.units))
    chunk = Chunk(model.units, weights, reshard_after_forward=reshard)
    tapes = [chunk.forward(Tensor(batch.input_ids), batch)[1] for batch in batches()]
    left = [chunk.backward_input(tape, Tensor(ONE))[1] for tape in tapes]

    first = {held.weight.name: weights.gradients[held.slice].copy() for held in weights}
    for name in expected.keys() - {"model.embed_tokens.weight"}:
        if is_product(name):
            assert not first[name].any(), name
        else:
            np.testing.assert_allclose(first[name], expected[name], rtol=1e-11, atol=1e-13)
    assert first["model.embed_tokens.weight"].any()
    for products in reversed(left):
        chunk.backward_weight(products)
    for held in weights:
        np.testing.assert_allclose(
            weights.gradients[held.slice], expected[held.weight.name], rtol=1e-11, atol=1e-13, err_msg=held.weight.name
        )


def test_no_forward_runs_twice_and_the_second_half_runs_none_of_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    model = qwen3(tied=False)
    chunk = Chunk(model.units, sharded(list(model.units)), reshard_after_forward=True)
    calls: list[str] = []

    def noted(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any) -> Any:
            calls.append(name)
            return function(*arguments)

        return run

    for unit in model.units:
        monkeypatch.setattr(unit, "construct", noted("construct", unit.construct))
    (batch, *_) = batches()
    _, tape = chunk.forward(Tensor(batch.input_ids), batch)
    assert len(calls) == len(model.units)
    calls.clear()
    monkeypatch.setattr(chunk, "_backwards", [noted("backward", backward) for backward in chunk._backwards])
    _, products = chunk.backward_input(tape, Tensor(ONE))
    assert calls == ["backward"] * len(model.units)
    chunk.backward_weight(products)
    assert len(calls) == len(model.units)


class Note:
    """Something that a kernel keeps for its backward."""


class Double(_Function):
    """x -> 2 x, with a note of what is alive: what it keeps for its backward, and its results."""

    notes: ClassVar[list[weakref.ref[Note]]] = []
    results: ClassVar[list[weakref.ref[np.ndarray]]] = []

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.note, result = Note(), 2 * x.asnumpy()
        Double.notes.append(weakref.ref(ctx.note))
        Double.results.append(weakref.ref(result))
        return Tensor.from_numpy(result)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        return Tensor.from_numpy(2 * dy.asnumpy())


class Doubles(Unit):
    """x -> sum(2 (2 x · w0) · w1)."""

    def __init__(self, *, trainable: bool = True) -> None:
        super().__init__([Weight(f"w{n}", (3, 3), init=Normal(1.0), trainable=trainable) for n in range(2)])

    def construct(self, x: Tensor, batch: MicroBatch, *weights: Tensor) -> Tensor:
        for weight in weights:
            x = kernels("cpu").linear(Double.apply(x), weight)
        return mint.sum(x)


def alive(references: list[weakref.ref[Any]]) -> int:
    gc.collect()
    return sum(reference() is not None for reference in references)


def test_between_the_halves_only_what_products_need_is_kept() -> None:
    Double.notes.clear(), Double.results.clear()
    unit = Doubles()
    chunk = Chunk([unit], sharded([unit]), reshard_after_forward=True)
    x, tape = chunk.forward(Tensor(np.ones((4, 3))), None)  # type: ignore[arg-type]
    assert (alive(Double.notes), alive(Double.results)) == (2, 2)
    gradient, products = chunk.backward_input(tape, Tensor(ONE))
    del x, tape, gradient
    assert (alive(Double.notes), alive(Double.results)) == (0, 2)
    chunk.backward_weight(products)
    del products
    assert (alive(Double.notes), alive(Double.results)) == (0, 0)


def test_frozen_weights_leave_nothing() -> None:
    unit = Doubles(trainable=False)
    chunk = Chunk([unit], sharded([unit]), reshard_after_forward=True)
    _, tape = chunk.forward(Tensor(np.ones((4, 3))), None)  # type: ignore[arg-type]
    gradient, products = chunk.backward_input(tape, Tensor(ONE))
    w0, w1 = (chunk.weights[name].values.reshape(3, 3) for name in ("w0", "w1"))
    np.testing.assert_allclose(gradient.asnumpy(), np.tile(4 * np.ones(3) @ w1 @ w0, (4, 1)))
    assert products.units == ((),)
    chunk.backward_weight(products)


class Reshaped(Unit):
    """Gives a kernel another tensor than its weight, whose product would be lost."""

    def construct(self, x: Tensor, batch: MicroBatch, *weights: Tensor) -> Tensor:
        return mint.sum(kernels("cpu").linear(x, weights[0].reshape(3, 3))).reshape(1)


def test_a_product_that_belongs_to_no_weight_is_noticed() -> None:
    unit = Reshaped([Weight("w", (9,), init=Normal(1.0))])
    chunk = Chunk([unit], sharded([unit]), reshard_after_forward=True)
    _, tape = chunk.forward(Tensor(np.ones((4, 3))), None)  # type: ignore[arg-type]
    with pytest.raises(AssertionError, match="unit 0 gives kernels other tensors than its weights"):
        chunk.backward_input(tape, Tensor(ONE))


def test_experts_products_are_put_off() -> None:
    """Three experts, of which one has no rows: what is left is what the whole backward gives."""
    generator = np.random.default_rng(0)
    rows, gate_up, down = (Tensor(generator.standard_normal(shape)) for shape in ((5, 4), (3, 6, 4), (3, 4, 3)))
    counts = np.array([2, 0, 3])

    def run(x: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
        return kernels("cpu").grouped_mlp(x, counts, gate_up, down)

    gradient = ops.GradOperation(get_all=True, sens_param=True)(run)
    dy = Tensor(generator.standard_normal((5, 4)))
    d_rows, *expected = (found.asnumpy() for found in gradient(rows, gate_up, down, dy))
    with later.put_off() as products:
        found, *nothing = gradient(rows, gate_up, down, dy)
    np.testing.assert_array_equal(found.asnumpy(), d_rows)
    assert not any(zeros.asnumpy().any() for zeros in nothing)
    for weight, whole in zip((gate_up, down), expected, strict=True):
        (product,) = products.of(weight)
        np.testing.assert_allclose(product(), whole, rtol=1e-12, atol=1e-14)
        assert whole[0].any()
        assert not whole[1].any()


def test_products_are_put_off_inside_only() -> None:
    assert later.running() is None
    with later.put_off() as outer:
        assert later.running() is outer
        with later.put_off() as inner:
            assert later.running() is inner
        assert later.running() is outer
    with pytest.raises(RuntimeError), later.put_off():
        raise RuntimeError
    assert later.running() is None
