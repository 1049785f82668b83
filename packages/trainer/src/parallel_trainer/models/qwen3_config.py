"""The sizes of Qwen3 models, dense and with experts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

from attrs import field, frozen

from parallel_trainer.models.router import ONLY, Routing, balance, unknown_balance
from parallel_trainer.models.section import ModelConfig, odd_rotary, other_name


@frozen(kw_only=True)
class Qwen3Config(ModelConfig):
    """Sizes of a Qwen3 model. head_dim is independent of hidden_size / num_attention_heads."""

    NAME: ClassVar[str] = "Qwen3"
    ONLY: ClassVar[dict[str, tuple[Any, ...]]] = ModelConfig.ONLY | {
        "multi_latent_attention": (False,),
        "n_routed_experts": (0,),
        "num_experts": (0,),
        "n_shared_experts": (0,),
        "num_nextn_predict_layers": (0,),
        "use_qk_norm": (True,),
        "qk_layernorm": (True,),
    }

    num_key_value_heads: int
    head_dim: int

    def contradictions(self, section: Any) -> Iterator[str]:
        """Values that cannot stand beside each other."""
        heads, kv_heads = self.num_attention_heads, self.num_key_value_heads
        if heads % kv_heads:
            divisors = ", ".join(str(number) for number in range(1, heads + 1) if heads % number == 0)
            yield (
                f"model.num_key_value_heads is {kv_heads}: it has to divide num_attention_heads {heads}; "
                f"use one of {divisors}."
            )
        yield from odd_rotary("head_dim", self.head_dim)


@frozen(kw_only=True)
class Qwen3MoeConfig(Qwen3Config):
    """Sizes of a Qwen3 model whose feed-forward parts are experts.

    mlp_only_layers and every layer but the decoder_sparse_step-th of each decoder_sparse_step stay dense.
    """

    NAME: ClassVar[str] = "Qwen3-MoE"
    ONLY: ClassVar[dict[str, tuple[Any, ...]]] = {
        **{
            name: values for name, values in Qwen3Config.ONLY.items() if name not in ("num_experts", "n_routed_experts")
        },
        **ONLY,
        "router_aux_loss_coef": (0,),
        "moe_router_enable_expert_bias": (False,),
        "shared_expert_intermediate_size": (0,),
        "scoring_func": ("softmax",),
        "n_group": (1,),
        "topk_group": (1,),
        "routed_scaling_factor": (1,),
        "first_k_dense_replace": (0,),
        "moe_layer_freq": (1,),
    }

    num_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int
    norm_topk_prob: bool = False
    decoder_sparse_step: int = 1
    mlp_only_layers: tuple[int, ...] = field(default=(), converter=tuple)
    moe_router_load_balancing_type: str = "seq_aux_loss"
    moe_aux_loss_coeff: float = 0.0

    @property
    def routing(self) -> Routing:
        """The router of a layer with experts."""
        return Routing(
            experts=self.num_experts,
            inner=self.moe_intermediate_size,
            top_k=self.num_experts_per_tok,
            scoring="softmax",
            normalized=self.norm_topk_prob,
            **balance(self.moe_router_load_balancing_type, self.moe_aux_loss_coeff),
        )

    def has_experts(self, layer: int) -> bool:
        """Whether the feed-forward part of a layer, counted from 0, is experts."""
        return layer not in self.mlp_only_layers and (layer + 1) % self.decoder_sparse_step == 0

    def contradictions(self, section: Any) -> Iterator[str]:
        """Values that cannot stand beside each other."""
        yield from super().contradictions(section)
        yield from other_name(section, "n_routed_experts", "num_experts", self.NAME)
        yield from self.no_experts(
            f"model.decoder_sparse_step is {self.decoder_sparse_step} and mlp_only_layers {list(self.mlp_only_layers)}"
        )
        yield from unknown_balance(self.moe_router_load_balancing_type)
        beyond = [layer for layer in self.mlp_only_layers if not 0 <= layer < self.num_hidden_layers]
        if beyond:
            yield (
                f"model.mlp_only_layers is {list(self.mlp_only_layers)}: layers count from 0 to "
                f"{self.num_hidden_layers - 1}; remove {', '.join(map(str, beyond))}."
            )
