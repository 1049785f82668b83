"""What experts' ranks do besides sending tokens: the auxiliary loss and the routers' biases."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace

import mindspore as ms
import numpy as np
import pytest
from attrs import evolve
from device_mesh import connect
from late_groups import LateMirror, Note, Noted
from mindspore import Tensor, mint, nn, ops
from moe_dispatch import AllToAllDispatcher
from parallel_trainer.batch import MicroBatch
from parallel_trainer.kernels import kernels
from parallel_trainer.parallel.expert_parallel import ExpertParallel, update_biases
from parallel_trainer.parallel.routing_record import ExpertLoads, RoutingRecord

ms.set_device("CPU")
ROWS, LENGTH, EXPERTS, CHOSEN = 2, 5, 4, 2
COEFFICIENT = 0.5


def loss_by_definition(probabilities: np.ndarray, ids: np.ndarray) -> float:
    """Mean over sequences of the sum over experts of f·P, token by token."""
    total = 0.0
    for row in range(ROWS):
        tokens = range(row * LENGTH, (row + 1) * LENGTH)
        for expert in range(EXPERTS):
            chosen = sum(expert in ids[token] for token in tokens)
            f = EXPERTS / (CHOSEN * LENGTH) * chosen
            total += f * sum(probabilities[token, expert] for token in tokens) / LENGTH
    return COEFFICIENT * total / ROWS


class Balanced(nn.Cell):
    """Weights times 3, with the auxiliary loss of probabilities, which are the second input."""

    def __init__(self, ep: ExpertParallel, ids: np.ndarray, coefficient: float) -> None:
        super().__init__()
        self._ep, self._ids, self._coefficient = ep, ids, coefficient

    def construct(self, weights: Tensor, probabilities: Tensor, batch: MicroBatch) -> Tensor:
        balanced = self._ep.balanced("layer", weights, probabilities, self._ids, batch, self._coefficient)
        return mint.sum(balanced * 3.0 + 0.0 * mint.sum(probabilities))


@pytest.mark.parametrize("divisor", [1, 8])
def test_gradient_of_the_auxiliary_loss_is_that_of_its_definition(divisor: int) -> None:
    generator = np.random.default_rng(0)
    probabilities = generator.random((ROWS * LENGTH, EXPERTS))
    ids = np.array([generator.permutation(EXPERTS)[:CHOSEN] for _ in range(ROWS * LENGTH)])
    ep = evolve(ExpertParallel.none(kernels("cpu"), ["layer"], EXPERTS), sequences=ROWS, divisor=divisor)
    batch = MicroBatch(np.zeros((ROWS, LENGTH), np.int32), np.zeros((ROWS, LENGTH), np.int32))
    cell = Balanced(ep, ids, COEFFICIENT)
    cell.set_grad()
    inputs = (Tensor(np.ones((ROWS * LENGTH, CHOSEN))), Tensor(probabilities), batch)
    assert cell(*inputs).asnumpy() == 3 * ROWS * LENGTH * CHOSEN
    d_weights, d_probabilities = ops.GradOperation(get_all=True)(cell)(*inputs)
    np.testing.assert_array_equal(d_weights.asnumpy(), 3.0)
    by_differences = np.empty_like(probabilities)
    for place in np.ndindex(probabilities.shape):
        moved = probabilities.copy()
        moved[place] += 1.0  # the loss is linear in the probabilities
        by_differences[place] = loss_by_definition(moved, ids) - loss_by_definition(probabilities, ids)
    np.testing.assert_allclose(d_probabilities.asnumpy(), divisor * by_differences, rtol=1e-10)
    collected = ep.record.collect(connect("single"))
    assert collected.balance_loss == pytest.approx(loss_by_definition(probabilities, ids), rel=1e-12)


def test_without_a_coefficient_nothing_is_balanced() -> None:
    ep = ExpertParallel.none(kernels("cpu"), ["layer"], EXPERTS)
    weights = Tensor(np.ones((2, CHOSEN)))
    batch = MicroBatch(np.zeros((1, 2), np.int32), np.zeros((1, 2), np.int32))
    ids = np.zeros((2, CHOSEN), np.int64)
    assert ep.balanced("layer", weights, Tensor(np.ones((2, EXPERTS))), ids, batch, 0.0) is weights


def test_tokens_are_counted_by_layer_until_they_are_collected() -> None:
    record = RoutingRecord(["first", "second"], 3)
    record.add_tokens("first", np.array([[0, 2], [2, 1]]))
    record.add_tokens("second", np.array([[1], [1]]))
    record.add_tokens("first", np.array([[2, 0]]))
    assert record.collect(connect("single")).tokens_per_expert.tolist() == [[2, 1, 3], [0, 2, 0]]
    assert record.collect(connect("single")).tokens_per_expert.tolist() == [[0, 0, 0], [0, 0, 0]]


def test_biases_move_towards_experts_with_fewer_tokens_than_the_mean() -> None:
    loads = ExpertLoads(("first", "second"), np.array([[9, 9, 9, 9], [10, 4, 2, 0]]), 0.0)
    # This rank's shard holds elements 1 and 2.
    held = SimpleNamespace(values=np.array([0.5, 0.5]), holding=SimpleNamespace(start=1))
    even = SimpleNamespace(values=np.array([0.25]), holding=SimpleNamespace(start=3))
    update_biases({"second": held, "first": even}, loads, 0.125)  # type: ignore[dict-item]
    assert held.values.tolist() == [0.5, 0.625]
    assert even.values.tolist() == [0.25]


class WithShared(nn.Cell):
    """Experts, and beside them 3 times a token."""

    def __init__(self, ep: ExpertParallel, ids: np.ndarray, note: Note) -> None:
        super().__init__()
        self._ep, self._ids, self._note = ep, ids, note

    def construct(self, x: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
        halves = tuple(lambda x, name=name: Noted.apply(x, self._note, name) * 3.0**0.5 for name in ("first", "second"))
        mlp = partial(kernels("cpu").grouped_mlp, gate_up=gate_up, down=down)
        return self._ep.experts("layer", x, self._ids, weights, mlp, beside=halves)


def test_what_all_tokens_go_through_is_computed_while_tokens_travel() -> None:
    events: list[str] = []
    generator = np.random.default_rng(0)
    mirrored = np.array([generator.permutation(4)[:2] for _ in range(6)])
    inputs = [Tensor(generator.standard_normal(shape)) for shape in ((6, 3), (6, 2), (2, 8, 3), (2, 3, 4))]
    results = []
    for ids, dispatcher in (
        (mirrored, AllToAllDispatcher(LateMirror(events.append), 4)),  # type: ignore[arg-type]
        (mirrored % 2, AllToAllDispatcher(connect("single"), 2)),
    ):
        ep = ExpertParallel(kernels("cpu"), dispatcher, RoutingRecord(["layer"], dispatcher.num_experts))
        cell = WithShared(ep, ids, events.append if dispatcher.num_experts == 4 else lambda _: None)
        cell.set_grad()
        out = cell(*inputs)
        results.append([out, *ops.GradOperation(get_all=True, sens_param=True)(cell)(*inputs, out)])
    forward = ["send", "first", "arrived", "send", "second", "arrived"]
    weights = ["send", "arrived"] * 2  # the numbers of weights and their gradients follow the rows
    assert events == [
        *forward,
        *("send", "second backward", "arrived", *weights),
        *("send", "first backward", "arrived"),
    ]
    for together, alone in zip(*results, strict=True):
        np.testing.assert_allclose(together.asnumpy(), alone.asnumpy(), rtol=1e-12, atol=1e-13)
