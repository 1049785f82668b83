"""The sections `optimizer` and `lr_scheduler`."""

from __future__ import annotations

from typing import Any

from attrs import Factory, field, frozen

from parallel_config.schema.setting import NewtonSchulz, setting


@frozen
class Optimizer:
    """AdamW or Muon. The fields after `weight_decay_exclude` belong to one of the two.

    `ns_coefficients` is one triple for all `ns_steps`, or segments [[a, b, c], steps], whose steps count instead.
    """

    type: str = setting("AdamW", options=("AdamW", "Muon"))
    betas: tuple[float, ...] = (0.9, 0.95)
    eps: float = setting(1e-8, minimum=0)
    weight_decay: float = setting(0.01, minimum=0)
    weight_decay_include: tuple[str, ...] | None = None
    weight_decay_exclude: tuple[str, ...] | None = None

    use_fused: bool = False
    enable_fused_opt: bool = False
    amsgrad: bool = False
    maximize: bool = False
    enable_cpu_offload: bool = False

    momentum: float = setting(0.95, minimum=0, below=1)
    nesterov: bool = True
    ns_steps: int = setting(5, minimum=1)
    ns_coefficients: NewtonSchulz = field(default=NewtonSchulz((3.4445, -4.775, 2.0315)))
    adamw_betas: tuple[float, ...] = (0.95, 0.95)
    adamw_include: tuple[str, ...] | None = None
    qk_clip_enabled: bool = True
    qk_clip_threshold: float = setting(100.0, above=0)
    comm_strategy: str = setting("allgather", options=("allgather", "allgather_deredundency"))
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

    type: str | None = setting(None, options=SCHEDULES)
    learning_rate: float = setting(1e-5, minimum=0)
    warmup_steps: int | None = setting(None, minimum=0)
    warmup_ratio: float | None = setting(None, minimum=0, maximum=1)
    warmup_lr_init: float = setting(0.0, minimum=0)
    lr_end: float | None = setting(None, minimum=0)
    decay_steps: int | None = setting(None, minimum=1)
    decay_start_steps: int | None = setting(None, minimum=0)
    total_steps: int | None = setting(None, reserved=True)
    extra: dict[str, Any] = Factory(dict)
