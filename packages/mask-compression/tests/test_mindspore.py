"""Attention for MindSpore tensors against the NumPy functions, which other tests compare with dense attention."""

# ruff: noqa: E402  (the imports need what is looked for first)

from __future__ import annotations

import numpy as np
import pytest

mindspore = pytest.importorskip("mindspore", reason="needs MindSpore: pip install 'mask-compression[mindspore]'")

from mask_compression.attention import attention as numpy_attention
from mask_compression.attention_backward import attention_backward
from mask_compression.mask import CompressedMask
from mask_compression.mindspore import attention
from mindspore import Tensor, nn, ops

MASK = CompressedMask(2, 40, np.array([15, 40, 80]))
SHARD = {"query_ranges": ((30, 40), (0, 10)), "key_ranges": ((0, 40),)}


class Calls(nn.Cell):
    """A function as the cell that MindSpore differentiates."""

    def __init__(self, function):
        super().__init__(auto_prefix=False)
        self.function = function

    def construct(self, *tensors):
        return self.function(*tensors)


def inputs(queries, dtype=np.float64):
    """q, k, v, d_out."""
    generator = np.random.default_rng(0)
    shapes = (2, queries, 4, 6), (2, 40, 2, 6), (2, 40, 2, 5), (2, queries, 4, 5)
    return [generator.standard_normal(shape).astype(dtype) for shape in shapes]


@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.float16])
@pytest.mark.parametrize("options", [{}, {"scale": 0.3, **SHARD}], ids=["all", "a shard"])
def test_values_and_gradients(options, dtype):
    q, k, v, d_out = inputs(20 if options else 40, dtype)
    out, lse = numpy_attention(q, k, v, MASK, **options)
    expected = attention_backward(d_out, q, k, v, out, lse, MASK, **options)

    cell = Calls(lambda *tensors: attention(*tensors, MASK, **options))
    tensors = [Tensor(x) for x in (q, k, v)]
    result = cell(*tensors).asnumpy()
    assert result.dtype == dtype
    np.testing.assert_array_equal(result, out)
    gradients = ops.GradOperation(get_all=True, sens_param=True)(cell)(*tensors, Tensor(d_out))
    for mine, right in zip(gradients, expected, strict=True):
        np.testing.assert_array_equal(mine.asnumpy(), right)


def test_the_gradient_is_that_of_central_differences_of_a_loss():
    q, k, v, d_out = inputs(40)
    direction = np.random.default_rng(1).standard_normal(k.shape)

    def loss(keys):
        return ops.ReduceSum()(attention(Tensor(q), keys, Tensor(v), MASK) * Tensor(d_out))

    gradient = ops.GradOperation()(Calls(loss))(Tensor(k)).asnumpy()
    step = 1e-5
    sides = [loss(Tensor(k + sign * step * direction)).asnumpy() for sign in (1, -1)]
    np.testing.assert_allclose((gradient * direction).sum(), (sides[0] - sides[1]) / (2 * step), rtol=1e-6)


def test_inputs_may_be_freed_between_forward_and_backward():
    *arrays, d_out = inputs(40)
    expected = attention_backward(d_out, *arrays, *numpy_attention(*arrays, MASK), MASK)
    tensors = [Tensor(x) for x in arrays]
    cell = Calls(lambda *inputs: attention(*inputs, MASK))
    cell.set_grad(True)
    cell(*tensors)
    storages = [tensor.untyped_storage() for tensor in tensors]
    for storage in storages:
        storage.resize_(0)
    overwritten = [np.full_like(x, np.nan) for x in arrays for _ in range(50)]
    for storage, tensor, array in zip(storages, tensors, arrays, strict=True):
        storage.resize_(array.nbytes)
        tensor.asnumpy()[...] = array
    gradients = ops.GradOperation(get_all=True, sens_param=True)(cell)(*tensors, Tensor(d_out))
    assert np.isnan(overwritten[0]).all()
    for mine, right in zip(gradients, expected, strict=True):
        np.testing.assert_array_equal(mine.asnumpy(), right)


def test_the_output_owns_its_memory():
    q, k, v, d_out = (Tensor(x) for x in inputs(40))
    cell = Calls(lambda *inputs: attention(*inputs, MASK))
    out = cell(q, k, v)
    before = out.asnumpy().copy()
    out.untyped_storage().resize_(0)
    out.untyped_storage().resize_(before.nbytes)
    out.asnumpy()[...] = before
    np.testing.assert_array_equal((out + Tensor(np.float64(0))).asnumpy(), before)
    assert d_out.shape == out.shape


def test_mistakes_are_those_of_the_numpy_function():
    q, k, v, _ = (Tensor(x) for x in inputs(40))
    with pytest.raises(ValueError, match="4 query heads cannot share 3 key/value heads"):
        attention(q, k[:, :, [0, 1, 1]], v[:, :, [0, 1, 1]], MASK)
    with pytest.raises(TypeError, match="bfloat16"):
        attention(*(x.astype(mindspore.bfloat16) for x in (q, k, v)), MASK)
