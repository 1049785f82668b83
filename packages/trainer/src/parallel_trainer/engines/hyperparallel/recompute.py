"""Recomputing activations: the section `recompute`, as modules that are wrapped before their parameters are sharded."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from parallel_config.schema import Recompute

from parallel_trainer.engines.hyperparallel.blocks import Block
from parallel_trainer.engines.hyperparallel.calls import Call, Module, Name


def recomputed(recompute: Recompute, blocks: Sequence[Block]) -> Iterator[Module]:
    """The modules whose activations are computed again, without those inside of one that is."""
    full = _layers(recompute.full_recompute_layer or ()) if recompute.mode == "full" else set()
    select = recompute.select_module if recompute.mode == "select" and recompute.select_module else {}
    for block in blocks:
        if block.layer in full:
            yield block.module
            continue
        wanted = [pattern for pattern, specs in select.items() if block.layer in _layers(specs)]
        names = [name for name in block.modules if any(re.fullmatch(pattern, name) for pattern in wanted)]
        yield from (block.module.inner(name) for name in names if not _inside_another(name, names))


def _inside_another(name: str, names: Sequence[str]) -> bool:
    return any(name.startswith(f"{other}.") for other in names)


def _layers(specs: Sequence[str]) -> set[int | None]:
    """The numbers of "3" and "5-8"."""
    ends = [[int(end) for end in spec.split("-")] for spec in specs]
    return {number for pair in ends for number in range(pair[0], pair[-1] + 1)}


def wrap(modules: Sequence[Module]) -> Iterator[Call]:
    """Each module in its wrapper's place, computed again to its end."""
    wrapper = Name("hyper_parallel.core.activation_checkpoint.checkpoint_wrapper")
    for module in modules:
        why = "it would stop between the start and the end of an exchange of tokens, whose buffers are then in use"
        yield Call(wrapper, (module,), {"early_stop": False}, result=module, why=why)
