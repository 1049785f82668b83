"""The standard deviations that a model's matrices start with, by the rule that a file chooses."""

from __future__ import annotations

import math

from attrs import frozen

HUGGING_FACE, MEGATRON, MINDFORMERS = "hugging_face", "megatron", "mindformers"


@frozen
class InitialStd:
    """Of normal distributions with mean 0.

    matrix: of tables, routers, and matrices that read hidden states or what was made of them.
    output: of matrices whose products are added to hidden states: o_proj and every down_proj, also that of experts.
    """

    matrix: float
    output: float

    @classmethod
    def of(cls, rule: str, *, initializer_range: float, layers: int) -> InitialStd:
        """By `extensions.initial_weights`, for a model of so many layers besides one that predicts further.

        hugging_face: initializer_range, in transformers' `_init_weights`.
        megatron:     the same, and for outputs divided by √(2·layers); Shoeybi et al., arXiv:1909.08053, and
            `scaled_init_method_normal` in Megatron-LM and MindFormers.
        mindformers:  0.01 whatever the file says: what MindFormers 2.0.0 really starts with in PyNative mode, where
            each module's `reset_parameter` draws anew after the model was made without memory.

        Raises ValueError for another rule.
        """
        if rule == MINDFORMERS:
            return cls(0.01, 0.01)
        if rule == MEGATRON:
            return cls(initializer_range, initializer_range / math.sqrt(2 * layers))
        if rule == HUGGING_FACE:
            return cls(initializer_range, initializer_range)
        raise ValueError(f"initial_weights is {rule!r}: it has to be {HUGGING_FACE}, {MEGATRON} or {MINDFORMERS}")
