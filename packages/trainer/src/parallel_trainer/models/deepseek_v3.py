"""DeepSeek-V3 as published: latent attention, experts with a bias that balances them, predictions one token further.

DeepSeek-AI, arXiv:2412.19437. Weights have the names and layouts of Hugging Face checkpoints, the experts of a layer
stacked as transformers 5 stacks them. Shape suffixes as in `layers`, and D head size, R its rotary part, C a latent.
"""

from __future__ import annotations

from mindspore import Tensor

from parallel_trainer.batch import MicroBatch
from parallel_trainer.costs import Costs, OnRank
from parallel_trainer.kernels.interface import Kernels
from parallel_trainer.models.deepseek_v3_config import DeepseekV3Config
from parallel_trainer.models.initial import HUGGING_FACE, InitialStd
from parallel_trainer.models.layers import (
    Declare,
    DecoderLayer,
    Embedding,
    Experts,
    Head,
    LayerUnit,
    Model,
    RotaryTables,
    feed_forward,
    tables,
)
from parallel_trainer.models.multi_token import MultiTokenHead, MultiTokenPrediction
from parallel_trainer.models.unit import Unit
from parallel_trainer.models.used import Used
from parallel_trainer.parallel.context_parallel import Attention, LocalAttention
from parallel_trainer.parallel.expert_parallel import ExpertParallel
from parallel_trainer.parallel.tensor_parallel import TensorParallel
from parallel_trainer.parallel.weights import Weight

# The norms of latents have it whatever rms_norm_eps is, in DeepSeek's model code and in transformers.
_LATENT_EPS = 1e-6


class DeepseekV3(Model):
    """A DeepSeek-V3 model; its arguments are those of `Qwen3`.

    With num_nextn_predict_layers 1 the last unit but one is the module that predicts further ahead, and the losses are
    two, of which the second is weighted with mtp_loss_scaling_factor.
    """

    def __init__(
        self,
        config: DeepseekV3Config,
        kernels: Kernels,
        *,
        attention: Attention | None = None,
        tp: TensorParallel | None = None,
        ep: ExpertParallel | None = None,
        initial_weights: str = HUGGING_FACE,
    ) -> None:
        attention, tp = attention or LocalAttention(kernels), tp or TensorParallel.none(kernels)
        ep = ep or ExpertParallel.none(kernels, config.expert_layers, config.routing.experts)
        std = InitialStd.of(
            initial_weights, initializer_range=config.initializer_range, layers=config.num_hidden_layers
        )
        embedding, head = tables(config, std)
        rotary_tables = RotaryTables(config, kernels, config.qk_rope_head_dim)
        biases: dict[str, Weight] = {}

        def layer(name: str) -> DecoderLayer:
            declare = Declare(f"{name}.", std)
            attend = LatentAttention(declare, config, attention, rotary_tables)
            part = feed_forward(name, declare, config, ep)
            if isinstance(part, Experts) and part.bias:
                biases[name] = part.bias
            return DecoderLayer(declare, config.hidden_size, attend, part)

        names = [f"model.layers.{number}" for number in range(config.num_hidden_layers + 1)]
        units: list[Unit] = [Embedding(embedding, tp)]
        units += [LayerUnit(layer(name), f"{name}.", tp, config.rms_norm_eps) for name in names[:-1]]
        further = config.num_nextn_predict_layers > 0
        if further:
            declare = Declare(f"{names[-1]}.", std)
            units.append(MultiTokenPrediction(layer(names[-1]), declare, embedding, config, tp))
        units.append((MultiTokenHead if further else Head)(head, config, tp))
        super().__init__(
            config,
            units,
            losses=("lm", "mtp") if further else ("lm",),
            loss_weights=(1.0, config.mtp_loss_scaling_factor) if further else (1.0,),
            expert_biases=biases,
            bias_update_rate=config.moe_router_bias_update_rate,
        )


