"""What a layer of experts computes, in float64 and one token after the other, and a batch for every rank to try it on.

Expert e maps a row x to x @ matrices[e]. The loss is the sum over all ranks' tokens of their result times `d_out`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from attrs import frozen

Array = np.ndarray[Any, Any]


@frozen(eq=False)
class Batch:
    """What one rank has: tokens (T, H), expert ids and weights (T, K), d_out (T, H)."""

    tokens: Array
    expert_ids: Array
    weights: Array
    d_out: Array


@frozen(eq=False)
class Reference:
    """What comes out on one rank: out, d_tokens (T, H), d_weights (T, K)."""

    out: Array
    d_tokens: Array
    d_weights: Array


def expert_matrices(num_experts: int, hidden: int) -> Array:
    return np.random.default_rng(99).standard_normal((num_experts, hidden, hidden))


def reference(batch: Batch, matrices: Array) -> Reference:
    out, d_tokens = (np.zeros(batch.tokens.shape, np.float64) for _ in range(2))
    d_weights = np.zeros(batch.weights.shape, np.float64)
    for t, experts in enumerate(batch.expert_ids):
        x, d_out = batch.tokens[t].astype(np.float64), batch.d_out[t].astype(np.float64)
        for k, expert in enumerate(experts):
            y = x @ matrices[expert]
            out[t] += batch.weights[t, k] * y
            d_weights[t, k] = d_out @ y
            d_tokens[t] += batch.weights[t, k] * (matrices[expert] @ d_out)
    return Reference(out, d_tokens, d_weights)


def rows_of_experts(batches: list[Batch], experts: range) -> tuple[Array, list[int]]:
    """The rows that a rank's experts must get: by expert, then source rank, then token; and how many each gets."""
    rows, counts = [], []
    for expert in experts:
        mine = [b.tokens[t] for b in batches for t, chosen in enumerate(b.expert_ids) for e in chosen if e == expert]
        rows += mine
        counts.append(len(mine))
    return np.array(rows, batches[0].tokens.dtype).reshape(-1, batches[0].tokens.shape[1]), counts


def d_matrices(batches: list[Batch], num_experts: int) -> Array:
    """The gradient by each expert's matrix; zeros for an expert without tokens."""
    hidden = batches[0].tokens.shape[1]
    total = np.zeros((num_experts, hidden, hidden))
    for batch in batches:
        for t, experts in enumerate(batch.expert_ids):
            for k, expert in enumerate(experts):
                total[expert] += np.outer(batch.tokens[t], batch.weights[t, k] * batch.d_out[t].astype(np.float64))
    return total


def random_batch(rank: int, kind: str, num_experts: int, hidden: int, dtype: str) -> Batch:
    """Rank `rank`'s batch, of a kind of routing."""
    generator = np.random.default_rng([rank, *kind.encode()])
    num_tokens = {"some ranks empty": (rank % 3) * 4, "no tokens": 0}.get(kind, 5 + 2 * rank)
    top_k = {"top 1": 1, "all experts": num_experts}.get(kind, min(3, num_experts))
    expert_ids = np.argsort(generator.random((num_tokens, num_experts)), axis=1)[:, :top_k]
    if kind == "one expert":
        expert_ids[:] = num_experts - 1
    if kind == "unused experts":
        expert_ids = expert_ids // 2
    if kind == "twice the same":
        expert_ids[:, -1] = expert_ids[:, 0]
    tokens, d_out = (generator.standard_normal((num_tokens, hidden)).astype(dtype) for _ in range(2))
    return Batch(tokens, expert_ids, generator.random((num_tokens, top_k)).astype(dtype), d_out)


KINDS = (
    "random",
    "some ranks empty",
    "no tokens",
    "top 1",
    "all experts",
    "one expert",
    "unused experts",
    "twice the same",
)
