"""A rank's chunk of a model as a module with the names of Hugging Face checkpoints, around the model's own parts.

What attention, experts and layers compute is written once, in `models`; here each of them is a module whose weights are
modules inside it, so that what HyperParallel does before and after a module's forward happens where its calls say.
Between modules are local tensors of the rank's tokens. Shape suffixes as in `models.layers`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Any

import numpy as np
from attrs import frozen
from mask_compression import CompressedMask
from mindspore import Tensor, nn

from parallel_trainer.batch import MicroBatch
from parallel_trainer.engines.hyperparallel.blocks import EMBEDDING, HEAD
from parallel_trainer.engines.hyperparallel.inputs import micro_batch
from parallel_trainer.engines.hyperparallel.modules import (
    Borders,
    ExpertMatrices,
    Identity,
    Linear,
    Logits,
    Norm,
    Owner,
    RowLinear,
    Table,
    local,
)
from parallel_trainer.engines.hyperparallel.routing import ForwardRecord
from parallel_trainer.kernels.interface import Kernels
from parallel_trainer.models.layers import (
    AttentionPart,
    DecoderLayer,
    Embedding,
    Experts,
    FeedForward,
    LayerUnit,
    Model,
    Part,
)
from parallel_trainer.models.multi_token import MultiTokenPrediction
from parallel_trainer.models.unit import Unit
from parallel_trainer.parallel.context_parallel import Of
from parallel_trainer.parallel.expert_parallel import Halves
from parallel_trainer.parallel.sequence import Ranges
from parallel_trainer.parallel.tensor_parallel import TensorParallel
from parallel_trainer.parallel.weights import Weight

Value = Callable[[Weight], Tensor]
"""The initial value of a weight."""


@frozen(eq=False)
class Positions:
    """Which positions of a sequence attention gets: queries of this rank, keys of all; None for all in their order."""

    queries: Ranges | None = None
    keys: Ranges | None = None

    @classmethod
    def of(cls, blocks: Sequence[Ranges], rank: int) -> Positions:
        """Of the ranks that share a sequence, each with its block, that with this number."""
        return cls(blocks[rank], tuple(chain(*blocks)))


@frozen(eq=False)
class Setting:
    """What all modules of a chunk share.

    kernels:   what is computed on a rank.
    borders:   where tensor parallelism begins and ends.
    positions: what attention gets of a sequence.
    eps:       of norms.
    """

    kernels: Kernels
    borders: Borders
    positions: Positions
    eps: float


@frozen(eq=False)
class UsedModules:
    """`models.layers.Used` weights that are modules inside `root`, which has the name `prefix` in the layer."""

    root: nn.Cell
    prefix: str
    setting: Setting

    @property
    def tp(self) -> TensorParallel:
        """One rank: regions are entered and left by the plans of modules."""
        return TensorParallel.none(self.setting.kernels)

    def __getitem__(self, name: str) -> Tensor:
        module, _, last = name.rpartition(".")
        found: Tensor = self._module(module).own(last)
        return found

    def linear(self, x: Tensor, name: str) -> Tensor:
        """See `Used.linear`."""
        return self._module(name)(x)

    def row_linear(self, x: Tensor, name: str) -> Tensor:
        """See `Used.row_linear`; returns this rank's part of the sum over ranks."""
        return self._module(name)(x)

    def norm(self, x: Tensor, name: str, *, eps: float | None = None) -> Tensor:
        """See `Used.norm`. Units of norms compute in float32, and what goes on has the type that came."""
        return self._module(name)(x, self.setting.eps if eps is None else eps).astype(x.dtype)

    def grouped_mlp(self, rows: Tensor, counts: np.ndarray, name: str) -> Tensor:
        """See `Used.grouped_mlp`."""
        return self._module(name)(rows, counts)

    def run(self, part: Part, x_TH: Tensor, batch: MicroBatch) -> Tensor:
        """See `Used.run`: the part's module, which gets and gives this rank's tokens."""
        found: Tensor = local(self._module(part.name)(self.setting.borders.tokens(x_TH), batch))
        return found

    def halves(self, part: FeedForward) -> Halves:
        """See `Used.halves`: all of it in the first."""
        module, tokens = self._module(part.name), self.setting.borders.tokens
        return lambda x_TH: local(module(tokens(x_TH), None)), lambda out_TH: out_TH

    def _module(self, name: str) -> Any:
        return walk(self.root, name.removeprefix(self.prefix))


