"""Tensor parallelism where one process is enough: parts that add up, and what is under way during the backward pass."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import numpy as np
import pytest
from mindspore import Tensor, ops
from parallel_trainer.kernels import kernels
from parallel_trainer.parallel.tensor_parallel import TensorParallel

CPU = kernels("cpu")
linear = import_module("parallel_trainer.kernels.cpu.linear")  # the package has a function of this name


def test_parts_of_a_table_add_up_to_its_rows() -> None:
    table = np.random.default_rng(0).standard_normal((7, 3))
    ids = np.array([[0, 6, 3], [3, 2, 5]], np.int32)
    parts = [(0, 3), (3, 5), (5, 7)]
    rows = [CPU.embedding(Tensor(ids), Tensor(table[a:b]), first=a, vocab_size=7).asnumpy() for a, b in parts]
    np.testing.assert_array_equal(sum(rows), table[ids])
    with pytest.raises(ValueError, match="0 to 6 for vocab_size 7"):
        CPU.embedding(Tensor(np.array([7], np.int32)), Tensor(table[5:]), first=5, vocab_size=7)


class OtherPart:
    """A group of two ranks, seen from rank 0, whose other rank holds these logits."""

    rank, size = 0, 2

    def __init__(self, logits: np.ndarray, labels: np.ndarray, first: int) -> None:
        self._logits, self._labels, self._first = logits, labels, first
        self._largest: np.ndarray | None = None

    def all_reduce(self, x: np.ndarray, op: str = "sum") -> np.ndarray:
        if op == "max":
            self._largest = np.maximum(x, self._logits.max(axis=1))
            return self._largest
        shifted = self._logits - self._largest[:, None]
        columns = self._labels - self._first
        of_labels = [row[c] if 0 <= c < row.size else 0.0 for row, c in zip(shifted, columns, strict=True)]
        return x + np.stack((np.exp(shifted).sum(axis=1), of_labels))


def test_loss_of_a_part_of_the_vocabulary_is_that_of_the_whole_and_so_is_its_part_of_the_gradient() -> None:
    generator = np.random.default_rng(1)
    logits, labels = 30 * generator.standard_normal((5, 9)), np.array([0, 8, 4, -100, 3])
    mask = np.array([1, 2, 1, 1, 0.5])

    def whole(x: Tensor) -> Tensor:
        return CPU.cross_entropy_sum(x, labels, mask)

    def part(x: Tensor) -> Tensor:
        other = OtherPart(logits[:, 4:], labels, 4)
        return CPU.cross_entropy_sum(x, labels, mask, first=0, vocab_size=9, group=other)

    expected, found = whole(Tensor(logits)).asnumpy(), part(Tensor(logits[:, :4].copy())).asnumpy()
    assert found == pytest.approx(expected, rel=1e-14)
    of_whole = ops.GradOperation()(whole)(Tensor(logits)).asnumpy()
    of_part = ops.GradOperation()(part)(Tensor(logits[:, :4].copy())).asnumpy()
    np.testing.assert_allclose(of_part, of_whole[:, :4], atol=1e-13)


class Recorded:
    """A group of two ranks, seen from rank 1, that records what happens; the other rank's gradient is given."""

    rank, size = 1, 2

    def __init__(self, others: np.ndarray, events: list[str]) -> None:
        self._others, self._events = others, events

    def reduce_scatter(self, x: np.ndarray) -> np.ndarray:
        return x[len(x) // 2 :].copy()

    def iall_gather(self, x: np.ndarray, *, out: np.ndarray) -> Any:
        self._events.append("gather starts")
        out[...] = np.nan  # whoever reads it before `wait` gets this
        group = self

        class Request:
            def wait(self) -> None:
                group._events.append("gather done")
                out[: len(x)], out[len(x) :] = group._others, x

        return Request()


def test_gradient_is_gathered_while_the_weight_gradient_of_own_tokens_is_computed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    events: list[str] = []
    compute = linear.weight_gradient

    def recorded(dy: np.ndarray, x: np.ndarray) -> np.ndarray:
        events.append(f"weight gradient of {len(dy)}")
        return compute(dy, x)

    monkeypatch.setattr(linear, "weight_gradient", recorded)
    generator = np.random.default_rng(2)
    x, weight = generator.standard_normal((6, 4)), generator.standard_normal((5, 4))
    dy = generator.standard_normal((6, 5))
    tp = TensorParallel(CPU, Recorded(dy[:3], events))  # type: ignore[arg-type]
    gradient = ops.GradOperation(get_all=True, sens_param=True)(lambda x, w: tp.row_linear(x, w))
    dx, d_weight = gradient(Tensor(x), Tensor(weight), Tensor(dy[3:].copy()))
    np.testing.assert_allclose(dx.asnumpy(), dy @ weight, atol=1e-14)
    np.testing.assert_allclose(d_weight.asnumpy(), dy.T @ x, atol=1e-14)
    assert events[:3] == ["gather starts", "weight gradient of 3", "gather done"]
