"""Operators with the meaning that MindSpore 2.10 documents for its Ascend ones, made of operators that a CPU has.

Each refuses what the documentation rules out: types, layouts, sizes, lists. A call is bound to the signature of
MindSpore's own operator first, so a name or a number of arguments that it does not have fails. MindSpore derives their
gradients.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Tensor, ops
from mindspore.ops.auto_generate.gen_ops_prim import Gmm

HALVES = (ms.bfloat16, ms.float16)
FLOATS = (*HALVES, ms.float32)
# Not of Ascend: lets tests see gradients without rounding.
EXACT = (*FLOATS, ms.float64)

SIGNATURES = {
    "flash_attention_score": inspect.signature(ops.flash_attention_score),
    "gmm": inspect.signature(functools.partial(Gmm.__call__, None)),
    "moe_token_permute": inspect.signature(ops.moe_token_permute),
    "moe_token_unpermute": inspect.signature(ops.moe_token_unpermute),
    "rms_norm": inspect.signature(ops.rms_norm),
    "rotary_position_embedding": inspect.signature(ops.rotary_position_embedding),
    "swiglu": inspect.signature(ops.swiglu),
}


_NOT_ON_CPUS = {"exp", "gather", "masked_fill", "matmul", "sigmoid", "softmax"}


class WithBfloat16:
    """A module of MindSpore's operators. Those that a CPU lacks in bfloat16 compute in float32 and round their result,
    as an NPU does."""

    def __init__(self, module: Any) -> None:
        self._module = module

    def __getattr__(self, name: str) -> Any:
        operator = getattr(self._module, name)
        return functools.partial(self._rounded, operator) if name in _NOT_ON_CPUS else operator

    @staticmethod
    def _rounded(operator: Callable[..., Tensor], *arguments: Any) -> Tensor:
        narrow = [isinstance(value, Tensor) and value.dtype == ms.bfloat16 for value in arguments]
        if not any(narrow):
            return operator(*arguments)
        given = (value.astype(ms.float32) if each else value for value, each in zip(arguments, narrow, strict=True))
        return operator(*given).astype(ms.bfloat16)


mint, plain = WithBfloat16(ms.mint), WithBfloat16(ops)


class AscendOperators:
    """The operators, and the arguments of every call by name, in order.

    attends: False leaves out the arithmetic of attention, for tests of what it is told: it returns its queries.
    exact:   attention takes float32 and float64 as well, and the kernel does not round them, so that the gradients of
        what is around it can be compared closely.
    """

    def __init__(self, *, attends: bool = True, exact: bool = False) -> None:
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self._attends = attends
        self._exact = exact

    def install(self, monkeypatch: Any) -> None:
        """Put them where the kernels look the operators up."""
        from parallel_trainer.kernels.ascend import attention, operators

        if self._exact:
            monkeypatch.setattr(sys.modules[attention.__module__], "half", lambda x: x)
        for name in [name for name in sys.modules if name.startswith("parallel_trainer.kernels.ascend.")]:
            for module in (ms.mint, ms.ops):
                if getattr(sys.modules[name], found := module.__name__.rpartition(".")[2], None) is module:
                    monkeypatch.setattr(sys.modules[name], found, WithBfloat16(module))
        for name in SIGNATURES:
            monkeypatch.setattr(operators, name, functools.partial(self._call, name, globals()[f"_{name}"]))

    def _call(self, name: str, operator: Callable[..., Any], *arguments: Any, **keywords: Any) -> Any:
        bound = SIGNATURES[name].bind(*arguments, **keywords)
        bound.apply_defaults()
        self.calls.append((name, dict(bound.arguments)))
        if name == "flash_attention_score":
            assert bound.arguments["query"].dtype in (EXACT if self._exact else HALVES)
            _check_flash_attention_score(**bound.arguments)
            if not self._attends:
                return bound.arguments["query"]
        return operator(**bound.arguments)

    def arguments(self, name: str) -> list[dict[str, Any]]:
        """Of every call of one operator."""
        return [arguments for called, arguments in self.calls if called == name]


def number(value: float, x: Tensor) -> Tensor:
    """A number that MindSpore does not round to float32 beside float64."""
    return Tensor(value, x.dtype)


def wide(x: Tensor) -> Tensor:
    """float32 for halves."""
    return x.astype(ms.float32) if x.dtype in HALVES else x


def halves(x: Tensor) -> tuple[Tensor, Tensor]:
    """The first and the second half of the last dimension."""
    size = x.shape[-1] // 2
    return mint.narrow(x, -1, 0, size), mint.narrow(x, -1, size, size)


def _rms_norm(x: Tensor, gamma: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    assert x.dtype == gamma.dtype
    assert x.dtype in EXACT
    assert isinstance(epsilon, float)
    assert 0 < epsilon <= 1
    values = wide(x)
    reciprocal = mint.rsqrt(mint.mean(values * values, -1, True) + number(epsilon, values))
    return (values * reciprocal * wide(gamma)).astype(x.dtype), reciprocal


def _moe_token_permute(
    tokens: Tensor, indices: Tensor, num_out_tokens: None, padded_mode: bool
) -> tuple[Tensor, Tensor]:
    assert tokens.dtype in EXACT
    assert indices.dtype == ms.int32
    assert tokens.ndim == indices.ndim == 2
    assert len(tokens) == len(indices) > 0
    assert indices.shape[1] <= 512
    assert num_out_tokens is None
    assert padded_mode is False
    order = np.argsort(indices.asnumpy().reshape(-1), kind="stable")
    rows = plain.gather(tokens, Tensor((order // indices.shape[1]).astype(np.int32)), 0)
    return rows, Tensor(np.argsort(order).astype(np.int32))


def _moe_token_unpermute(
    permuted_tokens: Tensor, sorted_indices: Tensor, probs: Tensor, padded_mode: bool, restore_shape: None
) -> Tensor:
    assert permuted_tokens.dtype == probs.dtype
    assert permuted_tokens.dtype in EXACT
    assert sorted_indices.dtype == ms.int32
    assert sorted_indices.shape == (len(permuted_tokens),) == (probs.size,)
    assert padded_mode is False
    assert restore_shape is None
    of_tokens = plain.gather(permuted_tokens, sorted_indices, 0).reshape(*probs.shape, -1)
    return mint.sum(of_tokens * probs.reshape(*probs.shape, 1), 1)


def _swiglu(input: Tensor, dim: int) -> Tensor:
    assert input.dtype in EXACT
    assert dim == -1
    assert input.shape[-1] % 2 == 0
    first, second = halves(input)
    return first * mint.sigmoid(first) * second


def _rotary_position_embedding(x: Tensor, cos: Tensor, sin: Tensor, mode: int) -> Tensor:
    assert x.dtype == cos.dtype == sin.dtype
    assert x.dtype in EXACT
    size = x.shape[-1]
    assert size % 2 == 0
    assert size < 896
    # BSND with 1S1D is what both modes document.
    assert x.shape[0] == 1
    assert cos.shape == sin.shape == (1, x.shape[1], 1, size)
    assert max(abs(table.asnumpy()).max() for table in (cos, sin)) <= 1
    if mode == 0:
        first, second = halves(x)
        rotated = mint.cat((-second, first), -1)
    else:
        assert mode == 1
        pairs = x.reshape(*x.shape[:-1], size // 2, 2)
        rotated = mint.cat((-mint.narrow(pairs, -1, 1, 1), mint.narrow(pairs, -1, 0, 1)), -1).reshape(x.shape)
    return x * cos + rotated * sin


def _gmm(
    x: list[Tensor], weight: list[Tensor], bias: None, group_list: Tensor, group_type: int, group_list_type: int
) -> tuple[Tensor]:
    assert bias is None
    assert group_list_type == 0
    assert group_list.dtype == ms.int64
    assert group_list.shape[0] <= 1024
    ((left,), (right,)) = x, weight
    assert left.dtype == right.dtype
    assert left.dtype in EXACT
    ends = group_list.asnumpy().tolist()
    starts = [0, *ends[:-1]]
    assert starts == sorted(starts)
    groups = list(zip(starts, ends, strict=True))
    if group_type == 0:
        assert right.ndim == 3
        assert len(ends) == right.shape[0]
        assert ends[-1] == left.shape[0]
        return (
            mint.cat([mint.matmul(left[start:stop], right[index]) for index, (start, stop) in enumerate(groups)], 0),
        )
    assert group_type == 2
    assert ends[-1] == left.shape[1] == right.shape[0]
    assert not left.is_contiguous()
    # What it gives for a group of nothing is not documented: no number, so that nobody relies on it.
    nothing = Tensor(np.full((left.shape[0], right.shape[1]), np.nan)).astype(left.dtype)
    products = [
        mint.matmul(left[:, start:stop], right[start:stop]) if start < stop else nothing for start, stop in groups
    ]
    return (mint.cat([product[None] for product in products], 0),)


def seen(
    sparse_mode: int,
    queries: int,
    keys: int,
    *,
    pre_tokens: int,
    next_tokens: int,
    actual_seq_qlen: tuple[int, ...] | None = None,
    actual_seq_kvlen: tuple[int, ...] | None = None,
) -> np.ndarray:
    """bool (queries, keys), which keys a query sees with the compressed mask, by what sparse modes 2 to 4 document.

    2: causal from the upper left corner. 3: causal that ends in the lower right corner. 4: the band of `pre_tokens`
    before and `next_tokens` behind the diagonal that ends in the lower right corner. With lists, of each document by
    itself.
    """
    if actual_seq_qlen is not None:
        assert actual_seq_kvlen is not None
        assert sparse_mode in (2, 3)
        assert len(actual_seq_qlen) == len(actual_seq_kvlen) <= 1024
        assert (actual_seq_qlen[-1], actual_seq_kvlen[-1]) == (queries, keys)
        joined = np.zeros((queries, keys), np.bool_)
        q0 = k0 = 0
        for q1, k1 in zip(actual_seq_qlen, actual_seq_kvlen, strict=True):
            assert q1 >= q0
            assert k1 > k0
            joined[q0:q1, k0:k1] = seen(sparse_mode, q1 - q0, k1 - k0, pre_tokens=0, next_tokens=0)
            q0, k0 = q1, k1
        return joined
    # How far a key lies behind the diagonal from the upper left, or into the lower right corner.
    behind = np.arange(keys) - np.arange(queries)[:, None]
    if sparse_mode == 2:
        return behind <= 0
    behind -= keys - queries
    if sparse_mode == 3:
        assert queries <= keys
        return behind <= 0
    assert sparse_mode == 4
    return (behind >= -pre_tokens) & (behind <= next_tokens)


def _check_flash_attention_score(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    head_num: int,
    attn_mask: Tensor,
    actual_seq_qlen: tuple[int, ...] | None,
    actual_seq_kvlen: tuple[int, ...] | None,
    keep_prob: float,
    scalar_value: float,
    pre_tokens: int,
    next_tokens: int,
    input_layout: str,
    sparse_mode: int,
    **unused: Any,
) -> None:
    assert query.dtype == key.dtype == value.dtype
    assert not {name for name, given in unused.items() if given}
    assert keep_prob == 1.0
    assert isinstance(scalar_value, float)
    assert attn_mask.dtype == ms.bool_
    assert attn_mask.shape == (2048, 2048)
    packed = input_layout == "TND"
    assert packed or input_layout == "BSND"
    assert packed == (actual_seq_qlen is not None) == (actual_seq_kvlen is not None)
    if packed:
        assert sparse_mode in (2, 3)
        assert next_tokens == 0
    assert query.ndim == key.ndim == (3 if packed else 4)
    assert key.shape == value.shape
    heads, size = query.shape[-2:]
    assert head_num == heads
    assert heads <= 256
    assert heads % key.shape[-2] == 0
    assert size == key.shape[-1]
    assert size % 16 == 0
    assert size <= 512


def _flash_attention_score(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    actual_seq_qlen: tuple[int, ...] | None,
    actual_seq_kvlen: tuple[int, ...] | None,
    scalar_value: float,
    pre_tokens: int,
    next_tokens: int,
    input_layout: str,
    sparse_mode: int,
    **checked: Any,
) -> Tensor:
    packed = input_layout == "TND"
    if packed:
        query, key, value = (x.reshape(1, *x.shape) for x in (query, key, value))
    queries, heads = query.shape[1:3]
    keys, kv_heads = key.shape[1:3]
    visible = seen(
        sparse_mode,
        queries,
        keys,
        pre_tokens=pre_tokens,
        next_tokens=next_tokens,
        actual_seq_qlen=actual_seq_qlen,
        actual_seq_kvlen=actual_seq_kvlen,
    )
    q, k, v = (mint.permute(wide(x), (0, 2, 1, 3)) for x in (query, key, value))
    of_heads = [head // (heads // kv_heads) for head in range(heads)]
    k, v = (mint.cat([x[:, head : head + 1] for head in of_heads], 1) for x in (k, v))
    scores = ops.BatchMatMul(transpose_b=True)(q, k) * number(scalar_value, q)
    weights = mint.softmax(scores + Tensor(np.where(visible, 0, -1e30), q.dtype), -1)
    out = mint.permute(ops.BatchMatMul()(weights, v), (0, 2, 1, 3)).astype(query.dtype)
    return out.reshape(out.shape[1:]) if packed else out
