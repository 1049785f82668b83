"""What a part of a layer is, and what it is given: weights by name, and what is done with them.

Who runs a layer decides what weights are: tensors that are gathered for it (`UsedTensors`), or modules that own them
(`engines.hyperparallel.layer.UsedModules`). Shape suffixes as in `layers`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np
from attrs import frozen
from mindspore import Tensor

from parallel_trainer.batch import MicroBatch
from parallel_trainer.costs import Costs, OnRank
from parallel_trainer.parallel.context_parallel import Attention
from parallel_trainer.parallel.expert_parallel import Halves
from parallel_trainer.parallel.tensor_parallel import TensorParallel
from parallel_trainer.parallel.weights import Weight

if TYPE_CHECKING:
    from parallel_trainer.models.layers import FeedForward


class Used(Protocol):
    """The weights of a unit while it runs, by their names after the layer's prefix, and what is done with them."""

    @property
    def tp(self) -> TensorParallel:
        """What happens at the borders of regions whose weights are split."""

    def __getitem__(self, name: str) -> Tensor:
        """A weight that no kernel of the others takes."""

    def linear(self, x: Tensor, name: str) -> Tensor:
        """The product with a matrix that is whole or whose outputs are split."""

    def row_linear(self, x: Tensor, name: str) -> Tensor:
        """The product with a matrix whose inputs are split; returns the rank's tokens."""

    def norm(self, x: Tensor, name: str, *, eps: float | None = None) -> Tensor:
        """Root-mean-square normalisation."""

    def grouped_mlp(self, rows: Tensor, counts: np.ndarray, name: str) -> Tensor:
        """What experts make of the rows that lie in their order."""

    def run(self, part: Part, x_TH: Tensor, batch: MicroBatch) -> Tensor:
        """What an inner part makes of the rank's tokens."""

    def halves(self, part: FeedForward) -> Halves:
        """An inner feed-forward part in two steps, between which something else may be done."""


@frozen(eq=False)
class UsedTensors:
    """`Used` weights that are tensors, which whoever runs the unit provides."""

    tensors: Mapping[str, Tensor]
    tp: TensorParallel
    eps: float

    def __getitem__(self, name: str) -> Tensor:
        return self.tensors[name]

    def linear(self, x: Tensor, name: str) -> Tensor:
        """See `Used.linear`."""
        return self.tp.kernels.linear(x, self.tensors[f"{name}.weight"], self.tensors.get(f"{name}.bias"))

    def row_linear(self, x: Tensor, name: str) -> Tensor:
        """See `Used.row_linear`."""
        return self.tp.row_linear(x, self.tensors[f"{name}.weight"], self.tensors.get(f"{name}.bias"))

    def norm(self, x: Tensor, name: str, *, eps: float | None = None) -> Tensor:
        """See `Used.norm`."""
        return self.tp.kernels.rms_norm(x, self.tensors[f"{name}.weight"], self.eps if eps is None else eps)

    def grouped_mlp(self, rows: Tensor, counts: np.ndarray, name: str) -> Tensor:
        """See `Used.grouped_mlp`."""
        gate_up, down = self.tensors[f"{name}.gate_up_proj"], self.tensors[f"{name}.down_proj"]
        return self.tp.kernels.grouped_mlp(rows, counts, gate_up, down)

    def run(self, part: Part, x_TH: Tensor, batch: MicroBatch) -> Tensor:
        """See `Used.run`."""
        return part(x_TH, batch, self)

    def halves(self, part: FeedForward) -> Halves:
        """See `Used.halves`."""
        return part.halves(self)


class Part(Protocol):
    """A part of a layer."""

    @property
    def name(self) -> str:
        """What it is called in a layer; its weights' names begin with that."""

    @property
    def weights(self) -> Sequence[Weight]:
        """What it needs."""

    def __call__(self, x_TH: Tensor, batch: MicroBatch, used: Used) -> Tensor:
        """What it makes of the rank's tokens, (T, H)."""

    def costs(self, rank: OnRank) -> Costs:
        """What the rank keeps and receives for that, from the result of the norm before it on."""


class AttentionPart(Part, Protocol):
    """A part that attends."""

    attention: Attention
    """What it calls with queries, keys and values."""
