"""Context parallelism: what the core of attention does with the other parts of a sequence."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from parallel_config import ParallelPlan

from parallel_trainer.engines.hyperparallel.blocks import CORE_ATTENTION, Block
from parallel_trainer.engines.hyperparallel.calls import Attribute, Call, Name, Use
from parallel_trainer.engines.hyperparallel.mesh import CP

_STYLES = "hyper_parallel.core.context_parallel"


DIMENSIONS = {"seq_dim": 1, "head_dim": 2}
"""Where sequence and heads are in what goes into the core: (batch, sequence, heads, size of a head)."""


def attend_across_ranks(plan: ParallelPlan, blocks: Sequence[Block]) -> Iterator[Call]:
    """One style for all layers, given to the core of each one's attention."""
    asynchronous, gathered = plan.context_parallel_async, plan.cp // plan.ulysses_degree
    exchanged = [f"heads are exchanged among {plan.ulysses_degree} neighbours"] if plan.ulysses_degree > 1 else []
    exchanged += [f"keys and values are gathered from {gathered} ranks"] if gathered > 1 else []
    style = "async_context_parallel.AsyncContextParallel" if asynchronous else "context_parallel.ContextParallel"
    yield Call(
        Name(f"{_STYLES}.{style}"),
        (),
        DIMENSIONS | {"ulysses_degree": plan.ulysses_degree},
        result="context_parallel",
        why=f"{plan.context_parallel_method}: {', '.join(exchanged)}",
    )
    for block in blocks:
        if block.layer is None:
            continue
        producers = {
            f"{kind}_proj": block.module.inner(f"self_attn.{kind}_handoff") for kind in ("q", "k", "v") if asynchronous
        }
        yield Call(
            Attribute(Use("context_parallel"), "apply", f"{_STYLES}.{style}"),
            (block.module.inner(CORE_ATTENTION), CP),
            producers,
        )
