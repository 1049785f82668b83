"""What is trained, whatever the plan: a model of odd sizes on a text, which one rank trains too."""

from __future__ import annotations

from attrs import frozen

GLOBAL_BATCH = 24

_QWEN3 = """
  model_type: qwen3
  architectures: Qwen3ForCausalLM
  num_key_value_heads: {kv_heads}
  head_dim: 6
  attention_bias: {bias}
"""

_QWEN3_MOE = """
  model_type: qwen3_moe
  architectures: Qwen3MoeForCausalLM
  num_key_value_heads: {kv_heads}
  head_dim: 6
  num_experts: {experts}
  num_experts_per_tok: {top_k}
  moe_intermediate_size: 10
  norm_topk_prob: true
  moe_router_load_balancing_type: {balance}
  moe_aux_loss_coeff: 0.1
"""

# Four groups of experts, of which a token may choose from two, or from one if it takes one expert.
_DEEPSEEK_V3 = """
  model_type: deepseek_v3
  architectures: DeepseekV3ForCausalLM
  num_key_value_heads: 8
  q_lora_rank: 10
  kv_lora_rank: 6
  qk_nope_head_dim: 6
  qk_rope_head_dim: 4
  v_head_dim: 5
  n_routed_experts: {experts}
  num_experts_per_tok: {top_k}
  n_shared_experts: 1
  moe_intermediate_size: 10
  first_k_dense_replace: 1
  n_group: 4
  topk_group: {groups}
  norm_topk_prob: true
  routed_scaling_factor: 2.5
  moe_router_enable_expert_bias: true
  moe_router_bias_update_rate: 0.02
  moe_router_load_balancing_type: {balance}
  moe_aux_loss_coeff: 0.1
  num_nextn_predict_layers: {mtp}
  mtp_loss_scaling_factor: 0.3
"""

ARCHITECTURES = {"qwen3": _QWEN3, "qwen3_moe": _QWEN3_MOE, "deepseek_v3": _DEEPSEEK_V3}

TEXTS = ("plain", "packed", "long", "padded")
"""What samples look like. plain and packed: documents of 1 to 60 tokens, seen as one or kept apart in attention. long:
a sample is a piece of one document. padded: half of the tokens and more are padding, kept apart like a document."""


@frozen
class Model:
    """What is trained, whatever the plan: a run on one rank that many plans must equal.

    local_batch:   samples of a micro-batch, where what is trained depends on them (aux_loss).
    micro_batches: of each rank in a step, where what is trained depends on them (global_aux_loss).
    """

    dtype: str = "float64"
    tied: bool = False
    kv_heads: int = 2
    text: str = "plain"
    bias: bool = False
    layers: int = 2
    batch: int = GLOBAL_BATCH
    architecture: str = "qwen3"
    experts: int = 8
    top_k: int = 2
    mtp: int = 0
    balance: str = "sub_seq_aux_loss"
    local_batch: int | None = None
    micro_batches: int = 1

    @property
    def name(self) -> str:
        parts = [] if self.architecture == "qwen3" else [self.architecture, f"top{self.top_k}of{self.experts}"]
        parts += ["mtp"] if self.mtp else []
        parts += [] if self.balance == "sub_seq_aux_loss" else [self.balance]
        parts += [self.dtype, "tied" if self.tied else "untied", f"kv{self.kv_heads}", self.text]
        parts += ["bias"] if self.bias else []
        parts += [f"{self.layers}layers-batch{self.batch}"] if (self.layers, self.batch) != (2, GLOBAL_BATCH) else []
        return "-".join(parts)

    @property
    def section(self) -> str:
        """The lines of the model section that depend on the architecture."""
        return (
            ARCHITECTURES[self.architecture]
            .lstrip("\n")
            .format(
                kv_heads=self.kv_heads,
                bias=flag(self.bias),
                experts=self.experts,
                top_k=self.top_k,
                groups=min(self.top_k, 2),
                mtp=self.mtp,
                balance=self.balance,
            )
        )


def flag(value: bool) -> str:
    """As YAML has it."""
    return str(value).lower()
