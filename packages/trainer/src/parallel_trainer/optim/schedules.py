"""Learning rate as a function of the step, for the schedules of the `lr_scheduler` section.

With w warm-up steps, T total steps and i = `warmup_lr_init`, all of them start as i + (lr - i)·t/w for t < w.
The rate that update number t (counted from 0) applies is schedule(t); that is the number a run reports.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from parallel_trainer.errors import UserError

Schedule = Callable[[int], float]

_KEYS = {
    "warmup_steps",
    "warmup_ratio",
    "warmup_lr_init",
    "lr_end",
    "decay_steps",
    "decay_start_steps",
    "total_steps",
}


def build_schedule(kind: str, learning_rate: float, *, total_steps: int, options: Mapping[str, Any]) -> Schedule:
    """The schedule that a file's `lr_scheduler` section asks for.

    kind:          one of `SCHEDULES`.
    learning_rate: the rate after warm-up.
    total_steps:   `training.steps`; a `total_steps` in `options` has no effect, as in the reference.
    options:       the section's other keys: warmup_steps or warmup_ratio (wins), warmup_lr_init, lr_end, …
    Raises UserError for an unknown kind or option, and for values out of range.
    """
    if kind not in SCHEDULES:
        raise UserError(
            f"lr_scheduler.type {kind!r} is not a schedule this version has. It has: {', '.join(SCHEDULES)}."
        )
    unknown = sorted(set(options) - _KEYS)
    if unknown:
        raise UserError(
            f"lr_scheduler has the unknown key {unknown[0]!r}. Known: type, learning_rate, {', '.join(sorted(_KEYS))}."
        )
    warmup = _warmup_steps(kind, total_steps, options)
    initial = float(options.get("warmup_lr_init") or 0.0)
    after = SCHEDULES[kind](learning_rate, total_steps, warmup, options)

    def schedule(step: int) -> float:
        if step < warmup:
            return initial + (learning_rate - initial) * step / warmup
        return after(step)

    return schedule


def _warmup_steps(kind: str, total_steps: int, options: Mapping[str, Any]) -> int:
    ratio, steps = options.get("warmup_ratio"), options.get("warmup_steps")
    if ratio is not None:
        if not 0 <= ratio <= 1:
            raise UserError(
                f"lr_scheduler.warmup_ratio {ratio} must lie between 0 and 1: it is a part of training.steps."
            )
        return int(total_steps * ratio)
    if steps is not None:
        if steps < 0:
            raise UserError(f"lr_scheduler.warmup_steps {steps} must be at least 0.")
        return int(steps)
    if kind == "CosineWithWarmUpLR":
        return 0
    raise UserError(
        f"lr_scheduler.type {kind} needs warmup_steps or warmup_ratio, and the file has neither. "
        "Write warmup_steps: 0 for no warm-up."
    )


def _constant(lr: float, total: int, warmup: int, options: Mapping[str, Any]) -> Schedule:
    return lambda step: lr


def _linear(lr: float, total: int, warmup: int, options: Mapping[str, Any]) -> Schedule:
    return lambda step: lr * max(0.0, (total - step) / max(1, total - warmup))


def _cosine(lr: float, total: int, warmup: int, options: Mapping[str, Any]) -> Schedule:
    end = float(options.get("lr_end") or 0.0)
    decay_steps = options.get("decay_steps")
    last = total if decay_steps is None else int(decay_steps)

    def rate(step: int) -> float:
        if step >= last:
            return end
        return end + (lr - end) * 0.5 * (1.0 + math.cos(math.pi * (step - warmup) / max(1, total - warmup)))

    return rate


def _warmup_stable_decay(lr: float, total: int, warmup: int, options: Mapping[str, Any]) -> Schedule:
    end = float(options.get("lr_end", 1e-7))
    start = options.get("decay_start_steps")
    if start is None:
        raise UserError("lr_scheduler.type WarmUpStableDecayLR needs decay_start_steps, and the file has none.")
    if not warmup <= start <= total:
        raise UserError(
            f"lr_scheduler.decay_start_steps {start} must lie between the warm-up's {warmup} steps "
            f"and training.steps {total}."
        )

    def rate(step: int) -> float:
        if step < start:
            return lr
        return lr + (end - lr) * min(1.0, (step - start) / max(1, total - start))

    return rate


SCHEDULES: Mapping[str, Callable[[float, int, int, Mapping[str, Any]], Schedule]] = {
    "ConstantWarmUpLR": _constant,
    "LinearWithWarmUpLR": _linear,
    "CosineWithWarmUpLR": _cosine,
    "WarmUpStableDecayLR": _warmup_stable_decay,
}
