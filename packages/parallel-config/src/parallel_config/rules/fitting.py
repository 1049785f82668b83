"""Which degrees the sizes in a file allow for, so that a message offers nothing that another rule refuses."""

from __future__ import annotations

import math

from parallel_config.rules.engine import Facts

SEQUENCE_LENGTHS = ("model.seq_length", "train_dataset.dataloader.config.seq_length")
"""Where the length of the sequence may stand; the model's counts where both do."""


def divisors(number: int) -> list[int]:
    """The divisors in ascending order; of numbers above 10^10, only those in a pair with one below 10^5."""
    small = [candidate for candidate in range(1, min(math.isqrt(number), 100_000) + 1) if number % candidate == 0]
    return small + [number // low for low in reversed(small) if low * low != number]


def ulysses_degree(method: str, context_parallel: int, configured: int | None) -> int:
    """Ranks that trade sequence for heads: 1 with colossal, cp with ulysses, as configured with hybrid."""
    if context_parallel == 1 or method == "colossal":
        return 1
    return configured or context_parallel


def lacks_low_rank_queries(facts: Facts) -> bool:
    """Whether queries of multi-head latent attention are projected at full rank."""
    rank = facts.model.q_lora_rank
    return rank == 0 or (rank is None and facts.wrote("model.q_lora_rank"))


def shares_key_value_heads(facts: Facts, tp: int) -> bool:
    """Whether key/value heads can be split over tp ranks, or each be held by equally many of them."""
    count = None if facts.model.multi_latent_attention else facts.model.num_key_value_heads
    return not count or count % tp == 0 or tp % count == 0


def fits(facts: Facts, tp: int, cp: int) -> bool:
    """Whether heads, feed-forward, vocabulary and sequence can be split so; an unknown size objects to nothing."""
    model, sizes = facts.model, facts.parallelism
    lengths = (facts.value(path) for path in SEQUENCE_LENGTHS)
    length = next((length for length in lengths if length is not None), None)
    trading = ulysses_degree(sizes.context_parallel_method, cp, sizes.ulysses_degree_in_cp)
    divided = ((model.num_attention_heads, tp * trading), (model.intermediate_size, tp), (length, cp * tp))
    return (
        all(size is None or size % parts == 0 for size, parts in divided)
        and shares_key_value_heads(facts, tp)
        and (not model.vocab_size or tp <= max(model.vocab_size, 1))
        and (tp == 1 or not lacks_low_rank_queries(facts))
    )


def tensor_degrees(facts: Facts) -> list[int]:
    """The degrees of tensor parallelism that the sizes and the world allow for, in ascending order; 1 is the first."""
    model, sizes = facts.model, facts.parallelism
    common = math.gcd(facts.room("tensor_parallel"), model.num_attention_heads or 0, model.intermediate_size or 0)
    # A context-parallel degree that fits with no tensor parallelism is at fault itself.
    cp = sizes.context_parallel
    cp = cp if cp > 0 and fits(facts, 1, cp) else 1
    return [tp for tp in divisors(common or sizes.tensor_parallel) if fits(facts, tp, cp)]
