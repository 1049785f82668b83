"""A rank's chunk of a model as a module with the names of Hugging Face checkpoints. Suffixes as in `models.layers`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from device_mesh import Communicator
from mindspore import Tensor, nn

from parallel_trainer.batch import MicroBatch
from parallel_trainer.engines.hyperparallel.inputs import micro_batch
from parallel_trainer.engines.hyperparallel.layer import FurtherLayer, Layer, Positions, Setting
from parallel_trainer.engines.hyperparallel.modules import Borders, Value, local, owner
from parallel_trainer.engines.hyperparallel.routing import ForwardRecord
from parallel_trainer.kernels.interface import Kernels
from parallel_trainer.models.layers import Embedding, LayerUnit, Model
from parallel_trainer.models.multi_token import MultiTokenPrediction
from parallel_trainer.models.unit import Unit
from parallel_trainer.parallel.weights import Weight


class Layers(nn.Cell):
    """Layers by the numbers that they have in the whole model."""

    def __getitem__(self, number: int) -> Any:
        return getattr(self, str(number))


class Chunk(nn.Cell):
    """Units of a model as one module.

    With the first unit it gets token ids by name, else hidden states (T, H) of the rank's tokens. With the last unit it
    returns what the backward starts from, (): the sums of its losses times the factors of the step. Else hidden states.

    tp:   the ranks of tensor parallelism, which compute a loss together where logits stay split.
    sums: of the losses in this step so far, float64 (losses,).
    """

    def __init__(
        self,
        model: Model,
        units: Sequence[Unit],
        value: Value,
        kernels: Kernels,
        positions: Positions,
        record: ForwardRecord,
        tp: Communicator | None = None,
    ) -> None:
        super().__init__(auto_prefix=False)
        self._record, self._tp = record, tp
        self._borders = Borders()
        self._setting = Setting(kernels, self._borders, positions, model.config.rms_norm_eps)
        self._first, self._last = isinstance(units[0], Embedding), units[-1] is model.units[-1]
        self.start_step((1.0,) * len(model.losses))
        self.model = nn.Cell(auto_prefix=False)
        self.model.layers = Layers(auto_prefix=False)
        self._numbers: list[int] = []
        self._predicts_further = any(isinstance(unit, MultiTokenPrediction) for unit in units)
        for unit in units:
            if isinstance(unit, LayerUnit):
                self._add(Layer(unit.part, self._setting))
            elif isinstance(unit, MultiTokenPrediction):
                self._add(FurtherLayer(unit, self._setting))
        self._add_owners({weight.name: weight for unit in units for weight in unit.weights}, value)

    def _add(self, layer: Layer) -> None:
        self.model.layers.insert_child_to_cell(layer.number, layer)
        self._numbers.append(int(layer.number))

    def _add_owners(self, weights: Mapping[str, Weight], value: Value) -> None:
        by_module: dict[str, list[Weight]] = {}
        for name, weight in weights.items():
            by_module.setdefault(name.rpartition(".")[0], []).append(weight)
        for module, of_module in by_module.items():
            parent = self
            *path, last = module.split(".")
            for part in path:
                if not hasattr(parent, part):
                    parent.insert_child_to_cell(part, nn.Cell(auto_prefix=False))
                parent = getattr(parent, part)
            owned = owner(module, of_module, value, self._setting.kernels, self._borders)
            parent.insert_child_to_cell(last, owned)

    def split_over(self, mesh: Any) -> None:
        """Say over which ranks tensor parallelism is about to split weights."""
        self._borders.mesh = mesh

    def start_step(self, loss_factors: Sequence[float]) -> None:
        """Of the micro-batches that follow, each loss is multiplied by its factor.

        Factors are not passed to `construct`, because fully_shard rounds floating-point inputs to the type of weights.
        """
        self._loss_factors = tuple(loss_factors)
        self.sums = np.zeros(len(loss_factors))

    def construct(
        self,
        x_TH: Tensor | None = None,
        *,
        input_ids: Tensor,
        position_ids: Tensor,
        labels: Tensor,
        loss_mask: Tensor,
        document_ends: Tensor,
        ahead_input_ids: Tensor | None = None,
        ahead_labels: Tensor | None = None,
        ahead_loss_mask: Tensor | None = None,
    ) -> Tensor:
        ahead = None if ahead_input_ids is None else (ahead_input_ids, ahead_labels, ahead_loss_mask)
        batch = micro_batch(input_ids, position_ids, labels, loss_mask, document_ends, ahead)
        with self._record.forward():
            return self._forward(x_TH, batch)

    def _forward(self, x_TH: Tensor | None, batch: MicroBatch) -> Tensor:
        if self._first:
            x_TH = self._embedded(batch)
        *numbers, last = self._numbers if self._predicts_further else (*self._numbers, None)
        for number in numbers:
            x_TH = self.model.layers[number](x_TH, batch)
        if not self._last:
            return x_TH
        x_TH = self._normed(x_TH)
        if last is None:
            return self._loss([x_TH], batch)
        assert batch.ahead is not None
        further_TH = self.model.layers[last](x_TH, batch, self._embedded(batch.ahead))
        return self._loss([x_TH, further_TH], batch)

    def _embedded(self, batch: MicroBatch) -> Tensor:
        return local(self.model.embed_tokens(Tensor(batch.input_ids.reshape(-1))))

    def _normed(self, x_TH: Tensor) -> Tensor:
        return self.model.norm(x_TH, self._setting.eps).astype(x_TH.dtype)

    def _loss(self, states: Sequence[Tensor], batch: MicroBatch) -> Tensor:
        """The losses' sums times their factors, added up."""
        total = None
        for place, (x_TH, of) in enumerate(zip(states, (batch, batch.ahead), strict=False)):
            assert of is not None
            assert of.labels is not None
            logits_NV = local(self.lm_head(self._borders.tokens(x_TH)))
            found, copies = self._loss_sum(logits_NV, of.labels, of.loss_mask)
            self.sums[place] += found.asnumpy()
            weighted = found * Tensor(np.array(self._loss_factors[place] * copies), found.dtype)
            total = weighted if total is None else total + weighted
        assert total is not None
        return total

    def _loss_sum(self, logits_NV: Tensor, labels: np.ndarray, loss_mask: np.ndarray | None) -> tuple[Tensor, int]:
        """The sum of a loss, and what makes its gradient that of the loss on every tensor-parallel rank together.

        Gradients of logits that were gathered are added up over the ranks; those of logits that stay split are not.
        """
        cross_entropy_sum, columns = self._setting.kernels.cross_entropy_sum, logits_NV.shape[1]
        if columns == self.lm_head.rows:
            return cross_entropy_sum(logits_NV, labels, loss_mask), 1
        assert self._tp is not None, "logits stay split for a loss that the ranks compute together"
        first, whole = self._tp.rank * columns, self.lm_head.rows
        found = cross_entropy_sum(logits_NV, labels, loss_mask, first=first, vocab_size=whole, group=self._tp)
        return found, self._tp.size
