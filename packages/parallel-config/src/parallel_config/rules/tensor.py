"""Tensor parallelism with its sequence parallelism: what tp has to divide."""

from __future__ import annotations

import math
from collections.abc import Iterator

from parallel_config.problems import Edit, Problem
from parallel_config.rules.degrees import SEQUENCE_LENGTHS, divisors, listed, multiples, near, set_each
from parallel_config.rules.engine import Facts, rule

_TP = "parallelism.tensor_parallel"


def must_divide(facts: Facts, divisor_path: str, divided_path: str) -> Iterator[Problem]:
    """The problem of a size that a degree does not divide, blamed on the degree."""
    degree, size = facts.value(divisor_path), facts.value(divided_path)
    if size is None or size % degree == 0:
        return
    name, short = divided_path.rpartition(".")[2], divisor_path.rpartition(".")[2]
    sizes, possible = multiples(degree, size), divisors(math.gcd(size, facts.room(short)))
    yield facts.problem(
        divisor_path,
        f"must divide {name} {size}",
        f"Use {short} {listed(possible[:12])}; or {name} {listed(sizes)}.",
        fixes=[*set_each(divisor_path, near(possible, degree)), *set_each(divided_path, sizes)],
    )


@rule(_TP, "model.num_attention_heads", decides=("heads_per_rank",))
def heads(facts: Facts) -> Iterator[Problem]:
    """Each tensor-parallel rank holds whole attention heads."""
    yield from must_divide(facts, _TP, "model.num_attention_heads")


@rule(_TP, "model.num_key_value_heads", "heads_per_rank", "model.multi_latent_attention")
def key_value_heads(facts: Facts) -> Iterator[Problem]:
    """Key/value heads are split over tp, or, when there are fewer, each is held by equally many ranks."""
    model, tp, path = facts.model, facts.parallelism.tensor_parallel, "model.num_key_value_heads"
    count, queries = model.num_key_value_heads, model.num_attention_heads
    if count is None or model.multi_latent_attention:
        return
    if queries is not None and queries % count:
        possible = divisors(queries)
        yield facts.problem(
            path,
            f"must divide num_attention_heads {queries}",
            f"Use {listed(possible)}.",
            fixes=set_each(path, near(possible, count)),
        )
    elif count % tp and tp % count:
        fitting = [size for size in divisors(queries or count * tp) if size % tp == 0 or tp % size == 0]
        common = math.gcd(queries or count, facts.room("tensor_parallel"))
        degrees = [size for size in divisors(common) if count % size == 0 or size % count == 0]
        yield facts.problem(
            path,
            f"must be a multiple of tensor_parallel {tp} (split) or divide it (copied to several ranks)",
            f"Use num_key_value_heads {listed(fitting)}; or tensor_parallel {listed(degrees)}.",
            fixes=[*set_each(_TP, near(degrees, tp)), *set_each(path, near(fitting, count))],
        )


@rule(_TP, "model.intermediate_size")
def feed_forward(facts: Facts) -> Iterator[Problem]:
    """The feed-forward layers are cut into tp equal parts."""
    yield from must_divide(facts, _TP, "model.intermediate_size")


@rule(_TP, "parallelism.context_parallel", *SEQUENCE_LENGTHS)
def sequence(facts: Facts) -> Iterator[Problem]:
    """cp cuts the sequence, and sequence parallelism cuts each piece again into tp parts."""
    tp, cp = facts.parallelism.tensor_parallel, facts.parallelism.context_parallel
    known = [path for path in SEQUENCE_LENGTHS if facts.value(path) is not None]
    if not known or facts.value(known[0]) % (cp * tp) == 0:
        return
    lengths = multiples(cp * tp, facts.value(known[0]))
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
    rank = facts.model.q_lora_rank
    without = rank == 0 or (rank is None and facts.wrote("model.q_lora_rank"))
    if not without or facts.parallelism.tensor_parallel == 1:
        return
    yield facts.problem(
        "model.q_lora_rank",
        f"must be > 0 with tensor_parallel {facts.parallelism.tensor_parallel} > 1",
        "Use a rank such as 1536, or tensor_parallel 1.",
        fixes=[*set_each("model.q_lora_rank", [1536]), *set_each(_TP, [1])],
    )


RULES = (heads, key_value_heads, feed_forward, sequence, low_rank_queries)
