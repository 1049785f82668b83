"""Optimizer, learning rate, checkpoints and profiling: fields that depend on one another."""

from __future__ import annotations

from collections.abc import Iterator

from parallel_config.problems import Edit, Problem
from parallel_config.rules.degrees import set_each
from parallel_config.rules.engine import Facts, rule
from parallel_config.schema.optimization import SCHEDULES

_NEEDS_WARMUP = frozenset(schedule for schedule in SCHEDULES if "WarmUp" in schedule) - {"CosineWithWarmUpLR"}


@rule("optimizer", "optimizer.betas", "optimizer.adamw_betas")
def betas(facts: Facts) -> Iterator[Problem]:
    """Two averaging factors in [0, 1)."""
    for name, default in (("betas", [0.9, 0.95]), ("adamw_betas", [0.95, 0.95])):
        values, path = getattr(facts.config.optimizer, name), f"optimizer.{name}"
        if len(values) != 2 or not all(0 <= beta < 1 for beta in values):
            yield facts.problem(
                path,
                "must be two numbers ≥ 0 and < 1",
                f"Write, for example, {default}.",
                value=list(values),
                fixes=set_each(path, [default]),
            )


_LEAST_EPS = 1e-20
"""Float32 rounds the square of what is below about 1e-22 to 0: `eps` alone is divided by then."""


@rule("optimizer", "optimizer.eps")
def eps(facts: Facts) -> Iterator[Problem]:
    """What keeps an element whose gradients are 0 from being divided by 0."""
    path = "optimizer.eps"
    if facts.config.optimizer.eps < _LEAST_EPS:
        yield facts.problem(
            path,
            f"must be ≥ {_LEAST_EPS:g}: a gradient of 0, or one whose square float32 rounds to 0, is divided by eps "
            "alone, and 0/0 is no number",
            "Write eps: 1.0e-8.",
            fixes=set_each(path, [1e-8]),
        )


@rule("optimizer", "optimizer.weight_decay_include", "optimizer.weight_decay_exclude")
def decay_rules(facts: Facts) -> Iterator[Problem]:
    """No rule is empty: it would be a part of every name."""
    for name in ("weight_decay_include", "weight_decay_exclude"):
        path, rules = f"optimizer.{name}", getattr(facts.config.optimizer, name) or ()
        if "" in rules:
            others = [text for text in rules if text]
            yield facts.problem(
                path,
                'must not hold "", which is a part of every weight\'s name',
                'Take it out; "*" is the rule for all weights.',
                value=list(rules),
                fixes=[(Edit(path, others),) if others else (Edit(path, action="remove"),)],
            )


@rule("optimizer", "optimizer.enable_cpu_offload")
def optimizer_offload(facts: Facts) -> Iterator[Problem]:
    """Optimizer states are not offloaded by this switch."""
    path = "optimizer.enable_cpu_offload"
    if facts.config.optimizer.enable_cpu_offload:
        yield facts.problem(
            path,
            "must be false",
            "Write false; parallelism.cpu_offload keeps shards and optimizer states in host memory.",
            fixes=set_each(path, [False]),
        )


@rule("lr_scheduler.type", "lr_scheduler.warmup_steps", "lr_scheduler.warmup_ratio")
def warm_up(facts: Facts) -> Iterator[Problem]:
    """These schedules are told how long they warm up."""
    schedule = facts.config.lr_scheduler
    if schedule.type in _NEEDS_WARMUP and schedule.warmup_steps is None and schedule.warmup_ratio is None:
        path = "lr_scheduler.warmup_steps"
        yield facts.problem(
            path,
            f"or warmup_ratio is required with type {schedule.type}",
            "Write warmup_steps: 0 for no warm-up.",
            fixes=[*set_each(path, [0]), *set_each("lr_scheduler.warmup_ratio", [0.0])],
        )


@rule("checkpoint", "checkpoint.enable_save", "checkpoint.save_path")
def save_path(facts: Facts) -> Iterator[Problem]:
    """A checkpoint section that saves says where."""
    section, path = facts.config.checkpoint, "checkpoint.save_path"
    if facts.wrote("checkpoint") and section.enable_save and not section.save_path:
        yield facts.problem(
            path,
            "must not be empty with enable_save true",
            "Write, for example, save_path: ./output/checkpoint; or enable_save: false.",
            value=None,
            fixes=[*set_each(path, ["./output/checkpoint"]), *set_each("checkpoint.enable_save", [False])],
        )


@rule("checkpoint", "checkpoint.save_trainable_only", "checkpoint.base_load_path")
def trainable_only(facts: Facts) -> Iterator[Problem]:
    """A checkpoint of adapters alone names the weights they belong to."""
    section, path = facts.config.checkpoint, "checkpoint.save_trainable_only"
    if section.save_trainable_only and not section.base_load_path:
        yield facts.problem(
            path,
            "needs base_load_path",
            "Write the folder of the base weights in base_load_path, or false here.",
            fixes=set_each(path, [False]),
        )


@rule("profiler", "profiler.start_step", "profiler.end_step")
def profiled_steps(facts: Facts) -> Iterator[Problem]:
    """Profiling ends no earlier than it starts."""
    section, path = facts.config.profiler, "profiler.end_step"
    if section.start_step > section.end_step:
        yield facts.problem(
            path,
            f"must be ≥ start_step {section.start_step}",
            f"Use {section.start_step} or more.",
            fixes=[
                *set_each(path, [section.start_step]),
                *set_each("profiler.start_step", [section.end_step]),
            ],
        )


RULES = (betas, eps, decay_rules, optimizer_offload, warm_up, save_path, trainable_only, profiled_steps)
