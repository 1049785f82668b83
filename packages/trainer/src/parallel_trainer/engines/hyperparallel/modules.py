"""Modules that own parameters: the leaves of a model, which HyperParallel's calls shard, gather and reduce.

Each computes with a kernel on local tensors: of what is distributed (a `DTensor`, by tensor parallelism) it takes this
rank's part. Parts of a sum and of the vocabulary go out as such, and the plans that `shard_module` was given make of
them what follows. Gradients are those of this rank's part or copy; where several ranks hold copies of a parameter,
fully_shard adds theirs up (hyper_parallel/core/fully_shard/hsdp_param.py reduces over every replicated axis of the
mesh that it shares with tensor parallelism). Shape suffixes as in `models.layers`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from attrs import define
from mindspore import Parameter, Tensor, nn

from parallel_trainer.engines.hyperparallel.blocks import EMBEDDING, EXPERTS, HEAD
from parallel_trainer.engines.hyperparallel.calls import Name
from parallel_trainer.engines.hyperparallel.execute import imported
from parallel_trainer.kernels.interface import Kernels
from parallel_trainer.parallel.weights import Weight

Value = Callable[[Weight], Tensor]
"""The initial value of a weight."""

_PLACEMENTS = "hyper_parallel.core.dtensor.placement_types"


def local(tensor: Any) -> Any:
    """This rank's part of a tensor that may be distributed."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


@define(eq=False)
class Borders:
    """The mesh of tensor parallelism, None without; all modules of a model share it.

    It is there once HyperParallel has made it, long after the modules.
    """

    mesh: Any = None

    @property
    def ranks(self) -> int:
        """How many ranks weights are split over."""
        return int(self.mesh.size()) if self.mesh is not None else 1

    @property
    def rank(self) -> int:
        """Which of them this is."""
        return int(self.mesh.get_local_rank()) if self.mesh is not None else 0

    def tokens(self, x_TH: Tensor) -> Any:
        """This rank's tokens as a part of all."""
        return self._placed(x_TH, "Shard", 0)

    def columns(self, x_NV: Tensor) -> Any:
        """This rank's columns as a part of all."""
        return self._placed(x_NV, "Shard", 1)

    def summand(self, x_NH: Tensor) -> Any:
        """This rank's products as a part of the sum over ranks."""
        return self._placed(x_NH, "Partial")

    def _placed(self, x: Tensor, kind: str, *dim: int) -> Any:
        if self.mesh is None:
            return x
        placement = imported(Name(f"{_PLACEMENTS}.{kind}"))(*dim)
        return imported(Name("hyper_parallel.DTensor")).from_local(x, self.mesh, (placement,))


class Owner(nn.Cell):
    """A module with the parameters `values` by name, whose names in the model begin with `module`.

    Those in `fixed` are not trained. `rows` are those of the whole first parameter.
    """

    def __init__(
        self,
        kernels: Kernels,
        borders: Borders,
        values: Mapping[str, Tensor],
        *,
        module: str = "",
        fixed: frozenset[str] = frozenset(),
    ) -> None:
        super().__init__(auto_prefix=False)
        self.kernels, self.borders = kernels, borders
        self.rows = int(next(iter(values.values())).shape[0])
        for name, value in values.items():
            parameter = Parameter(value, name=f"{module}.{name}", requires_grad=name not in fixed)
            self.insert_param_to_cell(name, parameter)

    def own(self, name: str) -> Any:
        """This rank's part of a parameter as it is now; None where there is none of that name."""
        return local(getattr(self, name)) if name in self._params else None


class Linear(Owner):
    """A matrix that is whole or whose outputs are split, and a bias if there is one; a router's comes with another."""

    def construct(self, x: Tensor) -> Tensor:
        return self.kernels.linear(local(x), self.own("weight"), self.own("bias"))


class RowLinear(Owner):
    """A matrix whose inputs are split: this rank's part of the sum over ranks, with its part of the bias."""

    def construct(self, x_NI: Tensor) -> Tensor:
        bias, ranks = self.own("bias"), self.borders.ranks
        return self.kernels.linear(
            local(x_NI), self.own("weight"), bias if bias is None or ranks == 1 else bias / ranks
        )


class Norm(Owner):
    """Root-mean-square normalisation."""

    def construct(self, x: Tensor, eps: float) -> Tensor:
        return self.kernels.rms_norm(local(x), self.own("weight"), eps)


class ExpertMatrices(Owner):
    """The matrices of this rank's experts, for rows in their order: int64 `counts` says how many each has."""

    def construct(self, rows: Tensor, counts: np.ndarray) -> Tensor:
        return self.kernels.grouped_mlp(local(rows), counts, self.own("gate_up_proj"), self.own("down_proj"))


class Table(Owner):
    """Token ids, int32 (N,), to the rows of a table.

    A rank that holds a part of the table has zeros for other ids, and the sum over ranks is the result; one that holds
    all of it looks up its own tokens.
    """

    def construct(self, ids: Tensor) -> Any:
        table, rank = self.own("weight"), self.borders.rank
        rows = table.shape[0]
        if rows < self.rows:
            found = self.kernels.embedding(ids, table, first=rank * rows, vocab_size=self.rows)
            return self.borders.summand(found)
        tokens = ids.shape[0] // self.borders.ranks
        return self.kernels.embedding(ids[rank * tokens : (rank + 1) * tokens], table)


class Logits(Owner):
    """Hidden states to logits of the part of a vocabulary that this rank has."""

    def construct(self, x_NH: Tensor) -> Any:
        logits_NV = self.kernels.linear(local(x_NH), self.own("weight"))
        return self.borders.columns(logits_NV) if logits_NV.shape[1] < self.rows else logits_NV


class Identity(nn.Cell):
    """What goes in; HyperParallel starts an exchange where it comes out."""

    def construct(self, x: Tensor) -> Tensor:
        return x


def owner(module: str, weights: Sequence[Weight], value: Value, kernels: Kernels, borders: Borders) -> Owner:
    """The module of that name in a model, with its weights."""
    values = {weight.name.rpartition(".")[2]: value(weight) for weight in weights}
    fixed = frozenset(weight.name.rpartition(".")[2] for weight in weights if not weight.trainable)
    kind: type[Owner] = Linear
    if module == EMBEDDING:
        kind = Table
    elif module == HEAD:
        kind = Logits
    elif module.endswith("norm"):
        kind = Norm
    elif module.endswith(f".{EXPERTS}"):
        kind = ExpertMatrices
    elif any(weight.tp_dim == 1 for weight in weights):
        kind = RowLinear
    elif len(values["weight"].shape) != 2:
        raise ValueError(
            f"{module} has a weight of shape {tuple(values['weight'].shape)}, and its name is of no kind of module "
            "that takes it: a norm's ends with norm, experts' with mlp.experts, and a matrix has two dimensions"
        )
    return kind(kernels, borders, values, module=module, fixed=fixed)
