"""Gradients of the kernels: central differences, MindSpore's own derivatives, and weights freed in between.

Those of the CPU set, in float64, are what the Ascend set's have to be.
"""

from __future__ import annotations

import numpy as np
import pytest
from kernel_contract import SETS, kernel_set
from mask_compression import causal, from_lengths
from mindspore import Tensor, mint, nn, ops
from parallel_trainer.kernels import kernels, later

IDS = np.array([[3, 1, 3], [0, 3, 1]], np.int32)
LABELS = np.array([[0, 4, -100], [2, 2, 1]])
MASK = np.array([[1, 1, 1], [0, 1, 2.5]])
POSITIONS, FREQUENCIES = np.array([[0, 1, 2], [5, 6, 0]]), 10.0 ** (-np.arange(2) / 2)
DOCUMENTS = from_lengths([[2, 3], [4, 1]])
COUNTS = np.array([2, 0, 3, 0])
IDS_OF_EXPERTS = np.array([[4, 0], [1, 2], [0, 3]])


def cases(kernel_set):
    """By name: a kernel as a function of tensors alone, and the shapes of these."""
    table = kernel_set.rotary_table(POSITIONS, FREQUENCIES)

    def there_and_back(x, weights):
        rows, _, order = kernel_set.permute(x, IDS_OF_EXPERTS, 5)
        return kernel_set.unpermute(rows * rows, weights, order)

    return {
        "embedding": (lambda weight: kernel_set.embedding(Tensor(IDS), weight), [(5, 3)]),
        "linear": (kernel_set.linear, [(2, 3, 4), (5, 4)]),
        "linear_bias": (kernel_set.linear, [(2, 3, 4), (5, 4), (5,)]),
        "rms_norm": (lambda x, weight: kernel_set.rms_norm(x, weight, 0.1), [(2, 3, 2, 4), (4,)]),
        "rotary": (lambda x: kernel_set.rotary(x, table), [(2, 3, 2, 4)]),
        "rotary_interleaved": (lambda x: kernel_set.rotary(x, table, interleaved=True), [(2, 3, 2, 7)]),
        "split": (lambda x: kernel_set.concat(*reversed(kernel_set.split(x, (1, 3)))), [(2, 3, 4)]),
        "split_unused": (lambda x: kernel_set.split(x, (1, 3))[1], [(2, 3, 4)]),
        "concat": (kernel_set.concat, [(2, 3, 4, 2), (2, 3, 1, 3), (2, 3, 4, 1)]),
        "attention_narrow_values": (
            lambda q, k, v: kernel_set.attention(q, k, v, 0.6, causal(q.shape[1], rows=q.shape[0])),
            [(1, 5, 4, 4), (1, 5, 2, 4), (1, 5, 2, 3)],
        ),
        "permute": (lambda x: kernel_set.permute(x, IDS_OF_EXPERTS, 5)[0], [(3, 4)]),
        "unpermute": (there_and_back, [(3, 4), (3, 2)]),
        "grouped_mlp": (
            lambda *arrays: kernel_set.grouped_mlp(arrays[0], COUNTS, *arrays[1:]),
            [(5, 3), (4, 4, 3), (4, 3, 2)],
        ),
        **{
            f"router_{scoring}_{name}": (
                lambda logits, scoring=scoring, normalized=normalized: kernel_set.concat(
                    *kernel_set.router_weights(
                        logits, IDS_OF_EXPERTS, scoring=scoring, normalized=normalized, scaling=2.5
                    )
                ),
                [(3, 5)],
            )
            for scoring in ("sigmoid", "softmax")
            for name, normalized in (("scores", False), ("normalized", True))
        },
        "attention": (
            lambda q, k, v: kernel_set.attention(q, k, v, 0.6, causal(q.shape[1], rows=q.shape[0])),
            [(2, 5, 2, 4), (2, 5, 2, 4), (2, 5, 2, 4)],
        ),
        "attention_grouped": (
            lambda q, k, v: kernel_set.attention(q, k, v, 0.6, causal(q.shape[1], rows=q.shape[0])),
            [(1, 6, 4, 2), (1, 6, 2, 2), (1, 6, 2, 2)],
        ),
        "swiglu": (kernel_set.swiglu, [(2, 3, 4), (2, 3, 4)]),
        "cross_entropy_sum": (lambda logits: kernel_set.cross_entropy_sum(logits, LABELS, MASK), [(2, 3, 5)]),
        "attention_packed": (
            lambda q, k, v: kernel_set.attention(q, k, v, 0.6, DOCUMENTS),
            [(2, 5, 4, 4), (2, 5, 2, 4), (2, 5, 2, 3)],
        ),
        "embedding_part": (lambda weight: kernel_set.embedding(Tensor(IDS), weight, first=1, vocab_size=5), [(2, 3)]),
    }


ON_A_CPU = pytest.mark.skipif("cpu" not in SETS, reason="float64 is for a CPU: run this on a machine without an NPU")
CPU = kernels("cpu")
CASES = cases(CPU)
IN_HALVES = {name for name in CASES if name.startswith("attention")}
"""What Ascend computes in bfloat16 or float16 alone."""


@pytest.fixture(params=SETS)
def sets_cases(request, monkeypatch):
    """The cases of every kernel set, and its name."""
    return cases(kernel_set(request.param, monkeypatch)), request.param


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


@ON_A_CPU
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


