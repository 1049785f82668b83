"""The sections `optimizer` and `lr_scheduler`."""

from __future__ import annotations

from typing import Any

from attrs import Factory, frozen

from parallel_config.schema.setting import NOWHERE, NewtonSchulz, setting


@frozen
class Optimizer:
    """AdamW or Muon. The fields after `weight_decay_exclude` belong to one of the two.

    `ns_coefficients` is one triple for all `ns_steps`, or segments [[a, b, c], steps], whose steps count instead.
    """

    type: str = setting("AdamW", options=("AdamW", "Muon"), about="Which optimizer; AdamW alone is implemented.")
    betas: tuple[float, ...] = setting((0.9, 0.95), about="Averaging factors of the first and second moment.")
    eps: float = setting(1e-8, about="Added to the root of the second moment.")
    weight_decay: float = setting(0.01, minimum=0, about="How fast weights decay, in units of the learning rate.")
    weight_decay_include: tuple[str, ...] | None = setting(
        None, about="Weights that decay: names, parts of names or patterns; stronger than exclude."
    )
    weight_decay_exclude: tuple[str, ...] | None = setting(
        None, about="Weights that do not decay, by the same kind of rules."
    )

    use_fused: bool = setting(False, about="Use a fused operator.", acts=NOWHERE)
    enable_fused_opt: bool = setting(False, about="Use a fused operator.", acts=NOWHERE)
    amsgrad: bool = setting(False, about="Divide by the largest second moment; only false is accepted yet.")
    maximize: bool = setting(False, about="Go uphill; only false is accepted yet.")
    enable_cpu_offload: bool = setting(False, about="Not a switch; parallelism.cpu_offload is.")

    momentum: float = setting(0.95, minimum=0, below=1, about="Muon's momentum.", acts=NOWHERE)
    nesterov: bool = setting(True, about="Muon's Nesterov momentum.", acts=NOWHERE)
    ns_steps: int = setting(5, minimum=1, about="Muon's Newton-Schulz steps.", acts=NOWHERE)
    ns_coefficients: NewtonSchulz = setting(
        NewtonSchulz((3.4445, -4.775, 2.0315)), about="Muon's Newton-Schulz coefficients.", acts=NOWHERE
    )
    adamw_betas: tuple[float, ...] = setting(
        (0.95, 0.95), about="Averaging factors of weights that Muon leaves to AdamW.", acts=NOWHERE
    )
    adamw_include: tuple[str, ...] | None = setting(None, about="Weights that Muon leaves to AdamW.", acts=NOWHERE)
    qk_clip_enabled: bool = setting(True, about="Muon's clipping of queries and keys.", acts=NOWHERE)
    qk_clip_threshold: float = setting(100.0, above=0, about="From which logit on Muon clips.", acts=NOWHERE)
    comm_strategy: str = setting(
        "allgather", options=("allgather", "allgather_deredundency"), about="How Muon gathers matrices.", acts=NOWHERE
    )
    extra: dict[str, Any] = Factory(dict)


SCHEDULES = (
    "ConstantWarmUpLR",
    "LinearWithWarmUpLR",
    "CosineWithWarmUpLR",
    "WarmUpStableDecayLR",
    "ConstantWithCoolDownLR",
    "CosineWithRestartsAndWarmUpLR",
    "PolynomialWithWarmUpLR",
    "CosineAnnealingLR",
    "CosineAnnealingWarmRestarts",
    "LearningRateWiseLayer",
)


@frozen
class LrScheduler:
    """The learning rate over the steps. `warmup_ratio` wins over `warmup_steps`."""

    type: str | None = setting(None, options=SCHEDULES, about="Which schedule.")
    learning_rate: float = setting(1e-5, minimum=0, about="The largest learning rate.")
    warmup_steps: int | None = setting(None, minimum=0, about="Steps over which the rate rises.")
    warmup_ratio: float | None = setting(
        None, minimum=0, maximum=1, about="The same as a part of training.steps; stronger than warmup_steps."
    )
    warmup_lr_init: float = setting(0.0, minimum=0, about="The rate that warm-up begins with.")
    lr_end: float | None = setting(None, minimum=0, about="The rate at the end.")
    decay_steps: int | None = setting(None, minimum=1, about="Step from which on the rate is lr_end.")
    decay_start_steps: int | None = setting(None, minimum=0, about="Step at which a stable rate begins to fall.")
    total_steps: int | None = setting(None, reserved=True, about="Always training.steps.")
    extra: dict[str, Any] = Factory(dict)
