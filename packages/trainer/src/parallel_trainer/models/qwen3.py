"""Qwen3 as published: grouped-query attention with normalised queries and keys, rotary positions, SwiGLU.

Yang et al., "Qwen3 Technical Report", 2025. Weights have the names and layouts of Hugging Face checkpoints.
Shape suffixes: B rows, S tokens, H hidden size, N query heads, K key/value heads, D head size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any
from weakref import WeakKeyDictionary

from mindspore import Tensor

from parallel_trainer.batch import MicroBatch
from parallel_trainer.kernels.interface import Kernels
from parallel_trainer.models.config import Qwen3Config
from parallel_trainer.models.unit import Unit
from parallel_trainer.parallel.context_parallel import Attention, LocalAttention
from parallel_trainer.parallel.tensor_parallel import TensorParallel
from parallel_trainer.parallel.weights import Constant, Normal, Weight


class Embedding(Unit):
    """Token ids (B, S) to hidden states (T, H) of the rank's T of B·S tokens."""

    def __init__(self, table: Weight, tp: TensorParallel) -> None:
        super().__init__([table])
        self._vocab_size = table.shape[0]
        self._tp = tp

    def construct(self, x: Tensor, batch: MicroBatch, *weights: Tensor) -> Tensor:
        return self._tp.embedding(x.reshape(-1), weights[0], self._vocab_size)


class RotaryTables:
    """The rotary angles of each micro-batch, computed once for all layers and dropped with it."""

    def __init__(self, config: Qwen3Config, kernels: Kernels) -> None:
        self._config = config
        self._kernels = kernels
        self._tables: WeakKeyDictionary[MicroBatch, Any] = WeakKeyDictionary()

    def __getitem__(self, batch: MicroBatch) -> Any:
        if batch not in self._tables:
            self._tables[batch] = self._kernels.rotary_table(
                batch.position_ids, head_dim=self._config.head_dim, theta=self._config.rope_theta
            )
        return self._tables[batch]


class DecoderBlock(Unit):
    """One layer, hidden states (T, H) to hidden states: attention and feed-forward, both residual.

    T are the rank's tokens between the two; inside, N = B·S tokens of all tensor-parallel ranks.
    """

    def __init__(
        self, layer: int, config: Qwen3Config, attention: Attention, tp: TensorParallel, rotary_tables: RotaryTables
    ) -> None:
        prefix = f"model.layers.{layer}."
        super().__init__(tuple(_block_weights(config, prefix)))
        self._names = tuple(weight.name.removeprefix(prefix) for weight in self.weights)
        self._attention = attention
        self._tp = tp
        self._kernels = tp.kernels
        self._rotary_tables = rotary_tables
        self._eps = config.rms_norm_eps
        self._head_dim = config.head_dim

    def construct(self, x: Tensor, batch: MicroBatch, *weights: Tensor) -> Tensor:
        named = dict(zip(self._names, weights, strict=True))
        x_TH = x + self._attend(self._norm(x, named, "input_layernorm"), batch, named)
        return x_TH + self._feed_forward(self._norm(x_TH, named, "post_attention_layernorm"), named)

    def _attend(self, x_TH: Tensor, batch: MicroBatch, named: Mapping[str, Tensor]) -> Tensor:
        x_NH = self._tp.enter(x_TH)
        # Heads are what the weights hold, which may be a part of the model's.
        q_BSND, k_BSKD, v_BSKD = (
            self._linear(x_NH, named, f"self_attn.{name}").reshape(*batch.input_ids.shape, -1, self._head_dim)
            for name in ("q_proj", "k_proj", "v_proj")
        )
        table = self._rotary_tables[batch]
        q_BSND = self._kernels.rotary(self._norm(q_BSND, named, "self_attn.q_norm"), table)
        k_BSKD = self._kernels.rotary(self._norm(k_BSKD, named, "self_attn.k_norm"), table)
        out_BSND = self._attention(q_BSND, k_BSKD, v_BSKD, scale=self._head_dim**-0.5, mask=batch.mask)
        return self._row_linear(out_BSND.reshape(x_NH.shape[0], -1), named, "self_attn.o_proj")

    def _feed_forward(self, x_TH: Tensor, named: Mapping[str, Tensor]) -> Tensor:
        x_NH = self._tp.enter(x_TH)
        gate, up = (self._linear(x_NH, named, f"mlp.{name}") for name in ("gate_proj", "up_proj"))
        return self._row_linear(self._kernels.swiglu(gate, up), named, "mlp.down_proj")

    def _row_linear(self, x: Tensor, named: Mapping[str, Tensor], name: str) -> Tensor:
        return self._tp.row_linear(x, named[f"{name}.weight"], named.get(f"{name}.bias"))

    def _linear(self, x: Tensor, named: Mapping[str, Tensor], name: str) -> Tensor:
        return self._kernels.linear(x, named[f"{name}.weight"], named.get(f"{name}.bias"))

    def _norm(self, x: Tensor, named: Mapping[str, Tensor], name: str) -> Tensor:
        return self._kernels.rms_norm(x, named[f"{name}.weight"], self._eps)


