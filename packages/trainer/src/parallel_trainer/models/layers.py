"""What models are put together from: embedding, layers of attention and feed-forward parts, experts, head.

A layer consists of parts. A part declares weights, and is called with the hidden states of the rank's tokens and with
`Used` weights (`used.py`). Shape suffixes: B rows, S tokens of a row; T the rank's tokens between regions of split
weights, N = B·S those of all tensor-parallel ranks; H hidden size, V vocabulary, E experts, K experts of a token.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any
from weakref import WeakValueDictionary

import numpy as np
from attrs import frozen
from mindspore import Tensor

from parallel_trainer.batch import MicroBatch
from parallel_trainer.costs import Costs, OnRank
from parallel_trainer.kernels.interface import Kernels
from parallel_trainer.models.initial import InitialStd
from parallel_trainer.models.rope import frequencies
from parallel_trainer.models.router import Routing
from parallel_trainer.models.section import ModelConfig
from parallel_trainer.models.unit import Unit
from parallel_trainer.models.used import AttentionPart, Used, UsedTensors
from parallel_trainer.parallel.expert_parallel import ExpertParallel, Halves
from parallel_trainer.parallel.tensor_parallel import TensorParallel
from parallel_trainer.parallel.weights import Constant, Normal, Weight


@frozen
class Declare:
    """Weights of a layer: `prefix` of their names, and the standard deviations that matrices start with."""

    prefix: str
    std: InitialStd

    def norm(self, name: str, size: int) -> Weight:
        """What a norm multiplies by."""
        return Weight(f"{self.prefix}{name}.weight", (size,), init=Constant(1))

    def whole(
        self, name: str, outputs: int, inputs: int, *, bias: bool = False, narrow: bool = True
    ) -> Iterator[Weight]:
        """A matrix that every tensor-parallel rank holds, (outputs, inputs)."""
        yield Weight(f"{self.prefix}{name}.weight", (outputs, inputs), init=Normal(self.std.matrix), narrow=narrow)
        if bias:
            yield Weight(f"{self.prefix}{name}.bias", (outputs,), init=Constant(0))

    def columns(self, name: str, outputs: int, inputs: int, block: int = 1, *, bias: bool = False) -> Iterator[Weight]:
        """A matrix whose outputs tensor parallelism splits, in whole blocks (heads)."""
        init = Normal(self.std.matrix)
        yield Weight(f"{self.prefix}{name}.weight", (outputs, inputs), init=init, tp_dim=0, tp_block=block)
        if bias:
            yield Weight(f"{self.prefix}{name}.bias", (outputs,), init=Constant(0), tp_dim=0, tp_block=block)

    def rows(self, name: str, outputs: int, inputs: int, block: int = 1, *, bias: bool = False) -> Iterator[Weight]:
        """A matrix whose inputs tensor parallelism splits and whose product is added to hidden states; its bias is
        added once, to the sum over ranks."""
        init = Normal(self.std.output)
        yield Weight(f"{self.prefix}{name}.weight", (outputs, inputs), init=init, tp_dim=1, tp_block=block)
        if bias:
            yield Weight(f"{self.prefix}{name}.bias", (outputs,), init=Constant(0))

    def experts(self, name: str, experts: int, outputs: int, inputs: int, std: float) -> Weight:
        """One matrix for each expert, (experts, outputs, inputs), in whole experts over the expert-parallel ranks."""
        return Weight(f"{self.prefix}{name}", (experts, outputs, inputs), init=Normal(std), ep_dim=0)


class RotaryTables:
    """Rotary angles, computed once for all layers and micro-batches with the same positions.

    Those used last are kept, others as long as a micro-batch that uses them is under way. They turn `size` dimensions
    of a head, with the configuration's rope_theta and YaRN.
    """

    def __init__(self, config: ModelConfig, kernels: Kernels, size: int) -> None:
        self._kernels = kernels
        self._frequencies = frequencies(size, config.rope_theta, config.yarn)
        self._scale = 1.0 if config.yarn is None else config.yarn.table_scale
        self._tables: WeakValueDictionary[tuple[tuple[int, ...], bytes], Any] = WeakValueDictionary()
        self._last: Any = None

    def __getitem__(self, batch: MicroBatch) -> Any:
        positions = batch.position_ids
        key = positions.shape, positions.tobytes()
        table = self._tables.get(key)
        if table is None:
            table = self._kernels.rotary_table(positions, self._frequencies, scale=self._scale)
            self._tables[key] = table
        self._last = table
        return table


@frozen(eq=False)
class FeedForward:
    """SwiGLU with the matrices `name`.gate_proj, up_proj and down_proj; `inner` features between them."""

    name: str
    weights: tuple[Weight, ...]
    hidden: int
    inner: int

    @classmethod
    def declare(cls, declare: Declare, hidden: int, inner: int, name: str = "mlp") -> FeedForward:
        """With `inner` features between the matrices."""
        matrices = (
            *declare.columns(f"{name}.gate_proj", inner, hidden),
            *declare.columns(f"{name}.up_proj", inner, hidden),
            *declare.rows(f"{name}.down_proj", hidden, inner),
        )
        return cls(name, matrices, hidden, inner)

    def __call__(self, x_TH: Tensor, batch: MicroBatch, used: Used) -> Tensor:
        first, second = self.halves(used)
        return second(first(x_TH))

    def halves(self, used: Used) -> Halves:
        """The way to what is between the matrices, and on from there."""

        def first(x_TH: Tensor) -> Tensor:
            x_NH = used.tp.enter(x_TH)
            gate, up = (used.linear(x_NH, f"{self.name}.{matrix}") for matrix in ("gate_proj", "up_proj"))
            return used.tp.kernels.swiglu(gate, up)

        def second(inner_NI: Tensor) -> Tensor:
            return used.row_linear(inner_NI, f"{self.name}.down_proj")

        return first, second

    def costs(self, rank: OnRank) -> Costs:
        """Kept are what comes in, gate, up, its sigmoid and the product."""
        inner = rank.part(self.inner)
        return rank.border(2 * self.hidden) + Costs(
            kept=rank.tokens * (self.hidden + 4 * inner), left=rank.tokens * (2 * self.hidden + 3 * inner)
        )


class Experts:
    """Feed-forward parts of which each token uses a few, and one that all tokens use if there is one.

    layer:  the layer's name, "model.layers.3", for whoever counts loads.
    shared: what all tokens use; None for nothing.
    bias:   along which experts are chosen besides their scores; the training step changes it.
    """

    name = "mlp"

    def __init__(self, layer: str, declare: Declare, hidden: int, routing: Routing, ep: ExpertParallel) -> None:
        self.layer = layer
        self._hidden = hidden
        self._routing = routing
        self._ep = ep
        self.shared = (
            FeedForward.declare(declare, hidden, routing.shared, "mlp.shared_experts") if routing.shared else None
        )
        self.bias = (
            Weight(
                f"{layer}.mlp.gate.e_score_correction_bias",
                (routing.experts,),
                init=Constant(0),
                trainable=False,
                narrow=False,
            )
            if routing.bias
            else None
        )
        self.weights: tuple[Weight, ...] = (
            *declare.whole("mlp.gate", routing.experts, hidden, narrow=False),
            *((self.bias,) if self.bias else ()),
            declare.experts("mlp.experts.gate_up_proj", routing.experts, 2 * routing.inner, hidden, declare.std.matrix),
            declare.experts("mlp.experts.down_proj", routing.experts, hidden, routing.inner, declare.std.output),
            *(self.shared.weights if self.shared else ()),
        )

    def __call__(self, x_TH: Tensor, batch: MicroBatch, used: Used) -> Tensor:
        ids_TK, weights_TK = self._route(x_TH, batch, used)
        return self._ep.experts(
            self.layer,
            x_TH,
            ids_TK,
            weights_TK,
            partial(used.grouped_mlp, name="mlp.experts"),
            beside=used.halves(self.shared) if self.shared else None,
        )

    def _route(self, x_TH: Tensor, batch: MicroBatch, used: Used) -> tuple[np.ndarray, Tensor]:
        """The experts of each token, int64 (T, K), and their weights."""
        kernels, routing = used.tp.kernels, self._routing
        logits_TE = used.linear(x_TH, "mlp.gate")
        ids_TK = kernels.choose_experts(
            logits_TE,
            top_k=routing.top_k,
            bias=used["mlp.gate.e_score_correction_bias"] if self.bias else None,
            groups=routing.groups,
            topk_group=routing.topk_group,
        )
        weights_TK, probabilities_TE = kernels.router_weights(
            logits_TE, ids_TK, scoring=routing.scoring, normalized=routing.normalized, scaling=routing.scaling
        )
        if routing.balance:
            weights_TK = self._ep.balanced(self.layer, weights_TK, probabilities_TE, batch, routing)
        return ids_TK, weights_TK

    def costs(self, rank: OnRank) -> Costs:
        """Of the router are kept what comes in, scores and their sums, the chosen experts, and their weights twice."""
        routing, sigmoid = self._routing, self._routing.scoring == "sigmoid"
        of_experts = routing.experts * (1 + sigmoid + bool(routing.balance))
        of_chosen = routing.top_k * (2 + 8 // rank.itemsize)
        scores = of_experts + of_chosen + sigmoid + routing.normalized
        found = rank.experts(self._hidden, routing) + Costs(
            kept=rank.own_tokens * (self._hidden + scores), left=rank.own_tokens * (self._hidden + routing.experts)
        )
        if routing.balance:
            found += rank.balance(routing)
        if self.shared:
            found += self.shared.costs(rank)
            if rank.plan.tp == 1:  # nothing is gathered: router and shared expert keep the same array
                found += Costs(kept=-rank.tokens * self._hidden, left=-rank.tokens * self._hidden)
        return found


def feed_forward(name: str, declare: Declare, config: ModelConfig, ep: ExpertParallel) -> FeedForward | Experts:
    """The feed-forward part of the layer called `name`: experts where the configuration has them, else a dense one."""
    if config.routing and name in config.expert_layers:
        return Experts(name, declare, config.hidden_size, config.routing, ep)
    return FeedForward.declare(declare, config.hidden_size, config.intermediate_size)


class DecoderLayer:
    """Attention and a feed-forward part, each normed before and added to what came in."""

    def __init__(
        self, declare: Declare, hidden: int, attention: AttentionPart, feed_forward: FeedForward | Experts
    ) -> None:
        self._hidden = hidden
        self.attention = attention
        self.feed_forward = feed_forward
        self.weights: tuple[Weight, ...] = (
            declare.norm("input_layernorm", hidden),
            *attention.weights,
            declare.norm("post_attention_layernorm", hidden),
            *feed_forward.weights,
        )

    def __call__(self, x_TH: Tensor, batch: MicroBatch, used: Used) -> Tensor:
        x_TH = x_TH + used.run(self.attention, used.norm(x_TH, "input_layernorm"), batch)
        return x_TH + used.run(self.feed_forward, used.norm(x_TH, "post_attention_layernorm"), batch)

    def costs(self, rank: OnRank) -> Costs:
        """Those of its parts, and of both norms what comes in and a root mean square for each token."""
        norms = Costs(kept=2 * (self._hidden + 1) * rank.own_tokens)
        return norms + self.attention.costs(rank) + self.feed_forward.costs(rank)


class LayerUnit(Unit):
    """A unit around a layer: hidden states (T, H) in and out."""

    def __init__(self, part: DecoderLayer, prefix: str, tp: TensorParallel, eps: float) -> None:
        super().__init__(part.weights)
        self.part = part
        self._names = tuple(weight.name.removeprefix(prefix) for weight in part.weights)
        self._tp = tp
        self._eps = eps

    def construct(self, x: Tensor, batch: MicroBatch, *weights: Tensor) -> Tensor:
        return self.part(x, batch, UsedTensors(dict(zip(self._names, weights, strict=True)), self._tp, self._eps))

    def costs(self, rank: OnRank) -> Costs:
        return self.part.costs(rank)


class Embedding(Unit):
    """Token ids (B, S) to hidden states (T, H) of the rank's T of B·S tokens."""

    def __init__(self, table: Weight, tp: TensorParallel) -> None:
        super().__init__([table])
        self._vocab_size, self._hidden = table.shape
        self._tp = tp

    def construct(self, x: Tensor, batch: MicroBatch, *weights: Tensor) -> Tensor:
        return self._tp.embedding(x.reshape(-1), weights[0], self._vocab_size)

    def costs(self, rank: OnRank) -> Costs:
        return rank.border(self._hidden)


