"""A layer of a model as a module, around the layer's own parts.

What attention, experts and layers compute is written once, in `models`; here each of them is a module whose weights are
modules inside it, so that what HyperParallel does before and after a module's forward happens where its calls say.
Between modules are local tensors of the rank's tokens. Shape suffixes as in `models.layers`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from itertools import chain
from typing import Any

import numpy as np
from attrs import Factory, field, frozen
from mask_compression import CompressedMask
from mindspore import Tensor, nn

from parallel_trainer.batch import MicroBatch
from parallel_trainer.engines.hyperparallel.execute import walk
from parallel_trainer.engines.hyperparallel.modules import Borders, Identity, local
from parallel_trainer.kernels.interface import Kernels
from parallel_trainer.models.layers import DecoderLayer, Experts, FeedForward
from parallel_trainer.models.multi_token import MultiTokenPrediction
from parallel_trainer.models.used import AttentionPart, Part
from parallel_trainer.parallel.expert_parallel import Halves
from parallel_trainer.parallel.sequence import Of, Ranges
from parallel_trainer.parallel.tensor_parallel import TensorParallel


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
    one_rank:  for code that asks for a `TensorParallel`: here `shard_module`'s plans gather and scatter.
    """

    kernels: Kernels
    borders: Borders
    positions: Positions
    eps: float
    one_rank: TensorParallel = field(
        init=False, default=Factory(lambda setting: TensorParallel.none(setting.kernels), takes_self=True)
    )


@frozen(eq=False)
class UsedModules:
    """`models.used.Used` weights that are modules inside `root`, which has the name `prefix` in the layer."""

    root: nn.Cell
    prefix: str
    setting: Setting

    @property
    def tp(self) -> TensorParallel:
        """See `Used.tp`."""
        return self.setting.one_rank

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
        # Found anew each time, as wrappers take the place of what they wrap.
        return walk(self.root, name.removeprefix(self.prefix))


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
        part = copy(part)  # the model's own goes on to attend as it did
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
    """A layer as a module."""

    def __init__(self, layer: DecoderLayer, setting: Setting) -> None:
        super().__init__(auto_prefix=False)
        self._prefix = layer.weights[0].name.removesuffix("input_layernorm.weight")
        self._layer, self._setting = layer, setting
        self.self_attn = AttentionRegion(layer.attention, setting)
        self.mlp = Region(layer.feed_forward, setting)
        if isinstance(layer.feed_forward, Experts) and layer.feed_forward.shared:
            self.mlp.shared_experts = Region(layer.feed_forward.shared, setting)

    @property
    def number(self) -> str:
        """That of the layer in the whole model."""
        return self._prefix.split(".")[-2]

    @property
    def _used(self) -> UsedModules:
        return UsedModules(self, self._prefix, self._setting)

    def construct(self, x_TH: Tensor, batch: MicroBatch) -> Tensor:
        return self._layer(x_TH, batch, self._used)


class FurtherLayer(Layer):
    """The layer of a further prediction: of hidden states after the final norm, and the next tokens' embedding."""

    def __init__(self, unit: MultiTokenPrediction, setting: Setting) -> None:
        super().__init__(unit.layer, setting)
        self._further = unit.further

    def construct(self, x_TH: Tensor, batch: MicroBatch, next_TH: Tensor | None = None) -> Tensor:
        assert next_TH is not None
        return self._further(x_TH, next_TH, batch, self._used)
