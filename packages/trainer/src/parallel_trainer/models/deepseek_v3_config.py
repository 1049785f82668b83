"""The sizes of DeepSeek-V3 models."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

from attrs import field, frozen

from parallel_trainer.models.router import ONLY, Routing, balance, unknown_balance
from parallel_trainer.models.section import ModelConfig, odd_rotary, other_name


def _rank_or_none(rank: int | None) -> int | None:
    return rank or None


@frozen(kw_only=True)
class DeepseekV3Config(ModelConfig):
    """Sizes of a DeepSeek-V3 model; q_lora_rank None: queries are projected without a low rank."""

    NAME: ClassVar[str] = "DeepSeek-V3"
    ONLY: ClassVar[dict[str, tuple[Any, ...]]] = {
        **ModelConfig.ONLY,
        **ONLY,
        "multi_latent_attention": (True,),
        "qk_layernorm": (True,),
        "scoring_func": ("sigmoid",),
        "topk_method": ("noaux_tc",),
    }

    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    n_routed_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int
    q_lora_rank: int | None = field(default=None, converter=_rank_or_none)
    rope_interleave: bool = True
    n_shared_experts: int = 1
    first_k_dense_replace: int = 3
    moe_layer_freq: int = 1
    n_group: int = 8
    topk_group: int = 4
    routed_scaling_factor: float = 2.5
    norm_topk_prob: bool = True
    moe_router_enable_expert_bias: bool = True
    moe_router_bias_update_rate: float = 1e-3
    moe_router_load_balancing_type: str = "sub_seq_aux_loss"
    moe_aux_loss_coeff: float = 0.0
    num_nextn_predict_layers: int = 1
    mtp_loss_scaling_factor: float = 0.1
    moe_shared_expert_intermediate_size: int | None = None

    @property
    def routing(self) -> Routing:
        """The router of a layer with experts."""
        return Routing(
            experts=self.n_routed_experts,
            inner=self.moe_intermediate_size,
            top_k=self.num_experts_per_tok,
            scoring="sigmoid",
            normalized=self.norm_topk_prob,
            scaling=self.routed_scaling_factor,
            groups=self.n_group,
            topk_group=self.topk_group,
            bias=self.moe_router_enable_expert_bias,
            **balance(self.moe_router_load_balancing_type, self.moe_aux_loss_coeff),
            shared=self.n_shared_experts * self.moe_intermediate_size,
        )

    @property
    def softmax_scale(self) -> float:
        """What scores of attention are multiplied by."""
        plain = (self.qk_nope_head_dim + self.qk_rope_head_dim) ** -0.5
        return plain if self.yarn is None else plain * self.yarn.softmax_scale

    def has_experts(self, layer: int) -> bool:
        """Whether the feed-forward part of a layer, counted from 0, is experts."""
        return layer >= self.first_k_dense_replace and layer % self.moe_layer_freq == 0

    @property
    def expert_layers(self) -> tuple[str, ...]:
        """Names of the layers with experts, that of a further prediction last."""
        further = range(self.num_hidden_layers, self.num_hidden_layers + self.num_nextn_predict_layers)
        return (*super().expert_layers, *(f"model.layers.{number}" for number in further))

    def contradictions(self, section: Any) -> Iterator[str]:
        """Values that cannot stand beside each other."""
        yield from odd_rotary("qk_rope_head_dim", self.qk_rope_head_dim)
        yield from other_name(section, "num_experts", "n_routed_experts", self.NAME)
        yield from self.no_experts(f"model.first_k_dense_replace is {self.first_k_dense_replace}")
        yield from unknown_balance(self.moe_router_load_balancing_type)
        written, shared = self.moe_shared_expert_intermediate_size, self.routing.shared
        if written not in (None, shared):
            yield (
                f"model.moe_shared_expert_intermediate_size is {written}: it has to be n_shared_experts "
                f"{self.n_shared_experts} · moe_intermediate_size {self.moe_intermediate_size} = {shared}; "
                "use that or leave the field out."
            )
        if self.num_nextn_predict_layers > 1:
            yield (
                f"model.num_nextn_predict_layers is {self.num_nextn_predict_layers}: one module predicts one token "
                "further; use 1 or 0."
            )
        if self.num_nextn_predict_layers and getattr(section, "seq_length", None) == 1:
            yield (
                "model.num_nextn_predict_layers is 1: a sequence of seq_length 1 has no token further ahead; "
                "use 0, or a seq_length of 2 or more."
            )
