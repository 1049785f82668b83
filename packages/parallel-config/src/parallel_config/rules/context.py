"""Context parallelism: methods and degrees (specification, section 3)."""

from __future__ import annotations

import math
from collections.abc import Iterator

from parallel_config.problems import Edit, Fix, Problem
from parallel_config.rules.degrees import listed, multiples, near, set_each
from parallel_config.rules.engine import Facts, rule
from parallel_config.rules.fitting import SEQUENCE_LENGTHS, divisors, ulysses_degree

_CP = "parallelism.context_parallel"
_METHOD = "parallelism.context_parallel_method"
_ULYSSES = "parallelism.ulysses_degree_in_cp"
_ORDER = "parallelism.context_parallel_order"


@rule(_CP, _METHOD, _ULYSSES, decides=("ulysses_degree",))
def method(facts: Facts) -> Iterator[Problem]:
    """ulysses needs degree == cp; hybrid needs 1 < degree < cp and a degree that divides cp."""
    sizes = facts.parallelism
    cp, degree = sizes.context_parallel, sizes.ulysses_degree_in_cp
    if cp == 1 or sizes.context_parallel_method == "colossal":
        return
    if sizes.context_parallel_method == "ulysses":
        if degree is not None and degree != cp:
            yield facts.problem(
                _ULYSSES,
                f"must equal context_parallel {cp} with context_parallel_method ulysses",
                f"Use {cp}, or null for the same; hybrid takes a smaller degree.",
                fixes=[*set_each(_ULYSSES, [cp]), *set_each(_CP, [degree]), *set_each(_METHOD, ["colossal"])],
            )
        return
    possible = [size for size in divisors(cp) if 1 < size < cp]
    if degree in possible:
        return
    other: list[Fix] = [
        *set_each(_METHOD, ["colossal"]),
        (Edit(_METHOD, "ulysses"), *((Edit(_ULYSSES, None),) if degree not in (None, cp) else ())),
    ]
    if degree is None:
        rule_text = f"must be written with context_parallel_method hybrid and context_parallel {cp}"
    else:
        rule_text = f"must satisfy 1 < ulysses_degree_in_cp < context_parallel {cp} and divide it (method hybrid)"
    yield facts.problem(
        _ULYSSES,
        rule_text,
        f"Use {listed(possible)}." if possible else f"Use colossal or ulysses: no degree lies between 1 and {cp}.",
        fixes=[*set_each(_ULYSSES, near(possible, degree or cp)), *other],
    )


@rule(_CP, _ORDER, *SEQUENCE_LENGTHS)
def zigzag(facts: Facts) -> Iterator[Problem]:
    """Zigzag order gives each rank two of 2·cp equal pieces."""
    cp = facts.parallelism.context_parallel
    known = [path for path in SEQUENCE_LENGTHS if facts.value(path) is not None]
    if cp == 1 or facts.parallelism.context_parallel_order == "contiguous" or not known:
        return
    length, step = facts.value(known[0]), math.lcm(2 * cp, cp * facts.parallelism.tensor_parallel)
    if length % (2 * cp) == 0:
        return
    changed = [path for path in known if path == known[0] or facts.wrote(path)]
    yield facts.problem(
        known[0],
        f"must be a multiple of 2 · context_parallel {cp} = {2 * cp} with context_parallel_order zigzag",
        f"Use seq_length {listed(multiples(step, length))}; or context_parallel_order contiguous.",
        fixes=[
            *(tuple(Edit(path, size) for path in changed) for size in multiples(step, length)),
            *set_each(_ORDER, ["contiguous"]),
        ],
    )


@rule(
    "ulysses_degree",
    "heads_per_rank",
    _CP,
    _METHOD,
    _ULYSSES,
    "parallelism.tensor_parallel",
    "model.num_attention_heads",
)
def heads_over_ulysses(facts: Facts) -> Iterator[Problem]:
    """The heads of a tensor-parallel rank are split over the Ulysses degree."""
    sizes, heads = facts.parallelism, facts.model.num_attention_heads
    degree = ulysses_degree(sizes.context_parallel_method, sizes.context_parallel, sizes.ulysses_degree_in_cp)
    tp = sizes.tensor_parallel
    if heads is None or (heads // tp) % degree == 0:
        return
    multiples = sorted({max(heads // (tp * degree), 1) * tp * degree, (heads // (tp * degree) + 1) * tp * degree})
    yield facts.problem(
        "model.num_attention_heads",
        f"must give each tensor-parallel rank a multiple of the Ulysses degree {degree}:"
        f" {heads} // tensor_parallel {tp} = {heads // tp}",
        f"Use num_attention_heads {listed(multiples)}; or method colossal, which splits no heads.",
        fixes=[*set_each(_METHOD, ["colossal"]), *set_each("model.num_attention_heads", multiples)],
    )


RULES = (method, zigzag, heads_over_ulysses)
