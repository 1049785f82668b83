"""Which tensors of a Hugging Face checkpoint a weight consists of: one table, read in both directions.

Weights have Hugging Face's names already. What differs are experts, which are one weight for a layer here and two or
three matrices for each expert there, and tables that are written twice though a model has them once.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from types import MappingProxyType

from attrs import frozen

from parallel_trainer.parallel.weights import Weight

EXPERT_MATRICES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {"mlp.experts.gate_up_proj": ("gate_proj", "up_proj"), "mlp.experts.down_proj": ("down_proj",)}
)
"""By the end of a stacked weight's name, the matrices of each expert that lie in it, one below the other."""


@frozen
class Stored:
    """A tensor in a file: its name and shape."""

    name: str
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


def stored(weight: Weight) -> tuple[Stored, ...]:
    """The tensors of which a weight consists: its elements in C order are theirs, one after the other."""
    for end, matrices in EXPERT_MATRICES.items():
        if weight.name.endswith(f".{end}"):
            folder = weight.name.rpartition(".")[0]
            experts, rows, columns = weight.shape
            shape = (rows // len(matrices), columns)
            names = (f"{folder}.{expert}.{matrix}.weight" for expert in range(experts) for matrix in matrices)
            return tuple(Stored(name, shape) for name in names)
    return (stacked(weight),)


def stacked(weight: Weight) -> Stored:
    """A weight as one tensor, which for experts is how transformers 5 has them in memory."""
    return Stored(weight.name, weight.shape)


def copies(weights: Iterable[Weight], *, layers: int) -> dict[str, Weight]:
    """By the name of a tensor that may be in a file too, the weight that it has to be equal to.

    layers: of the model without the layer of a further prediction, for which DeepSeek's files repeat both tables.
    """
    by_name = {weight.name: weight for weight in weights}
    table = by_name["model.embed_tokens.weight"]
    head = by_name.get("lm_head.weight", table)
    found = {"lm_head.weight": head} if head is table else {}
    if any(name.startswith(f"model.layers.{layers}.") for name in by_name):
        found[f"model.layers.{layers}.embed_tokens.weight"] = table
        found[f"model.layers.{layers}.shared_head.head.weight"] = head
    return found
