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
from parallel_trainer.parallel.weights import Constant, Normal, Weight


class Embedding(Unit):
    """Token ids (B, S) to hidden states (B, S, H)."""

    def __init__(self, table: Weight, kernels: Kernels) -> None:
        super().__init__([table])
        self._kernels = kernels

    def construct(self, x: Tensor, batch: MicroBatch, *weights: Tensor) -> Tensor:
        return self._kernels.embedding(x, *weights)


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
    """One layer, hidden states (B, S, H) to hidden states: attention and feed-forward, both residual."""

    def __init__(
        self, layer: int, config: Qwen3Config, kernels: Kernels, attention: Attention, rotary_tables: RotaryTables
    ) -> None:
        prefix = f"model.layers.{layer}."
        super().__init__(tuple(_block_weights(config, prefix)))
        self._names = tuple(weight.name.removeprefix(prefix) for weight in self.weights)
        self._kernels = kernels
        self._attention = attention
        self._rotary_tables = rotary_tables
        self._eps = config.rms_norm_eps
        self._head_dim = config.head_dim

    def construct(self, x: Tensor, batch: MicroBatch, *weights: Tensor) -> Tensor:
        named = dict(zip(self._names, weights, strict=True))
        x_BSH = x + self._attend(self._norm(x, named, "input_layernorm"), batch, named)
        return x_BSH + self._feed_forward(self._norm(x_BSH, named, "post_attention_layernorm"), named)

    def _attend(self, x_BSH: Tensor, batch: MicroBatch, named: Mapping[str, Tensor]) -> Tensor:
        rows, tokens, _ = x_BSH.shape
        # Heads are what the weights hold, which may be a part of the model's.
        q_BSND, k_BSKD, v_BSKD = (
            self._linear(x_BSH, named, f"self_attn.{name}").reshape(rows, tokens, -1, self._head_dim)
            for name in ("q_proj", "k_proj", "v_proj")
        )
        table = self._rotary_tables[batch]
        q_BSND = self._kernels.rotary(self._norm(q_BSND, named, "self_attn.q_norm"), table)
        k_BSKD = self._kernels.rotary(self._norm(k_BSKD, named, "self_attn.k_norm"), table)
        out_BSND = self._attention(q_BSND, k_BSKD, v_BSKD, scale=self._head_dim**-0.5, mask=batch.mask)
        return self._linear(out_BSND.reshape(rows, tokens, -1), named, "self_attn.o_proj")

    def _feed_forward(self, x_BSH: Tensor, named: Mapping[str, Tensor]) -> Tensor:
        gate, up = (self._linear(x_BSH, named, f"mlp.{name}") for name in ("gate_proj", "up_proj"))
        return self._linear(self._kernels.swiglu(gate, up), named, "mlp.down_proj")

    def _linear(self, x: Tensor, named: Mapping[str, Tensor], name: str) -> Tensor:
        return self._kernels.linear(x, named[f"{name}.weight"], named.get(f"{name}.bias"))

    def _norm(self, x: Tensor, named: Mapping[str, Tensor], name: str) -> Tensor:
        return self._kernels.rms_norm(x, named[f"{name}.weight"], self._eps)


class Head(Unit):
    """Hidden states (B, S, H) to the loss summed over the tokens that count, or to logits (B, S, V).

    The loss has shape (); logits are what a micro-batch without labels gets.
    """

    def __init__(self, table: Weight, config: Qwen3Config, kernels: Kernels) -> None:
        norm = Weight("model.norm.weight", (config.hidden_size,), init=Constant(1))
        super().__init__([norm, table])
        self._kernels = kernels
        self._eps = config.rms_norm_eps

    def construct(self, x: Tensor, batch: MicroBatch, *weights: Tensor) -> Tensor:
        norm, table = weights
        logits_BSV = self._kernels.linear(self._kernels.rms_norm(x, norm, self._eps), table)
        if batch.labels is None:
            return logits_BSV
        return self._kernels.cross_entropy_sum(logits_BSV, batch.labels, batch.loss_mask)


class Qwen3:
    """The units of a Qwen3 model in the order they run: the embedding, one block per layer, the head.

    A tied head declares the embedding's own `Weight`, so its gradient is the sum of the two uses.
    """

    def __init__(self, config: Qwen3Config, kernels: Kernels, attention: Attention | None = None) -> None:
        """`attention`: what blocks call with the queries, keys and values of a rank's tokens; that of a rank that has
        whole sequences if left out."""
        attention = attention or LocalAttention(kernels)
        table_shape = (config.vocab_size, config.hidden_size)
        normal = Normal(config.initializer_range)
        table = Weight("model.embed_tokens.weight", table_shape, init=normal, tp_dim=0)
        head = table if config.tie_word_embeddings else Weight("lm_head.weight", table_shape, init=normal, tp_dim=0)
        rotary_tables = RotaryTables(config, kernels)
        self.config = config
        self.units: tuple[Unit, ...] = (
            Embedding(table, kernels),
            *(
                DecoderBlock(layer, config, kernels, attention, rotary_tables)
                for layer in range(config.num_hidden_layers)
            ),
            Head(head, config, kernels),
        )

    @property
    def weights(self) -> tuple[Weight, ...]:
        """Every weight once, in the order of first use."""
        return tuple({weight.name: weight for unit in self.units for weight in unit.weights}.values())


def _block_weights(config: Qwen3Config, prefix: str) -> Iterator[Weight]:
    """Declare one block's weights; tensor parallelism splits outputs (dimension 0), then inputs (1)."""
    hidden, inner, head = config.hidden_size, config.intermediate_size, config.head_dim
    heads, kv_heads = config.num_attention_heads * head, config.num_key_value_heads * head

    def norm(name: str, size: int) -> Weight:
        return Weight(f"{prefix}{name}.weight", (size,), init=Constant(1))

    def linear(name: str, outputs: int, inputs: int, *, tp_dim: int, bias: bool = False) -> Iterator[Weight]:
        yield Weight(f"{prefix}{name}.weight", (outputs, inputs), init=Normal(config.initializer_range), tp_dim=tp_dim)
        if bias:
            yield Weight(f"{prefix}{name}.bias", (outputs,), init=Constant(0), tp_dim=0 if tp_dim == 0 else None)

    yield norm("input_layernorm", hidden)
    yield from linear("self_attn.q_proj", heads, hidden, tp_dim=0, bias=config.attention_bias)
    yield from linear("self_attn.k_proj", kv_heads, hidden, tp_dim=0, bias=config.attention_bias)
    yield from linear("self_attn.v_proj", kv_heads, hidden, tp_dim=0, bias=config.attention_bias)
    yield norm("self_attn.q_norm", head)
    yield norm("self_attn.k_norm", head)
    yield from linear("self_attn.o_proj", hidden, heads, tp_dim=1, bias=config.attention_bias)
    yield norm("post_attention_layernorm", hidden)
    yield from linear("mlp.gate_proj", inner, hidden, tp_dim=0)
    yield from linear("mlp.up_proj", inner, hidden, tp_dim=0)
    yield from linear("mlp.down_proj", hidden, inner, tp_dim=1)
