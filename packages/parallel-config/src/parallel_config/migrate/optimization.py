"""The optimizer, clipping, and the learning rate over the steps.

Sources, in the mindformers 2.1.0 wheel: core/optim/adamw.py and wrapper/wrapper.py (defaults), trainer/base_trainer.py
(`create_optimizer_scheduler`, `create_lr_scheduler`), core/lr/build_lr.py (other names of schedules),
core/lr/lr_schedule.py (which schedule takes what).
"""

from __future__ import annotations

from typing import Any

from parallel_config.migrate.draft import Draft, Kind
from parallel_config.migrate.rules import Rename, by, rename_all

_SCHEDULES = {
    "constant_with_warmup": "ConstantWarmUpLR",
    "linear": "LinearWithWarmUpLR",
    "cosine": "CosineWithWarmUpLR",
    "cosine_with_restarts": "CosineWithRestartsAndWarmUpLR",
    "polynomial": "PolynomialWithWarmUpLR",
    "cosine_annealing": "CosineAnnealingLR",
    "cosine_annealing_warm_restarts": "CosineAnnealingWarmRestarts",
}
_ADAMW = {"FusedAdamW": "AdamW"}
_MUON = ("momentum", "nesterov", "ns_steps", "ns_coefficients", "adamw_betas", "qk_clip_threshold", "comm_strategy")
_CONSTANT = ("ConstantWarmUpLR",)
_RATIOS = (("decay_ratio", "decay_steps"), ("decay_start_ratio", "decay_start_steps"))

_OPTIMIZER = (
    Rename("optimizer.type", "optimizer.type", by(_ADAMW), "computes the same"),
    Rename("optimizer.betas", "optimizer.betas"),
    Rename("optimizer.eps", "optimizer.eps"),
    Rename("optimizer.weight_decay", "optimizer.weight_decay"),
    *(Rename(f"optimizer.{name}", f"optimizer.{name}") for name in _MUON),
)


def optimizer(draft: Draft) -> None:
    """Carry the optimizer and clipping; defaults of MindFormers that are others here are written."""
    rename_all(draft, _OPTIMIZER)
    if not draft.has("optimizer.betas"):
        draft.carry((), "optimizer.betas", [0.9, 0.999], "MindFormers' default")
    if not draft.has("optimizer.weight_decay"):
        draft.carry((), "optimizer.weight_decay", 0.0, "MindFormers' default")
    _clipping(draft)


def _clipping(draft: Draft) -> None:
    switch, norm = "runner_wrapper.use_clip_grad", "runner_wrapper.max_grad_norm"
    clips = draft.switch(switch, not draft.has("runner_wrapper"))
    if clips:
        how = "" if draft.has(norm) else "MindFormers' default"
        draft.carry((norm, switch), "training.max_norm", draft.get(norm, 1.0), how)
    else:
        draft.leave(norm, "use_clip_grad is not true")
        draft.carry(switch, "training.max_norm", 0.0, "gradients are not clipped")


def learning_rate(draft: Draft, steps: int) -> None:
    """Carry the schedule of a run of so many steps; of several for groups of weights, the one of all others."""
    section = "lr_schedule"
    if draft.has("grouped_lr_schedule"):
        section = "grouped_lr_schedule.default"
        draft.leave("lr_schedule", "grouped_lr_schedule decides")
        _groups(draft)
    if not draft.has(section):
        _constant(draft)
        return
    draft.leave("optimizer.learning_rate", f"{section} decides")
    kind = by(_SCHEDULES)(draft.get(f"{section}.type", "CosineWithWarmUpLR"))
    how = "" if draft.has(f"{section}.type") else "MindFormers' default"
    draft.carry(f"{section}.type", "lr_scheduler.type", kind, how)
    for name in ("learning_rate", "warmup_lr_init", "lr_end", "decay_steps", "decay_start_steps"):
        draft.carry(f"{section}.{name}", f"lr_scheduler.{name}", draft.get(f"{section}.{name}"))
    _lengths(draft, section, str(kind), steps)


def _constant(draft: Draft) -> None:
    """Without a schedule the optimizer's own rate holds throughout."""
    path = "optimizer.learning_rate"
    if not draft.has(path):
        draft.refuse("lr_schedule", "is missing, and so is optimizer.learning_rate", "Write one of the two.")
        return
    draft.carry((), "lr_scheduler.type", "ConstantWarmUpLR", "there is no lr_schedule")
    draft.carry(path, "lr_scheduler.learning_rate", draft.get(path))
    draft.carry((), "lr_scheduler.warmup_steps", 0, "there is no lr_schedule")


def _lengths(draft: Draft, section: str, kind: str, steps: int) -> None:
    """Warm-up and total length. A schedule here is always as long as the run."""
    total_path, ratio_path, warmup = (f"{section}.{name}" for name in ("total_steps", "warmup_ratio", "warmup_steps"))
    total = draft.get(total_path, -1)
    total = steps if total == -1 or not isinstance(total, int) else total
    for ratio, name in _RATIOS:
        path = f"{section}.{ratio}"
        if _is_share(draft, path):
            draft.carry(path, f"lr_scheduler.{name}", int(total * draft.get(path)), f"{ratio} of {total} steps")
    share = draft.get(ratio_path)
    if share is None:
        draft.carry(warmup, "lr_scheduler.warmup_steps", draft.get(warmup))
    else:
        draft.leave(warmup, "warmup_ratio decides")
        _warm_up(draft, ratio_path, share, total, steps)
    if total == steps:
        draft.leave(total_path, "a schedule is as long as the run here")
    elif kind in _CONSTANT:
        draft.leave(total_path, "the rate is constant after warm-up, so that the length does not matter")
    else:
        why = f"a schedule ends with the run here, after {steps} steps"
        draft.leave(total_path, why, Kind.TRAINED)


def _warm_up(draft: Draft, path: str, share: Any, total: int, steps: int) -> None:
    if total == steps or not _is_share(draft, path):
        draft.carry(path, "lr_scheduler.warmup_ratio", share)
    else:
        how = f"warmup_ratio {share} of total_steps {total}"
        draft.carry(path, "lr_scheduler.warmup_steps", int(total * share), how)


def _is_share(draft: Draft, path: str) -> bool:
    """Whether a number is there, which is refused where it is no share of the steps."""
    value = draft.get(path)
    if not isinstance(value, (int, float)):
        return False
    if 0 <= value <= 1:
        return True
    draft.refuse(path, "must be a share of the steps, from 0 to 1", "Mend the old file first.")
    return False


def _groups(draft: Draft) -> None:
    """A group of weights with the schedule of all others loses nothing."""
    groups, default = draft.get("grouped_lr_schedule.grouped"), draft.get("grouped_lr_schedule.default")
    for index, group in enumerate(groups if isinstance(groups, list) else ()):
        path = f"grouped_lr_schedule.grouped[{index}]"
        own = {key: value for key, value in group.items() if key != "params"} if isinstance(group, dict) else group
        if own == default:
            draft.leave(path, "the group's schedule is that of all other weights")
        else:
            draft.leave(path, "all weights have one learning rate here", Kind.TRAINED)