class Head(Unit):
    """Hidden states (T, H) to the loss summed over the tokens that count, (1,), or to logits (B, S, V).

    Logits are what a micro-batch without labels gets.
    """

    def __init__(self, table: Weight, config: ModelConfig, tp: TensorParallel) -> None:
        super().__init__([final_norm(config), table])
        self._tp = tp
        self._eps = config.rms_norm_eps

    def construct(self, x: Tensor, batch: MicroBatch, *weights: Tensor) -> Tensor:
        norm, table = weights
        return predict(self._tp.kernels.rms_norm(x, norm, self._eps), table, batch, self.weights[-1].shape[0], self._tp)

    def costs(self, rank: OnRank) -> Costs:
        """Those of the prediction, and of the norm what comes in and a root mean square for each token."""
        vocab_size, hidden = self.weights[-1].shape
        return rank.prediction(hidden, vocab_size) + Costs(kept=(hidden + 1) * rank.own_tokens)


def predict(x_TH: Tensor, table: Tensor, batch: MicroBatch, vocab_size: int, tp: TensorParallel) -> Tensor:
    """Normed hidden states and an output table, whose rows are split, to the loss sum (1,) or logits (B, S, V)."""
    logits_NV = tp.kernels.linear(tp.enter(x_TH), table)
    if batch.labels is None:
        return tp.whole_logits(logits_NV, vocab_size).reshape(*batch.input_ids.shape, -1)
    return tp.loss_sum(logits_NV, batch.labels, batch.loss_mask, vocab_size).reshape(1)


