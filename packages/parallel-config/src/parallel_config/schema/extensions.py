"""The section `extensions`: what this project adds to a file as a section of its own."""

from __future__ import annotations

from attrs import frozen

from parallel_config.schema.setting import setting


@frozen
class Extensions:
    """`engine` says what trains: this project itself (native), or HyperParallel, to whose calls it maps the plan.

    `initial_weights` says by whose rule matrices start: with model.initializer_range (hugging_face), smaller where they
    write to hidden states (megatron), or with 0.01 (mindformers).
    """

    engine: str = setting(
        "native",
        options=("native", "hyperparallel"),
        about="What trains: this project itself, or HyperParallel, to whose calls it maps the plan.",
    )
    initial_weights: str = setting(
        "hugging_face",
        options=("hugging_face", "megatron", "mindformers"),
        about="Rule of initial matrices: one deviation, a smaller one where they write hidden states, or a constant.",
    )
