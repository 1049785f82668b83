"""Tensor parallelism with its sequence parallelism: what tp has to divide."""

from __future__ import annotations

from collections.abc import Iterator

from parallel_config.problems import Edit, Problem
from parallel_config.rules.degrees import divisors, listed, near, set_each
from parallel_config.rules.engine import Facts, rule

_TP = "parallelism.tensor_parallel"


def _multiples(step: int, value: int) -> list[int]:
    return sorted({max(value // step, 1) * step, (value // step + 1) * step})


def must_divide(facts: Facts, divisor_path: str, divided_path: str) -> Iterator[Problem]:
    """The problem of a size that a degree does not divide, blamed on the degree."""
    degree, size = facts.value(divisor_path), facts.value(divided_path)
    if size is None or size % degree == 0:
        return
    name, short = divided_path.rpartition(".")[2], divisor_path.rpartition(".")[2]
    multiples = _multiples(degree, size)
    yield facts.problem(
        divisor_path,
        f"must divide {name} {size}",
        f"Use {short} {listed(divisors(size)[:12])}; or {name} {listed(multiples)}.",
        fixes=[*set_each(divisor_path, near(divisors(size), degree)), *set_each(divided_path, multiples)],
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
        degrees = [size for size in divisors(queries or count) if count % size == 0 or size % count == 0]
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


@rule(_TP, "parallelism.context_parallel", "model.seq_length")
def sequence(facts: Facts) -> Iterator[Problem]:
    """cp cuts the sequence, and sequence parallelism cuts each piece again into tp parts."""
    tp, cp = facts.parallelism.tensor_parallel, facts.parallelism.context_parallel
    length, path = facts.model.seq_length, "model.seq_length"
    if length is None or length % (cp * tp) == 0:
        return
    multiples = _multiples(cp * tp, length)
    both = [(Edit(path, size), *_same_in_dataset(facts, size)) for size in multiples]
    yield facts.problem(
        path,
        f"must be a multiple of context_parallel {cp} · tensor_parallel {tp} = {cp * tp}"
        " (context and sequence parallelism cut the sequence into equal parts)",
        f"Use seq_length {listed(multiples)}.",
        fixes=both,
    )


def _same_in_dataset(facts: Facts, length: int) -> tuple[Edit, ...]:
    path = "train_dataset.dataloader.config.seq_length"
    return (Edit(path, length),) if facts.wrote(path) else ()


@rule(_TP, "model.q_lora_rank")
def low_rank_queries(facts: Facts) -> Iterator[Problem]:
    """Multi-head latent attention without a low-rank query projection has no tensor-parallel form."""
    if facts.model.q_lora_rank != 0 or facts.parallelism.tensor_parallel == 1:
        return
    yield facts.problem(
        "model.q_lora_rank",
        f"must be > 0 with tensor_parallel {facts.parallelism.tensor_parallel} > 1",
        "Use a rank such as 1536, or tensor_parallel 1.",
        fixes=[*set_each("model.q_lora_rank", [1536]), *set_each(_TP, [1])],
    )


RULES = (heads, key_value_heads, feed_forward, sequence, low_rank_queries)