def walk(root: nn.Cell, name: str) -> Any:
    """The module of a dotted name; found anew each time, as wrappers take the place of what they wrap."""
    for part in name.split("."):
        root = getattr(root, part)
    return root


class Region(nn.Cell):
    """A part of a layer as a module: attention or a feed-forward part, whose weights are split, or experts.

    Where weights are split it gets all tokens, and returns this rank's part of a sum over ranks.
    """

    def __init__(self, part: Part, setting: Setting) -> None:
        super().__init__(auto_prefix=False)
        self._part, self._setting = part, setting

    def construct(self, x: Any, batch: MicroBatch | None) -> Any:
        used = UsedModules(self, f"{self._part.name}.", self._setting)
        out = self._part(local(x), batch, used)  # type: ignore[arg-type]  # a feed-forward part needs no batch
        return out if isinstance(self._part, Experts) else self._setting.borders.summand(out)


class AttentionRegion(Region):
    """Attention, whose core is a module."""

    def __init__(self, part: AttentionPart, setting: Setting) -> None:
        super().__init__(part, setting)
        self.q_handoff, self.k_handoff, self.v_handoff = Identity(), Identity(), Identity()
        self.core_attention = CoreAttention(setting)
        part.attention = _Core(self)


@frozen(eq=False)
class _Core:
    """`parallel.context_parallel.Attention` by the modules of one layer."""

    region: AttentionRegion

    def bring(self, x: Tensor, of: Of) -> Callable[[], Tensor]:
        """See `Attention.bring`: what HyperParallel starts after a handoff, it ends before the core."""
        handed = getattr(self.region, f"{of}_handoff")(x)
        return lambda: handed

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, *, scale: float, mask: CompressedMask) -> Tensor:
        found: Tensor = local(self.region.core_attention(q, k, v, scale, mask))
        return found


class CoreAttention(nn.Cell):
    """Queries (B, S, heads, D), keys and values (B, S, kv_heads, D), of other tokens or heads than the layer's where
    context parallelism put itself before; what it returns has the queries' tokens and heads."""

    def __init__(self, setting: Setting) -> None:
        super().__init__(auto_prefix=False)
        self._setting = setting

    def construct(self, q: Any, k: Any, v: Any, scale: float, mask: CompressedMask) -> Tensor:
        positions = self._setting.positions
        return self._setting.kernels.attention(
            local(q),
            local(k),
            local(v),
            scale,
            mask,
            query_ranges=positions.queries,
            key_ranges=positions.keys,
        )


class Layer(nn.Cell):
    """A layer as a module; that of a further prediction gets hidden states after the final norm and embeddings."""

    def __init__(
        self, prefix: str, layer: DecoderLayer, setting: Setting, further: MultiTokenPrediction | None
    ) -> None:
        super().__init__(auto_prefix=False)
        self._prefix, self._layer, self._setting, self._further = prefix, layer, setting, further
        self.self_attn = AttentionRegion(layer.attention, setting)
        self.mlp = Region(layer.feed_forward, setting)
        if isinstance(layer.feed_forward, Experts) and layer.feed_forward.shared:
            self.mlp.shared_experts = Region(layer.feed_forward.shared, setting)

    def construct(self, x_TH: Tensor, batch: MicroBatch, next_TH: Tensor | None = None) -> Tensor:
        used = UsedModules(self, self._prefix, self._setting)
        if self._further is None:
            return self._layer(x_TH, batch, used)
        assert next_TH is not None
        return self._further.further(x_TH, next_TH, batch, used)


