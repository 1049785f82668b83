"""What experts' ranks do besides sending tokens: counting them, the routers' biases, and what is computed meanwhile."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace

import mindspore as ms
import numpy as np
from device_mesh import connect
from late_groups import LateMirror, Note, Noted
from mindspore import Tensor, nn, ops
from moe_dispatch import AllToAllDispatcher
from parallel_trainer.kernels import kernels
from parallel_trainer.parallel.expert_parallel import ExpertParallel, update_biases
from parallel_trainer.parallel.routing_record import ExpertLoads, RoutingRecord

ms.set_device("CPU")


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
