"""Gradients of the CPU kernels: central differences, MindSpore's own derivatives, and weights freed in between."""

from __future__ import annotations

import numpy as np
import pytest
from mask_compression import causal
from mindspore import Tensor, mint, nn, ops
from parallel_trainer.kernels import kernels

CPU = kernels("cpu")
IDS = np.array([[3, 1, 3], [0, 3, 1]], np.int32)
LABELS = np.array([[0, 4, -100], [2, 2, 1]])
MASK = np.array([[1, 1, 1], [0, 1, 2.5]])
TABLE = CPU.rotary_table(np.array([[0, 1, 2], [5, 6, 0]]), 10.0 ** (-np.arange(2) / 2))
COUNTS = np.array([2, 0, 3, 0])
IDS_OF_EXPERTS = np.array([[4, 0], [1, 2], [0, 3]])

# Name: the kernel as a function of tensors alone, and the shapes of these.
CASES = {
    "embedding": (lambda weight: CPU.embedding(Tensor(IDS), weight), [(5, 3)]),
    "linear": (CPU.linear, [(2, 3, 4), (5, 4)]),
    "linear_bias": (CPU.linear, [(2, 3, 4), (5, 4), (5,)]),
    "rms_norm": (lambda x, weight: CPU.rms_norm(x, weight, 0.1), [(2, 3, 2, 4), (4,)]),
    "rotary": (lambda x: CPU.rotary(x, TABLE), [(2, 3, 2, 4)]),
    "rotary_interleaved": (lambda x: CPU.rotary(x, TABLE, interleaved=True), [(2, 3, 2, 7)]),
    "split": (lambda x: CPU.concat(*reversed(CPU.split(x, (1, 3)))), [(2, 3, 4)]),
    "split_unused": (lambda x: CPU.split(x, (1, 3))[1], [(2, 3, 4)]),
    "concat": (CPU.concat, [(2, 3, 4, 2), (2, 3, 1, 3), (2, 3, 4, 1)]),
    "attention_narrow_values": (
        lambda q, k, v: CPU.attention(q, k, v, 0.6, causal(q.shape[1], rows=q.shape[0])),
        [(1, 5, 4, 4), (1, 5, 2, 4), (1, 5, 2, 3)],
    ),
    "grouped_mlp": (lambda *arrays: CPU.grouped_mlp(arrays[0], COUNTS, *arrays[1:]), [(5, 3), (4, 4, 3), (4, 3, 2)]),
    **{
        f"router_{scoring}_{name}": (
            lambda logits, scoring=scoring, normalized=normalized: CPU.concat(
                *CPU.router_weights(logits, IDS_OF_EXPERTS, scoring=scoring, normalized=normalized, scaling=2.5)
            ),
            [(3, 5)],
        )
        for scoring in ("sigmoid", "softmax")
        for name, normalized in (("scores", False), ("normalized", True))
    },
    "attention": (
        lambda q, k, v: CPU.attention(q, k, v, 0.6, causal(q.shape[1], rows=q.shape[0])),
        [(2, 5, 2, 4), (2, 5, 2, 4), (2, 5, 2, 4)],
    ),
    "attention_grouped": (
        lambda q, k, v: CPU.attention(q, k, v, 0.6, causal(q.shape[1], rows=q.shape[0])),
        [(1, 6, 4, 2), (1, 6, 2, 2), (1, 6, 2, 2)],
    ),
    "swiglu": (CPU.swiglu, [(2, 3, 4), (2, 3, 4)]),
    "cross_entropy_sum": (lambda logits: CPU.cross_entropy_sum(logits, LABELS, MASK), [(2, 3, 5)]),
}


class Calls(nn.Cell):
    """A function as the cell that MindSpore differentiates."""

    def __init__(self, function):
        super().__init__(auto_prefix=False)
        self.function = function

    def construct(self, *tensors):
        return self.function(*tensors)


def gradients(function, arrays, dy):
    """Of sum(dy * function(*arrays)) for every array."""
    derivative = ops.GradOperation(get_all=True, sens_param=True)(Calls(function))
    return [gradient.asnumpy() for gradient in derivative(*map(Tensor, arrays), Tensor(dy))]


def inputs(shapes):
    generator = np.random.default_rng(7)
    return [generator.standard_normal(shape) for shape in shapes]


def output_gradient(function, arrays):
    return np.random.default_rng(8).standard_normal(function(*map(Tensor, arrays)).shape)


@pytest.mark.parametrize("name", CASES)
def test_gradients_are_those_of_central_differences(name):
    function, shapes = CASES[name]
    arrays = inputs(shapes)
    dy = output_gradient(function, arrays)
    step = 1e-5
    for position, gradient in enumerate(gradients(function, arrays, dy)):
        differences = np.empty_like(gradient)
        for place in np.ndindex(gradient.shape):
            sides = []
            for sign in (1, -1):
                moved = [array.copy() for array in arrays]
                moved[position][place] += sign * step
                sides.append((function(*map(Tensor, moved)).asnumpy() * dy).sum())
            differences[place] = (sides[0] - sides[1]) / (2 * step)
        np.testing.assert_allclose(gradient, differences, rtol=1e-6, atol=1e-8)


def plain_rms_norm(x, weight):
    # MindSpore rounds Python numbers to float32, even beside a float64 tensor: constants have to be tensors.
    return x * mint.rsqrt(mint.mean(mint.square(x), -1, True) + Tensor(np.float64(0.1))) * weight


