"""Qwen3 as published: grouped-query attention with normalised queries and keys, rotary positions, SwiGLU; or experts.

Yang et al., "Qwen3 Technical Report", 2025. Weights have the names and layouts of Hugging Face checkpoints.
Shape suffixes as in `layers`, and K key/value heads, D head size.
"""

from __future__ import annotations

from mindspore import Tensor

from parallel_trainer.batch import MicroBatch
from parallel_trainer.costs import Costs, OnRank
from parallel_trainer.kernels.interface import Kernels
from parallel_trainer.models.initial import HUGGING_FACE, InitialStd
from parallel_trainer.models.layers import (
    Declare,
    DecoderLayer,
    Embedding,
    Head,
    LayerUnit,
    Model,
    RotaryTables,
    feed_forward,
    tables,
)
from parallel_trainer.models.qwen3_config import Qwen3Config
from parallel_trainer.models.used import Used
from parallel_trainer.parallel.context_parallel import Attention, LocalAttention
from parallel_trainer.parallel.expert_parallel import ExpertParallel
from parallel_trainer.parallel.sequence import OF, Of
from parallel_trainer.parallel.tensor_parallel import TensorParallel
from parallel_trainer.parallel.weights import Weight


class Qwen3(Model):
    """A Qwen3 model, dense or with experts.

    A tied head declares the embedding's own `Weight`, so its gradient is the sum of the two uses.

    config:    sizes.
    kernels:   what is computed on a rank.
    attention: what layers call with the queries, keys and values of a rank's tokens; that of a rank that has whole
        sequences if left out.
    tp:        the ranks over which weights are split; one if left out.
    ep:        the ranks over which experts are; one if left out.
    initial_weights: the rule of `InitialStd.of`.
    """

    def __init__(
        self,
        config: Qwen3Config,
        kernels: Kernels,
        *,
        attention: Attention | None = None,
        tp: TensorParallel | None = None,
        ep: ExpertParallel | None = None,
        initial_weights: str = HUGGING_FACE,
    ) -> None:
        attention, tp = attention or LocalAttention(kernels), tp or TensorParallel.none(kernels)
        routing = config.routing
        ep = ep or ExpertParallel.none(kernels, config.expert_layers, routing.experts if routing else 0)
        std = InitialStd.of(
            initial_weights, initializer_range=config.initializer_range, layers=config.num_hidden_layers
        )
        embedding, head = tables(config, std)
        rotary_tables = RotaryTables(config, kernels, config.head_dim)

        def layer(number: int) -> LayerUnit:
            name = f"model.layers.{number}"
            declare = Declare(f"{name}.", std)
            attend = GroupedQueryAttention(declare, config, attention, rotary_tables)
            part = DecoderLayer(declare, config.hidden_size, attend, feed_forward(name, declare, config, ep))
            return LayerUnit(part, declare.prefix, tp, config.rms_norm_eps)

        super().__init__(
            config,
            (Embedding(embedding, tp), *map(layer, range(config.num_hidden_layers)), Head(head, config, tp)),
        )


class GroupedQueryAttention:
    """Attention whose key/value heads each serve several query heads, with normalised queries and keys."""

    name = "self_attn"

    def __init__(
        self, declare: Declare, config: Qwen3Config, attention: Attention, rotary_tables: RotaryTables
    ) -> None:
        self._config = config
        self.attention = attention
        self._rotary_tables = rotary_tables
        self._head_dim = head = config.head_dim
        hidden, bias = config.hidden_size, config.attention_bias
        heads, kv_heads = config.num_attention_heads * head, config.num_key_value_heads * head
        self.weights: tuple[Weight, ...] = (
            *declare.columns("self_attn.q_proj", heads, hidden, head, bias=bias),
            *declare.columns("self_attn.k_proj", kv_heads, hidden, head, bias=bias),
            *declare.columns("self_attn.v_proj", kv_heads, hidden, head, bias=bias),
            declare.norm("self_attn.q_norm", head),
            declare.norm("self_attn.k_norm", head),
            *declare.rows("self_attn.o_proj", hidden, heads, head, bias=bias),
        )

    def __call__(self, x_TH: Tensor, batch: MicroBatch, used: Used) -> Tensor:
        x_NH = used.tp.enter(x_TH)

        # Heads are what the weights hold, which may be a part of the model's.
        def made(of: Of) -> Tensor:
            heads = used.linear(x_NH, f"self_attn.{of}_proj").reshape(*batch.input_ids.shape, -1, self._head_dim)
            if of == "v":
                return heads
            normed = used.norm(heads, f"self_attn.{of}_norm")
            return used.tp.kernels.rotary(normed, self._rotary_tables[batch])

        # Queries may travel while keys are made, and keys while values are.
        q, k, v = (self.attention.bring(made(of), of) for of in OF)
        out_BSND = self.attention(q(), k(), v(), scale=self._head_dim**-0.5, mask=batch.mask)
        return used.row_linear(out_BSND.reshape(x_NH.shape[0], -1), "self_attn.o_proj")

    def costs(self, rank: OnRank) -> Costs:
        """Kept besides attention are what comes in, and queries and keys before their norms with its roots."""
        hidden, head = self._config.hidden_size, self._head_dim
        heads, kv_heads = rank.part(self._config.num_attention_heads), rank.part(self._config.num_key_value_heads)
        own = Costs(
            kept=rank.tokens * (hidden + (heads + kv_heads) * (head + 1)),
            left=rank.tokens * (2 * hidden + 2 * (heads + kv_heads) * head),
        )
        return rank.border(2 * hidden) + own + rank.attention(heads, kv_heads, head, head)