class Head(Unit):
    """Hidden states (T, H) to the loss summed over the tokens that count, or to logits (B, S, V).

    The loss has shape (1,); logits are what a micro-batch without labels gets.
    """

    def __init__(self, table: Weight, config: Qwen3Config, tp: TensorParallel) -> None:
        norm = Weight("model.norm.weight", (config.hidden_size,), init=Constant(1))
        super().__init__([norm, table])
        self._vocab_size = config.vocab_size
        self._tp = tp
        self._eps = config.rms_norm_eps

    def construct(self, x: Tensor, batch: MicroBatch, *weights: Tensor) -> Tensor:
        norm, table = weights
        x_NH = self._tp.enter(self._tp.kernels.rms_norm(x, norm, self._eps))
        logits_NV = self._tp.kernels.linear(x_NH, table)
        if batch.labels is None:
            return self._tp.whole_logits(logits_NV, self._vocab_size).reshape(*batch.input_ids.shape, -1)
        return self._tp.loss_sum(logits_NV, batch.labels, batch.loss_mask, self._vocab_size).reshape(1)


class Qwen3:
    """The units of a Qwen3 model in the order they run: the embedding, one block per layer, the head.

    A tied head declares the embedding's own `Weight`, so its gradient is the sum of the two uses.

    config:    sizes.
    kernels:   what is computed on a rank.
    attention: what blocks call with the queries, keys and values of a rank's tokens; that of a rank that has whole
        sequences if left out.
    tp:        the ranks over which weights are split; one if left out.
    """

    def __init__(
        self,
        config: Qwen3Config,
        kernels: Kernels,
        *,
        attention: Attention | None = None,
        tp: TensorParallel | None = None,
    ) -> None:
        attention, tp = attention or LocalAttention(kernels), tp or TensorParallel.none(kernels)
        table_shape = (config.vocab_size, config.hidden_size)
        normal = Normal(config.initializer_range)
        table = Weight("model.embed_tokens.weight", table_shape, init=normal, tp_dim=0)
        head = table if config.tie_word_embeddings else Weight("lm_head.weight", table_shape, init=normal, tp_dim=0)
        rotary_tables = RotaryTables(config, kernels)
        self.config = config
        self.units: tuple[Unit, ...] = (
            Embedding(table, tp),
            *(DecoderBlock(layer, config, attention, tp, rotary_tables) for layer in range(config.num_hidden_layers)),
            Head(head, config, tp),
        )

    @property
    def weights(self) -> tuple[Weight, ...]:
        """Every weight once, in the order of first use."""
        return tuple({weight.name: weight for unit in self.units for weight in unit.weights}.values())


def _block_weights(config: Qwen3Config, prefix: str) -> Iterator[Weight]:
    """Declare one block's weights; tensor parallelism splits outputs (dimension 0), then inputs (1), in whole heads."""
    hidden, inner, head = config.hidden_size, config.intermediate_size, config.head_dim
    heads, kv_heads = config.num_attention_heads * head, config.num_key_value_heads * head
    bias = config.attention_bias

    def norm(name: str, size: int) -> Weight:
        return Weight(f"{prefix}{name}.weight", (size,), init=Constant(1))

    def columns(name: str, outputs: int, block: int = 1, *, bias: bool = False) -> Iterator[Weight]:
        normal = Normal(config.initializer_range)
        yield Weight(f"{prefix}{name}.weight", (outputs, hidden), init=normal, tp_dim=0, tp_block=block)
        if bias:
            yield Weight(f"{prefix}{name}.bias", (outputs,), init=Constant(0), tp_dim=0, tp_block=block)

    def rows(name: str, inputs: int, block: int = 1, *, bias: bool = False) -> Iterator[Weight]:
        normal = Normal(config.initializer_range)
        yield Weight(f"{prefix}{name}.weight", (hidden, inputs), init=normal, tp_dim=1, tp_block=block)
        if bias:
            yield Weight(f"{prefix}{name}.bias", (hidden,), init=Constant(0))

    yield norm("input_layernorm", hidden)
    yield from columns("self_attn.q_proj", heads, head, bias=bias)
    yield from columns("self_attn.k_proj", kv_heads, head, bias=bias)
    yield from columns("self_attn.v_proj", kv_heads, head, bias=bias)
    yield norm("self_attn.q_norm", head)
    yield norm("self_attn.k_norm", head)
    yield from rows("self_attn.o_proj", heads, head, bias=bias)
    yield norm("post_attention_layernorm", hidden)
    yield from columns("mlp.gate_proj", inner)
    yield from columns("mlp.up_proj", inner)
    yield from rows("mlp.down_proj", inner)