def final_norm(config: ModelConfig) -> Weight:
    """The norm after the last layer."""
    return Weight("model.norm.weight", (config.hidden_size,), init=Constant(1))


def tables(config: ModelConfig, std: InitialStd) -> tuple[Weight, Weight]:
    """The embedding's table and the head's, which is the same `Weight` where they are tied."""
    shape, init = (config.vocab_size, config.hidden_size), Normal(std.matrix)
    table = Weight("model.embed_tokens.weight", shape, init=init, tp_dim=0)
    return table, table if config.tie_word_embeddings else Weight("lm_head.weight", shape, init=init, tp_dim=0)


class Model:
    """The units of a model in the order they run: the embedding, one for each layer, the head.

    losses:        what the last unit's loss sums, (len(losses),), are called.
    loss_weights:  what each mean loss is multiplied by in the sum that is trained on.
    expert_biases: by the layer's name the bias of its router, which the training step moves by `bias_update_rate`.
    """

    def __init__(
        self,
        config: ModelConfig,
        units: Sequence[Unit],
        *,
        losses: tuple[str, ...] = ("lm",),
        loss_weights: tuple[float, ...] = (1.0,),
        expert_biases: Mapping[str, Weight] | None = None,
        bias_update_rate: float = 0.0,
    ) -> None:
        self.config = config
        self.units = tuple(units)
        self.losses = losses
        self.loss_weights = loss_weights
        self.expert_biases = dict(expert_biases or {})
        self.bias_update_rate = bias_update_rate

    @property
    def weights(self) -> tuple[Weight, ...]:
        """Every weight once, in the order of first use."""
        return tuple({weight.name: weight for unit in self.units for weight in unit.weights}.values())