def plain_attention(q, k, v):
    tokens, group = q.shape[1], q.shape[2] // k.shape[2]
    q, k, v = (mint.permute(x, (0, 2, 1, 3)) for x in (q, k, v))
    keys_of_heads = [head // group for head in range(q.shape[1])]
    k, v = (mint.cat([x[:, head : head + 1] for head in keys_of_heads], 1) for x in (k, v))
    scores = ops.BatchMatMul(transpose_b=True)(q, k) * Tensor(np.float64(0.6)) + Tensor(
        np.triu(np.full((tokens, tokens), -1e9), 1)
    )
    return mint.permute(ops.BatchMatMul()(ops.softmax(scores, -1), v), (0, 2, 1, 3))


PLAIN = {
    "linear": lambda x, weight: mint.matmul(x, mint.transpose(weight, 0, 1)),
    "rms_norm": plain_rms_norm,
    "swiglu": lambda gate, up: gate * mint.sigmoid(gate) * up,
    "attention": plain_attention,
    "attention_grouped": plain_attention,
}
LARGE = {
    "linear": [(2, 70, 33), (40, 33)],
    "rms_norm": [(2, 70, 33), (33,)],
    "swiglu": [(2, 70, 33), (2, 70, 33)],
    "attention": [(2, 200, 2, 8)] * 3,
    "attention_grouped": [(1, 150, 6, 8), (1, 150, 2, 8), (1, 150, 2, 8)],
}


@pytest.mark.parametrize("name", PLAIN)
def test_gradients_are_those_of_plain_operators(name):
    arrays = inputs(LARGE[name])
    dy = output_gradient(PLAIN[name], arrays)
    ours, theirs = (gradients(function, arrays, dy) for function in (CASES[name][0], PLAIN[name]))
    for mine, other in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(mine, other, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("name", CASES)
def test_float32_gradients_are_float32_and_near_those_of_float64(name):
    function, shapes = CASES[name]
    arrays = inputs(shapes)
    dy = output_gradient(function, arrays)
    narrow = gradients(function, [array.astype(np.float32) for array in arrays], dy.astype(np.float32))
    for mine, wide in zip(narrow, gradients(function, arrays, dy), strict=True):
        assert mine.dtype == np.float32
        np.testing.assert_allclose(mine, wide, rtol=1e-4, atol=1e-5)


def test_tokens_that_do_not_count_have_gradient_zero():
    (gradient,) = gradients(CASES["cross_entropy_sum"][0], inputs([(2, 3, 5)]), np.float64(1))
    zero = ~gradient.any(axis=-1)
    np.testing.assert_array_equal(zero, [[False, False, True], [True, False, False]])


def test_experts_without_rows_have_gradient_zero():
    arrays = inputs(CASES["grouped_mlp"][1])
    _, d_gate_up, d_down = gradients(CASES["grouped_mlp"][0], arrays, np.ones((5, 3)))
    for gradient in (d_gate_up, d_down):
        np.testing.assert_array_equal(gradient.any(axis=(1, 2)), COUNTS > 0)


def test_experts_without_any_rows_have_gradients_of_their_shape():
    arrays = [np.ones((0, 3)), np.ones((2, 4, 3)), np.ones((2, 3, 2))]
    derivative = ops.GradOperation(get_all=True, sens_param=True)(
        Calls(lambda *tensors: CPU.grouped_mlp(tensors[0], np.zeros(2, int), *tensors[1:]))
    )
    found = derivative(*map(Tensor.from_numpy, arrays), Tensor.from_numpy(np.ones((0, 3))))
    for gradient, array in zip(found, arrays, strict=True):
        np.testing.assert_array_equal(gradient.asnumpy(), np.zeros_like(array))


@pytest.mark.parametrize("name", ["embedding", "linear", "rms_norm", "grouped_mlp"])
def test_a_weight_may_be_freed_between_forward_and_backward(name):
    function, shapes = CASES[name]
    arrays = inputs(shapes)
    dy = output_gradient(function, arrays)
    expected = gradients(function, arrays, dy)

    tensors = [Tensor(array) for array in arrays]
    cell = Calls(function)
    cell.set_grad(True)
    y = cell(*tensors)
    y_before = y.asnumpy().copy()
    storage = tensors[-1].untyped_storage()
    storage.resize_(0)
    overwritten = [np.full_like(arrays[-1], np.nan) for _ in range(50)]
    storage.resize_(arrays[-1].nbytes)
    tensors[-1].asnumpy()[...] = arrays[-1]
    result = ops.GradOperation(get_all=True, sens_param=True)(cell)(*tensors, Tensor(dy))

    assert np.isnan(overwritten).all()
    np.testing.assert_array_equal(y.asnumpy(), y_before)
    for mine, other in zip(result, expected, strict=True):
        np.testing.assert_array_equal(mine.asnumpy(), other)


def test_a_frozen_weight_gets_no_gradient():
    x, weight = inputs([(2, 4), (3, 4)])
    dx, d_weight = gradients(lambda x, w: CPU.linear(x, ops.stop_gradient(w)), [x, weight], np.ones((2, 3)))
    np.testing.assert_allclose(dx, np.ones((2, 3)) @ weight)
    assert not d_weight.any()