class Layers(nn.Cell):
    """Layers by the numbers that they have in the whole model."""

    def __getitem__(self, number: int) -> Any:
        return getattr(self, str(number))


class Chunk(nn.Cell):
    """Units of a model as one module.

    With the first unit it gets token ids by name, else hidden states (T, H) of the rank's tokens. With the last unit it
    returns what the backward starts from, (): the sums of its losses times the factors of the step. Else hidden states.

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
    ) -> None:
        super().__init__(auto_prefix=False)
        self._record = record
        self._borders = Borders()
        self._setting = Setting(kernels, self._borders, positions, model.config.rms_norm_eps)
        self._layers: list[tuple[int, bool]] = []
        self._first, self._last = isinstance(units[0], Embedding), units[-1] is model.units[-1]
        self.start_step((1.0,) * len(model.losses))
        self.model = nn.Cell(auto_prefix=False)
        self.model.layers = Layers(auto_prefix=False)
        for unit in units:
            layer = unit.part if isinstance(unit, LayerUnit) else None
            further = unit if isinstance(unit, MultiTokenPrediction) else None
            if further:
                layer = further.layer
            if layer is not None:
                prefix = layer.weights[0].name.removesuffix("input_layernorm.weight")
                number = prefix.removesuffix(".").rpartition(".")[2]
                self.model.layers.insert_child_to_cell(number, Layer(prefix, layer, self._setting, further))
                self._layers.append((int(number), further is not None))
        self._add_owners({weight.name: weight for unit in units for weight in unit.weights}, value)
        self._tied = self._last and not hasattr(self, HEAD)

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
            parent.insert_child_to_cell(last, self._owner(module, of_module, value))

    def _owner(self, module: str, weights: Sequence[Weight], value: Value) -> Owner:
        values = {weight.name.rpartition(".")[2]: value(weight) for weight in weights}
        arguments = self._setting.kernels, self._borders, values
        if module == EMBEDDING:
            return Table(*arguments)
        if module == HEAD:
            return Logits(*arguments)
        if module.endswith("norm"):
            return Norm(*arguments)
        if module.endswith(".experts"):
            return ExpertMatrices(*arguments)
        if any(weight.tp_dim == 1 for weight in weights):
            return RowLinear(*arguments)
        fixed = frozenset(weight.name.rpartition(".")[2] for weight in weights if not weight.trainable)
        return Linear(*arguments, fixed)

    def split_over(self, mesh: Any) -> None:
        """Say over which ranks tensor parallelism is about to split weights."""
        self._borders.mesh = mesh

    def start_step(self, loss_factors: Sequence[float]) -> None:
        """Of the micro-batches that follow, each loss is multiplied by its factor.

        No input of theirs, as fully_shard rounds floating-point inputs to the type of weights.
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
        further_TH = None
        for number, predicts_further in self._layers:
            layer = self.model.layers[number]
            if predicts_further:
                assert batch.ahead is not None
                x_TH = self._normed(x_TH)
                further_TH = layer(x_TH, batch, self._embedded(batch.ahead))
            else:
                x_TH = layer(x_TH, batch)
        if not self._last:
            return x_TH
        states = [self._normed(x_TH)] if further_TH is None else [x_TH, further_TH]
        return self._loss(states, batch)

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
            logits_NV = local(self._logits(x_TH))
            found = self._setting.kernels.cross_entropy_sum(logits_NV, of.labels, of.loss_mask)
            self.sums[place] += found.asnumpy()
            weighted = found * Tensor(np.array(self._loss_factors[place]), found.dtype)
            total = weighted if total is None else total + weighted
        assert total is not None
        return total

    def _logits(self, x_TH: Tensor) -> Tensor:
        if self._tied:
            return self._setting.kernels.linear(x_TH, self.model.embed_tokens.own("weight"))
        return self.lm_head(self._borders.tokens(x_TH))