@ON_A_CPU
@pytest.mark.parametrize("name", PLAIN)
def test_gradients_are_those_of_plain_operators(name):
    arrays = inputs(LARGE[name])
    dy = output_gradient(PLAIN[name], arrays)
    ours, theirs = (gradients(function, arrays, dy) for function in (CASES[name][0], PLAIN[name]))
    for mine, other in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(mine, other, rtol=1e-9, atol=1e-10)


def check_narrow_gradients(narrow_cases, name, dtype, *, rtol, atol):
    function, shapes = CASES[name]
    arrays = inputs(shapes)
    dy = output_gradient(function, arrays)
    of_loss = np.promote_types(dtype, np.float32) if not dy.shape else dtype
    narrow = gradients(narrow_cases[name][0], [array.astype(dtype) for array in arrays], dy.astype(of_loss))
    for mine, wide in zip(narrow, gradients(function, arrays, dy), strict=True):
        assert mine.dtype == dtype
        np.testing.assert_allclose(mine, wide, rtol=rtol, atol=atol)


@pytest.mark.parametrize("name", CASES)
def test_float32_gradients_are_float32_and_near_those_of_float64(name, sets_cases):
    narrow_cases, set_name = sets_cases
    rounded = set_name == "ascend" and name in IN_HALVES
    rtol, atol = (5e-2, 5e-2) if rounded else (1e-4, 1e-5)
    check_narrow_gradients(narrow_cases, name, np.float32, rtol=rtol, atol=atol)


@ON_A_CPU
@pytest.mark.parametrize("name", CASES)
def test_gradients_on_ascend_are_those_on_a_cpu_where_nothing_is_rounded(name, monkeypatch):
    check_narrow_gradients(cases(kernel_set("ascend", monkeypatch, exact=True)), name, np.float64, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", CASES)
def test_float16_gradients_on_ascend_are_float16_and_near_those_of_float64(name, monkeypatch):
    check_narrow_gradients(cases(kernel_set("ascend", monkeypatch)), name, np.float16, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("name", ["linear", "linear_bias", "grouped_mlp"])
def test_products_that_are_put_off_are_the_gradients(name, sets_cases):
    function, shapes = sets_cases[0][name]
    tensors = [Tensor(array.astype(np.float32)) for array in inputs(shapes)]
    dy = Tensor(output_gradient(function, [tensor.asnumpy() for tensor in tensors]).astype(np.float32))
    derivative = ops.GradOperation(get_all=True, sens_param=True)
    expected = derivative(Calls(function))(*tensors, dy)
    with later.put_off() as products:
        at_once = derivative(Calls(function))(*tensors, dy)
    left = [weight for weight in tensors if products.of(weight)]
    assert len(products) == len(left) == (2 if name == "grouped_mlp" else 1)
    for tensor, whole, found in zip(tensors, expected, at_once, strict=True):
        if products.of(tensor):
            assert not found.asnumpy().any()
            (product,) = products.of(tensor)
            np.testing.assert_allclose(product(), whole.asnumpy(), rtol=1e-6, atol=1e-6)
        else:
            np.testing.assert_array_equal(found.asnumpy(), whole.asnumpy())


def test_tokens_that_do_not_count_have_gradient_zero(sets_cases):
    function, shapes = sets_cases[0]["cross_entropy_sum"]
    (gradient,) = gradients(function, [array.astype(np.float32) for array in inputs(shapes)], np.float32(1))
    zero = ~gradient.any(axis=-1)
    np.testing.assert_array_equal(zero, [[False, False, True], [True, False, False]])


def test_experts_without_rows_have_gradient_zero(sets_cases):
    function, shapes = sets_cases[0]["grouped_mlp"]
    arrays = [array.astype(np.float32) for array in inputs(shapes)]
    _, d_gate_up, d_down = gradients(function, arrays, np.ones((5, 3), np.float32))
    for gradient in (d_gate_up, d_down):
        np.testing.assert_array_equal(gradient.any(axis=(1, 2)), COUNTS > 0)


@pytest.mark.parametrize("name", SETS)
def test_experts_without_any_rows_have_gradients_of_their_shape(name, monkeypatch):
    arrays = [np.ones(shape, np.float32) for shape in ((0, 3), (2, 4, 3), (2, 3, 2))]
    mlp = kernel_set(name, monkeypatch).grouped_mlp
    derivative = ops.GradOperation(get_all=True, sens_param=True)(
        Calls(lambda *tensors: mlp(tensors[0], np.zeros(2, int), *tensors[1:]))
    )
    found = derivative(*map(Tensor.from_numpy, arrays), Tensor.from_numpy(np.ones((0, 3), np.float32)))
    for gradient, array in zip(found, arrays, strict=True):
        np.testing.assert_array_equal(gradient.asnumpy(), np.zeros_like(array))


@pytest.mark.parametrize("name", ["embedding", "linear", "rms_norm", "grouped_mlp"])
def test_a_weight_may_be_freed_between_forward_and_backward(name, sets_cases):
    function, shapes = sets_cases[0][name]
    arrays = [array.astype(np.float32) for array in inputs(shapes)]
    dy = output_gradient(function, arrays).astype(np.float32)
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


def test_a_frozen_weight_gets_no_gradient(sets_cases):
    linear, _ = sets_cases[0]["linear"]
    x, weight = (array.astype(np.float32) for array in inputs([(2, 4), (3, 4)]))
    ones = np.ones((2, 3), np.float32)
    dx, d_weight = gradients(lambda x, w: linear(x, ops.stop_gradient(w)), [x, weight], ones)
    np.testing.assert_allclose(dx, ones @ weight, rtol=1e-5, atol=1e-6)
    assert not d_weight.any()
