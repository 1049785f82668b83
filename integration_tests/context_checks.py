"""Context-parallel attention on its own: results, gradients and memory of every method, on all ranks of a world.

What they have to be is said in `test_context_parallel.py`; the dense attention here is what results are held against.
"""

from __future__ import annotations

import itertools
import tracemalloc
from collections.abc import Iterator

import numpy as np
from device_mesh import Communicator
from mask_compression import CompressedMask, causal, from_lengths
from mindspore import Tensor, nn, ops
from parallel_config import ParallelPlan
from parallel_trainer.kernels import kernels
from parallel_trainer.parallel.context_parallel import Attention, build_attention
from parallel_trainer.parallel.sequence import OF, shards

HEADS, HEAD_DIM, VALUE_DIM = 8, 4, 3


def masks(length: int) -> Iterator[tuple[str, CompressedMask]]:
    """Two rows of what samples look like."""
    generator = np.random.default_rng(length)
    cuts = np.sort(generator.choice(np.arange(1, length), size=(2, length // 8)), axis=1)
    many = [np.diff(np.unique(row), prepend=0, append=length).tolist() for row in cuts]
    padding = [[length // 3, length - length // 3], [1] * 7 + [length - 7]]
    yield "plain", causal(length, rows=2)
    yield "many documents", from_lengths(many)
    yield "one document and one of many", from_lengths([[length], many[0]])
    yield "padding", from_lengths(padding)


def dense(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, d_out: np.ndarray, mask: CompressedMask
) -> tuple[np.ndarray, ...]:
    """Output and gradients of q, k and v by the definition: all scores, all rows (B, S, heads, D), v with its own D."""
    group = q.shape[2] // k.shape[2]
    keys, values = (np.repeat(x, group, axis=2) for x in (k, v))
    scores = np.einsum("bqhd,bkhd->bhqk", q, keys) * HEAD_DIM**-0.5
    scores = np.where(mask.dense(blocked=False)[:, None], scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    out = np.einsum("bhqk,bkhd->bqhd", weights, values)
    d_weights = np.einsum("bqhd,bkhd->bhqk", d_out, values)
    d_scores = weights * (d_weights - (d_weights * weights).sum(-1, keepdims=True)) * HEAD_DIM**-0.5
    dq = np.einsum("bhqk,bkhd->bqhd", d_scores, keys)
    dk, dv = np.einsum("bhqk,bqhd->bkhd", d_scores, q), np.einsum("bhqk,bqhd->bkhd", weights, d_out)
    rows, length = mask.rows, mask.seq_length
    of_groups = (rows, length, k.shape[2], group, -1)
    return out, dq, dk.reshape(of_groups).sum(3), dv.reshape(of_groups).sum(3)


def plans(cp: int, orders: tuple[str, ...]) -> Iterator[tuple[str, ParallelPlan]]:
    """Every method on a group of `cp` ranks."""
    methods: list[tuple[str, int | None]] = [("colossal", None), ("ulysses", None)]
    methods += [("hybrid", inner) for inner in (2, 4) if inner < cp]
    for (method, inner), asynchronous, order in itertools.product(methods, (False, True), orders):
        plan = ParallelPlan.from_degrees(
            cp,
            context_parallel=cp,
            context_parallel_method=method,
            ulysses_degree_in_cp=inner,
            context_parallel_async=asynchronous,
            context_parallel_order=order,
        )
        yield f"{method} {inner or cp} {'async' if asynchronous else 'sync'} {order}", plan


BOTH = ("contiguous", "zigzag")
SETTINGS = (
    (64, 4, "plain", BOTH, ("float64",)),
    (64, 4, "many documents", BOTH, ("float64", "float32")),
    (64, 4, "one document and one of many", BOTH, ("float64",)),
    (64, 4, "padding", BOTH, ("float64",)),
    (64, 1, "plain", BOTH[:1], ("float64", "float32")),
    (64, 2, "padding", BOTH[1:], ("float64", "float32")),
    (256, 1, "many documents", BOTH[:1], ("float64",)),
    (256, 2, "one document and one of many", BOTH[1:], ("float64", "float32")),
    (256, 4, "padding", BOTH[:1], ("float64",)),
    (1024, 2, "many documents", BOTH[1:], ("float64",)),
    (1024, 4, "plain", BOTH[:1], ("float32",)),
)
"""Tokens, query heads for each key/value head, text, orders and dtypes."""


def attention_everywhere(communicator: Communicator) -> dict[str, float]:
    """For every method and each of `SETTINGS` the largest difference of output and gradients from dense attention,
    relative to the largest value."""
    found = {}
    for length, group, text, orders, dtypes in SETTINGS:
        mask = dict(masks(length))[text]
        generator = np.random.default_rng(group)
        kv_heads = HEADS // group
        sizes = ((HEADS, HEAD_DIM), (kv_heads, HEAD_DIM), (kv_heads, VALUE_DIM), (HEADS, VALUE_DIM))
        arrays = [generator.standard_normal((2, length, *size)) for size in sizes]
        expected = dense(*arrays, mask)
        for name, plan in plans(communicator.size, orders):
            attention = build_attention(kernels("cpu"), plan, length, communicator)
            shard = shards(plan, length)[communicator.rank]
            for dtype in dtypes:
                own = [shard.take(array).astype(dtype) for array in arrays]
                differences = [
                    np.abs(part - shard.take(whole)).max() / np.abs(whole).max()
                    for part, whole in zip(_run(attention, own, mask), expected, strict=True)
                ]
                worst = communicator.all_reduce(np.array([max(differences)]), "max")[0]
                found[f"{name}, {length} tokens, {group} query heads a key head, {text}, {dtype}"] = float(worst)
    return found


class AttentionCell(nn.Cell):
    """An attention alone in a cell, whose forward keeps what its backward needs."""

    def __init__(self, attention: Attention, mask: CompressedMask, scale: float) -> None:
        super().__init__()
        self._attention, self._mask, self._scale = attention, mask, scale
        self.set_grad(True)

    def construct(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        brought = [self._attention.bring(x, of) for x, of in zip((q, k, v), OF, strict=True)]
        return self._attention(*(arriving() for arriving in brought), scale=self._scale, mask=self._mask)


def _run(attention: Attention, arrays: list[np.ndarray], mask: CompressedMask) -> tuple[np.ndarray, ...]:
    """Output and gradients of a rank's part."""
    *qkv, d_out = (Tensor(np.ascontiguousarray(array)) for array in arrays)
    cell = AttentionCell(attention, mask, HEAD_DIM**-0.5)
    out = cell(*qkv).asnumpy()
    gradients = ops.GradOperation(get_all=True, sens_param=True)(cell)(*qkv, d_out)
    return out, *(gradient.asnumpy() for gradient in gradients)


def ring_memory(communicator: Communicator) -> dict[str, list[float]]:
    """The most memory that NumPy takes during a colossal forward and then a backward, in blocks of a rank's keys and
    values, by transport.

    Many short documents: the scores, which are no subject here, take little.
    """
    length, kv_heads, size = 512 * communicator.size, 8, 64
    mask = from_lengths([[32] * (length // 32)])
    found = {}
    for name, asynchronous in (("gathered", False), ("ring", True)):
        plan = ParallelPlan.from_degrees(
            communicator.size, context_parallel=communicator.size, context_parallel_async=asynchronous
        )
        found[name] = _peaks(build_attention(kernels("cpu"), plan, length, communicator), mask, kv_heads, size)
    return found


def _peaks(attention: Attention, mask: CompressedMask, kv_heads: int, size: int) -> list[float]:
    cell = AttentionCell(attention, mask, scale=1.0)
    backward = ops.GradOperation(get_all=True, sens_param=True)(cell)
    q, k, v = (Tensor(np.ones((1, 512, kv_heads, size), np.float32)) for _ in range(3))
    block = 2 * k.asnumpy().nbytes
    tracemalloc.start()
    out = cell(q, k, v).asnumpy()
    kept, forward = tracemalloc.get_traced_memory()
    tracemalloc.reset_peak()
    for gradient in backward(q, k, v, Tensor(out)):
        gradient.asnumpy()
    peak = tracemalloc.get_traced_memory()[1] - kept
    tracemalloc.stop()
    return [forward / block, peak / block]


def empty_blocks(communicator: Communicator) -> dict[str, float]:
    """Documents that end where ranks' pieces end: every block but a rank's own holds nothing that it sees."""
    length = 8 * communicator.size
    mask = from_lengths([[8] * communicator.size])
    generator = np.random.default_rng(0)
    arrays = [generator.standard_normal((1, length, HEADS, HEAD_DIM)) for _ in range(4)]
    expected = dense(*arrays, mask)
    found = {}
    for name, plan in plans(communicator.size, ("contiguous",)):
        attention = build_attention(kernels("cpu"), plan, length, communicator)
        shard = shards(plan, length)[communicator.rank]
        parts = _run(attention, [shard.take(array) for array in arrays], mask)
        found[name] = max(
            float(np.abs(part - shard.take(whole)).max()) for part, whole in zip(parts, expected, strict=True)
        )
    return found
