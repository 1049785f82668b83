"""Learning rates here and those of transformers' and PyTorch's schedules: the same at every update.

Both sides count updates from 0, so the first update of a warm-up from 0 applies 0.
"""

from __future__ import annotations

import pytest
import torch
import transformers
from parallel_trainer.optim.schedules import build_schedule

STEPS, RATE = 20, 3e-4
BEYOND = 3


def rates(schedule_of, updates=STEPS + BEYOND):
    """The rates that updates 0, 1, … of an optimizer apply under a schedule."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=RATE)
    schedule, found = schedule_of(optimizer), []
    for _ in range(updates):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    return found


def sequence(initial, warmup, then):
    """PyTorch's linear warm-up from `initial`, and another schedule after it."""

    def schedule(optimizer):
        first = torch.optim.lr_scheduler.LinearLR(optimizer, initial / RATE, total_iters=warmup)
        return torch.optim.lr_scheduler.SequentialLR(optimizer, [first, then(optimizer)], [warmup])

    return schedule


def constant(warmup):
    return lambda optimizer: transformers.get_constant_schedule_with_warmup(optimizer, warmup)


def linear(warmup):
    return lambda optimizer: transformers.get_linear_schedule_with_warmup(optimizer, warmup, STEPS)


def cosine(warmup, end=0.0):
    return lambda optimizer: transformers.get_cosine_with_min_lr_schedule_with_warmup(
        optimizer, warmup, STEPS, min_lr=end
    )


def stable_then_decay(warmup, start, end):
    return lambda optimizer: transformers.get_wsd_schedule(
        optimizer,
        num_warmup_steps=warmup,
        num_stable_steps=start - warmup,
        num_decay_steps=STEPS - start,
        decay_type="linear",
        min_lr_ratio=end / RATE,
    )


COSINE, LINEAR, CONSTANT, STABLE = "CosineWithWarmUpLR", "LinearWithWarmUpLR", "ConstantWarmUpLR", "WarmUpStableDecayLR"
# transformers' warm-up begins where its decay ends.
STABLE_OPTIONS = {"warmup_steps": 4, "warmup_lr_init": 6e-5, "decay_start_steps": 12, "lr_end": 6e-5}


@pytest.mark.parametrize(
    ("kind", "options", "theirs"),
    [
        (CONSTANT, {"warmup_steps": 0}, constant(0)),
        (CONSTANT, {"warmup_steps": 7}, constant(7)),
        (CONSTANT, {"warmup_steps": 6, "warmup_lr_init": 6e-5}, sequence(6e-5, 6, constant(0))),
        (LINEAR, {"warmup_steps": 0}, linear(0)),
        (LINEAR, {"warmup_steps": 5}, linear(5)),
        (LINEAR, {"warmup_ratio": 0.15}, linear(3)),
        (COSINE, {}, cosine(0)),
        (COSINE, {"warmup_steps": 1}, cosine(1)),
        (COSINE, {"warmup_steps": 5, "lr_end": 3e-5}, cosine(5, 3e-5)),
        (STABLE, STABLE_OPTIONS, stable_then_decay(4, 12, 6e-5)),
        (STABLE, {"warmup_steps": 0, "decay_start_steps": 19}, stable_then_decay(0, 19, 1e-7)),
    ],
)
def test_rates(kind, options, theirs):
    """A cosine beyond the last step stays where it ended; transformers' turns up again."""
    updates = STEPS + 1 if kind == COSINE else STEPS + BEYOND
    schedule = build_schedule(kind, RATE, total_steps=STEPS, options=options)
    assert [schedule(step) for step in range(updates)] == pytest.approx(rates(theirs, updates), rel=1e-12, abs=1e-20)


@pytest.mark.parametrize(
    ("warmup", "expected"),
    [
        (10, [0, 100, 200, 300, 400, 500, 600, 700, 800, 900]),
        (20, [0, 50, 100, 150, 200, 250, 300, 350, 400, 450]),
    ],
    ids=["a", "b"],
)
def test_a_warm_up_as_long_as_the_run_or_longer(warmup, expected):
    """PUB2-LR-01: nothing divides by the steps that are left, and transformers agrees."""
    schedule = build_schedule(COSINE, 1e-3, total_steps=10, options={"warmup_steps": warmup})
    found = [schedule(step) for step in range(10)]
    assert found == pytest.approx([rate * 1e-6 for rate in expected], rel=1e-12)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1e-3)
    theirs = transformers.get_cosine_schedule_with_warmup(optimizer, warmup, 10)
    assert found == pytest.approx([1e-3 * theirs.lr_lambdas[0](step) for step in range(10)], rel=1e-12)
