"""The section `extensions`: what this project adds to a file as a section of its own."""

from __future__ import annotations

from attrs import frozen

from parallel_config.schema.setting import setting


@frozen
class Extensions:
    """`engine` says what trains: this project itself (native), or HyperParallel, to whose calls it maps the plan."""

    engine: str = setting(
        "native",
        options=("native", "hyperparallel"),
        about="What trains: this project itself, or HyperParallel, to whose calls it maps the plan.",
    )
