"""How a layer's tokens are given to experts, and what its models read of it from the `model` section."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

from attrs import frozen

Tokens = Literal["sequence", "micro_batch", "global_batch"]
"""Which tokens an auxiliary loss counts the choices of together."""

BALANCED_OVER: dict[str, Tokens | None] = {
    "none": None,
    "seq_aux_loss": "sequence",
    "sub_seq_aux_loss": "sequence",
    "aux_loss": "micro_batch",
    "global_aux_loss": "global_batch",
    "gbs_aux_loss": "global_batch",
}
"""By moe_router_load_balancing_type the tokens that are balanced together. MindFormers' default, sub_seq_aux_loss,
balances there what one device has of a sequence; here that is the whole, so that the plan does not matter.
gbs_aux_loss is what its graph mode calls global_aux_loss."""

ONLY: dict[str, tuple[Any, ...]] = {
    "moe_expert_capacity_factor": (),
    "moe_z_loss_coeff": (0,),
    "moe_router_force_expert_balance": (False,),
}
"""What no layer with experts does here, as in `ModelConfig.ONLY`."""


@frozen(kw_only=True)
class Routing:
    """A layer's experts and its router.

    experts:       how many there are, each with an inner size of `inner`.
    top_k:         how many each token goes to.
    scoring:       how logits become scores.
    normalized:    the weights of a token's experts add up to 1, before `scaling` multiplies them.
    groups:        of so many groups of experts, a token's come from `topk_group`.
    bias:          a bias chooses along, which the training step moves towards even loads.
    balance:       coefficient of the auxiliary loss; 0: none.
    balanced_over: the tokens whose choices the auxiliary loss counts together.
    shared:        inner size of the expert that sees every token; 0: none.
    """

    experts: int
    inner: int
    top_k: int
    scoring: Literal["sigmoid", "softmax"]
    normalized: bool
    scaling: float = 1.0
    groups: int = 1
    topk_group: int = 1
    bias: bool = False
    balance: float = 0.0
    balanced_over: Tokens = "sequence"
    shared: int = 0


def balance(kind: str, coefficient: float) -> dict[str, Any]:
    """The fields of `Routing` that the auxiliary loss `kind`, a moe_router_load_balancing_type, sets; {} for none."""
    tokens = BALANCED_OVER.get(kind)
    return {} if tokens is None else {"balance": coefficient, "balanced_over": tokens}


def unknown_balance(kind: str) -> Iterator[str]:
    """The problem of an auxiliary loss that does not exist."""
    if kind not in BALANCED_OVER:
        yield f"model.moe_router_load_balancing_type is {kind!r}: it is unknown; use one of {', '.join(BALANCED_OVER)}."
