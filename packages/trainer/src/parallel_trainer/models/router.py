"""How a layer's tokens are given to experts, and what its models read of it from the `model` section."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

from attrs import frozen

SEQUENCE_BALANCE = ("seq_aux_loss", "sub_seq_aux_loss")
"""Values of moe_router_load_balancing_type for the auxiliary loss of each whole sequence. The second, MindFormers'
default, balances there what one device has of a sequence; here that is the whole, so that the plan does not matter."""

NO_BALANCE = ("none",)

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
    balance:       coefficient of the auxiliary loss of each sequence; 0: none.
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
    shared: int = 0


def unknown_balance(kind: str, coefficient: float) -> Iterator[str]:
    """The problem of an auxiliary loss that this version does not have."""
    if kind in (*SEQUENCE_BALANCE, *NO_BALANCE) or (not coefficient and kind in ("aux_loss", "gbs_aux_loss")):
        return
    reason = "is unknown"
    if kind == "aux_loss":
        reason = "balances the tokens of a micro-batch, so that the plan would change what is trained"
    elif kind == "gbs_aux_loss":
        reason = "balances over the steps of an accumulation, which this version does not do"
    yield (
        f"model.moe_router_load_balancing_type is {kind!r}: it {reason}; use 'seq_aux_loss', which balances each "
        "sequence, or 'none'."
    )