class LatentAttention:
    """Attention whose queries, keys and values are made from small latents, and whose keys share one rotary part.

    Section 2.1.1. Under tensor parallelism each rank makes the latents of its own tokens, and latents are what is
    gathered: they are smaller than hidden states.
    """

    name = "self_attn"

    def __init__(
        self, declare: Declare, config: DeepseekV3Config, attention: Attention, rotary_tables: RotaryTables
    ) -> None:
        self._config = config
        self.attention = attention
        self._rotary_tables = rotary_tables
        hidden, heads, bias = config.hidden_size, config.num_attention_heads, config.attention_bias
        self._qk_size = qk_size = config.qk_nope_head_dim + config.qk_rope_head_dim
        kv_size, rank, kv_rank = config.qk_nope_head_dim + config.v_head_dim, config.q_lora_rank, config.kv_lora_rank
        queries: tuple[Weight, ...] = (*declare.columns("self_attn.q_proj", heads * qk_size, hidden, qk_size),)
        if rank is not None:
            queries = (
                *declare.whole("self_attn.q_a_proj", rank, hidden, bias=bias),
                declare.norm("self_attn.q_a_layernorm", rank),
                *declare.columns("self_attn.q_b_proj", heads * qk_size, rank, qk_size),
            )
        self.weights: tuple[Weight, ...] = (
            *queries,
            *declare.whole("self_attn.kv_a_proj_with_mqa", kv_rank + config.qk_rope_head_dim, hidden, bias=bias),
            declare.norm("self_attn.kv_a_layernorm", kv_rank),
            *declare.columns("self_attn.kv_b_proj", heads * kv_size, kv_rank, kv_size),
            *declare.rows("self_attn.o_proj", hidden, heads * config.v_head_dim, config.v_head_dim, bias=bias),
        )

    def __call__(self, x_TH: Tensor, batch: MicroBatch, used: Used) -> Tensor:
        config, kernels = self._config, used.tp.kernels
        q_NC, kv_NC, k_NR = self._latents(x_TH, used)
        queries = "self_attn.q_proj" if config.q_lora_rank is None else "self_attn.q_b_proj"
        rows = batch.input_ids.shape
        table, interleaved = self._rotary_tables[batch], config.rope_interleave
        q_BSND = used.linear(q_NC, queries).reshape(*rows, -1, self._qk_size)
        q = self.attention.bring(kernels.rotary(q_BSND, table, interleaved=interleaved), "q")
        kv_BSND = used.linear(kv_NC, "self_attn.kv_b_proj").reshape(
            *rows, -1, config.qk_nope_head_dim + config.v_head_dim
        )
        k_BSND, v_BSND = kernels.split(kv_BSND, (config.qk_nope_head_dim, config.v_head_dim))
        v = self.attention.bring(v_BSND, "v")
        k_BS1R = kernels.rotary(k_NR.reshape(*rows, 1, -1), table, interleaved=interleaved)
        k = self.attention.bring(kernels.concat(k_BSND, k_BS1R), "k")
        out_BSND = self.attention(q(), k(), v(), scale=config.softmax_scale, mask=batch.mask)
        return used.row_linear(out_BSND.reshape(q_NC.shape[0], -1), "self_attn.o_proj")

    def costs(self, rank: OnRank) -> Costs:
        """Kept besides attention are what comes in, latents before their norms with its roots, and those gathered."""
        config = self._config
        heads, hidden, low_rank = rank.part(config.num_attention_heads), config.hidden_size, config.q_lora_rank or 0
        to_queries, to_keys = low_rank or hidden, config.kv_lora_rank
        kv_size, v_size = config.qk_nope_head_dim + config.v_head_dim, config.v_head_dim
        norms = to_keys + 1 + (low_rank + 1 if low_rank else 0)
        left_by_latents = hidden + low_rank + to_keys + config.qk_rope_head_dim
        left_by_heads = to_queries + to_keys + heads * (self._qk_size + kv_size + v_size) + hidden
        own = Costs(
            kept=rank.own_tokens * (hidden + norms) + rank.tokens * (to_queries + to_keys),
            left=rank.own_tokens * left_by_latents + rank.tokens * left_by_heads,
        )
        border = rank.border(to_queries + to_keys + config.qk_rope_head_dim + hidden)
        return border + own + rank.attention(heads, heads, self._qk_size, v_size)

    def _latents(self, x_TH: Tensor, used: Used) -> tuple[Tensor, Tensor, Tensor]:
        """Of all N tokens what queries, keys and values are made from, and the rotary part of keys: one gather.

        Without a low rank queries are made from hidden states, which are then gathered too.
        """
        config, kernels = self._config, used.tp.kernels
        sizes = (config.kv_lora_rank, config.qk_rope_head_dim)
        kv_TC, k_TR = kernels.split(used.linear(x_TH, "self_attn.kv_a_proj_with_mqa"), sizes)
        q_TC = x_TH
        if config.q_lora_rank is not None:
            q_TC = used.norm(used.linear(x_TH, "self_attn.q_a_proj"), "self_attn.q_a_layernorm", eps=_LATENT_EPS)
        latents = kernels.concat(q_TC, used.norm(kv_TC, "self_attn.kv_a_layernorm", eps=_LATENT_EPS), k_TR)
        q_NC, kv_NC, k_NR = kernels.split(used.tp.enter(latents), (q_TC.shape[-1], *sizes))
        return q_NC, kv_NC, k_NR
