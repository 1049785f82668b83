"""Tensor parallelism with its sequence parallelism: what tp has to divide."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from parallel_config.paths import last
from parallel_config.problems import Edit, Problem
from parallel_config.rules.degrees import listed, multiples, near, set_each
from parallel_config.rules.engine import Facts, rule
from parallel_config.rules.fitting import (
    SEQUENCE_LENGTHS,
    divisors,
    lacks_low_rank_queries,
    shares_key_value_heads,
    tensor_degrees,
    ulysses_degree,
)

_TP = "parallelism.tensor_parallel"


def not_divided(
    facts: Facts, degree_path: str, size_path: str, *, degrees: Sequence[int], sizes: Sequence[int]
) -> Problem:
    """The problem of a size that a degree does not divide, blamed on the degree; `degrees` or `sizes` would do."""
    name, degree = last(size_path), last(degree_path)
    alternative = f"; or {name} {listed(sizes)}" if sizes else ""
    return facts.problem(
        degree_path,
        f"must divide {name} {facts.value(size_path)}",
        f"Use {degree} {listed(degrees[:12])}{alternative}.",
        fixes=[*set_each(degree_path, near(degrees, facts.value(degree_path))), *set_each(size_path, sizes)],
    )


@rule(_TP, "model.num_attention_heads", decides=("heads_per_rank",))
def heads(facts: Facts) -> Iterator[Problem]:
    """Each tensor-parallel rank holds whole attention heads."""
    path, tp, sizes = "model.num_attention_heads", facts.parallelism.tensor_parallel, facts.parallelism
    count = facts.value(path)
    if count is None or count % tp == 0:
        return
    trading = ulysses_degree(sizes.context_parallel_method, sizes.context_parallel, sizes.ulysses_degree_in_cp)
    groups = 1 if facts.model.multi_latent_attention else facts.model.num_key_value_heads or 1
    others = multiples(math.lcm(tp * max(trading, 1), groups), count) if shares_key_value_heads(facts, tp) else []
    yield not_divided(facts, _TP, path, degrees=tensor_degrees(facts), sizes=others)


@rule(_TP, "model.num_key_value_heads", "heads_per_rank", "model.multi_latent_attention")
def key_value_heads(facts: Facts) -> Iterator[Problem]:
    """Key/value heads are split over tp, or, when there are fewer, each is held by equally many ranks."""
    model, tp, path = facts.model, facts.parallelism.tensor_parallel, "model.num_key_value_heads"
    count, queries = model.num_key_value_heads, model.num_attention_heads
    if count is None or model.multi_latent_attention:
        return
    if queries is not None and queries % count:
        possible = [size for size in divisors(queries) if size % tp == 0 or tp % size == 0]
        yield facts.problem(
            path,
            f"must divide num_attention_heads {queries}",
            f"Use {listed(possible)}.",
            fixes=set_each(path, near(possible, count)),
        )
    elif count % tp and tp % count:
        fitting = [size for size in divisors(queries or count * tp) if size % tp == 0 or tp % size == 0]
        degrees = tensor_degrees(facts)
        yield facts.problem(
            path,
            f"must be a multiple of tensor_parallel {tp} (split) or divide it (copied to several ranks)",
            f"Use num_key_value_heads {listed(fitting)}; or tensor_parallel {listed(degrees)}.",
            fixes=[*set_each(_TP, near(degrees, tp)), *set_each(path, near(fitting, count))],
        )


@rule(_TP, "model.intermediate_size")
def feed_forward(facts: Facts) -> Iterator[Problem]:
    """The feed-forward layers are cut into tp equal parts."""
    path, tp = "model.intermediate_size", facts.parallelism.tensor_parallel
    size = facts.value(path)
    if size is not None and size % tp:
        yield not_divided(facts, _TP, path, degrees=tensor_degrees(facts), sizes=multiples(tp, size))


@rule(_TP, "model.vocab_size")
def vocabulary(facts: Facts) -> Iterator[Problem]:
    """Each rank has at least one row of the embedding and of the output layer; their parts may be uneven."""
    tp, size, path = facts.parallelism.tensor_parallel, facts.model.vocab_size, "model.vocab_size"
    if size is None or size >= tp:
        return
    degrees = tensor_degrees(facts)
    yield facts.problem(
        _TP,
        f"must be ≤ vocab_size {size}: every rank holds at least one row of the embedding",
        f"Use tensor_parallel {listed(degrees[:12])}; or vocab_size {tp} or more.",
        fixes=[*set_each(_TP, near(degrees, tp)), *set_each(path, [tp])],
    )


@rule(_TP, "parallelism.context_parallel", *SEQUENCE_LENGTHS)
def sequence(facts: Facts) -> Iterator[Problem]:
    """cp cuts the sequence, and sequence parallelism cuts each piece again into tp parts."""
    tp, cp = facts.parallelism.tensor_parallel, facts.parallelism.context_parallel
    known = [path for path in SEQUENCE_LENGTHS if facts.value(path) is not None]
    if not known or facts.value(known[0]) % (cp * tp) == 0:
        return
    pieces = 1 if cp == 1 or facts.parallelism.context_parallel_order == "contiguous" else 2
    lengths = multiples(cp * math.lcm(tp, pieces), facts.value(known[0]))
    changed = [path for path in known if path == known[0] or facts.wrote(path)]
    yield facts.problem(
        known[0],
        f"must be a multiple of context_parallel {cp} · tensor_parallel {tp} = {cp * tp}"
        " (context and sequence parallelism cut the sequence into equal parts)",
        f"Use seq_length {listed(lengths)}.",
        fixes=[tuple(Edit(path, size) for path in changed) for size in lengths],
    )


@rule(_TP, "model.q_lora_rank")
def low_rank_queries(facts: Facts) -> Iterator[Problem]:
    """Multi-head latent attention without a low-rank query projection has no tensor-parallel form."""
    if facts.parallelism.tensor_parallel == 1 or not lacks_low_rank_queries(facts):
        return
    yield facts.problem(
        "model.q_lora_rank",
        f"must be > 0 with tensor_parallel {facts.parallelism.tensor_parallel} > 1",
        "Use a rank such as 1536, or tensor_parallel 1.",
        fixes=[*set_each("model.q_lora_rank", [1536]), *set_each(_TP, [1])],
    )


RULES = (heads, key_value_heads, feed_forward, vocabulary, sequence, low_rank_queries)
