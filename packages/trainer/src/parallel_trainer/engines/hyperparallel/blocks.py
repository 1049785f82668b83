"""What a rank holds of a model, as modules with the parameters that the model declares: what calls are made for."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

from attrs import frozen
from parallel_config import ParallelPlan, TrainConfig

from parallel_trainer.engines.hyperparallel.calls import Module
from parallel_trainer.kernels import kernels
from parallel_trainer.models import build_model
from parallel_trainer.parallel.pipeline import stage_units
from parallel_trainer.parallel.weights import Weight

EXPERTS, SHARED_EXPERTS, ROUTER = "mlp.experts", "mlp.shared_experts", "mlp.gate"
CORE_ATTENTION = "self_attn.core_attention"
"""Modules of a layer; queries, keys and values of all heads go into the core of attention."""

EMBEDDING, NORM, HEAD = "model.embed_tokens", "model.norm", "lm_head"

_LAYER = re.compile(r"model\.layers\.(\d+)\.(.*)")


@frozen
class Block:
    """A module that is handled as one: the embedding, a layer, the norm after the last one, the head.

    module:  which.
    layer:   its number if it is a layer; that of a further prediction comes after the last one.
    weights: what it declares, by names inside the module.
    """

    module: Module
    layer: int | None
    weights: Mapping[str, Weight]

    @property
    def has_experts(self) -> bool:
        """Whether its feed-forward part is experts."""
        return any(name.startswith(f"{EXPERTS}.") for name in self.weights)

    def of_experts(self, name: str) -> bool:
        """Whether the weight belongs to routed experts."""
        return name.startswith(f"{EXPERTS}.")

    @property
    def norms(self) -> tuple[str, ...]:
        """Names of the modules inside that are norms."""
        names = (name.removesuffix(".weight") for name in self.weights if "." in name)
        return tuple(name for name in names if name.endswith("norm"))

    @property
    def modules(self) -> tuple[str, ...]:
        """Names of all modules inside."""
        paths = [name.split(".")[:-1] for name in self.weights]
        names = {".".join(path[:depth]): None for path in paths for depth in range(1, len(path) + 1)}
        return (*names, *((CORE_ATTENTION,) if self.layer is not None else ()))


Chunks = tuple[tuple[Block, ...], ...]
"""The chunks of a pipeline rank, each with its blocks in the order in which they run."""


def rank_chunks(config: TrainConfig, plan: ParallelPlan) -> tuple[Chunks, ...]:
    """The chunks of each pipeline rank."""
    stages = stage_units(build_model(config.model, kernels("cpu")).units, plan.stage_layers)
    found: list[list[tuple[Block, ...]]] = [[] for _ in range(plan.pp)]
    for rank, units in zip(plan.stage_ranks, stages, strict=True):
        weights = [weight for unit in units for weight in unit.weights]
        found[rank].append(tuple(_blocks(weights, len(found[rank]))))
    return tuple(map(tuple, found))


def _blocks(weights: Sequence[Weight], chunk: int) -> Iterator[Block]:
    found: dict[str, dict[str, Weight]] = {}
    for weight in weights:
        layer = _LAYER.fullmatch(weight.name)
        module, _, name = weight.name.rpartition(".")
        if layer is not None:
            module, name = f"model.layers.{layer[1]}", layer[2]
        found.setdefault(module, {})[name] = weight
    # A further prediction uses the final norm before its own layer; the norm is a block of its own after it.
    for module in sorted(found, key=lambda name: (name == HEAD, name == NORM)):
        number = module.removeprefix("model.layers.")
        yield Block(Module(module, chunk), int(number) if number.isdigit() else None, found[module])
