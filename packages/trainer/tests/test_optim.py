"""Schedules, decay rules, AdamW, gradient norm and clipping, against closed forms and plain loops."""

from __future__ import annotations

import math

import numpy as np
import pytest
from device_mesh import connect
from parallel_trainer.errors import UserError
from parallel_trainer.optim.adamw import AdamW
from parallel_trainer.optim.gradient_norm import clip_coefficient, global_norm
from parallel_trainer.optim.schedules import build_schedule


def schedule(kind: str, **options: object):
    return build_schedule(kind, 1.0, total_steps=100, options=options)


@pytest.mark.parametrize(
    ("kind", "options", "expected"),
    [
        ("ConstantWarmUpLR", {"warmup_steps": 10}, {0: 0.0, 5: 0.5, 10: 1.0, 99: 1.0}),
        ("ConstantWarmUpLR", {"warmup_ratio": 0.25, "warmup_steps": 3}, {5: 0.2, 25: 1.0}),
        ("ConstantWarmUpLR", {"warmup_steps": 4, "warmup_lr_init": 0.2}, {0: 0.2, 1: 0.4, 4: 1.0}),
        ("ConstantWarmUpLR", {"warmup_ratio": 0}, {0: 1.0}),
        ("LinearWithWarmUpLR", {"warmup_steps": 0}, {0: 1.0, 25: 0.75, 100: 0.0, 120: 0.0}),
        ("LinearWithWarmUpLR", {"warmup_steps": 20}, {10: 0.5, 20: 1.0, 60: 0.5}),
        ("CosineWithWarmUpLR", {}, {0: 1.0, 50: 0.5, 100: 0.0}),
        ("CosineWithWarmUpLR", {"lr_end": 0.1, "warmup_steps": 20}, {20: 1.0, 60: 0.55, 100: 0.1}),
        (
            "CosineWithWarmUpLR",
            {"decay_steps": 50, "lr_end": 0.3},
            {49: 0.3 + 0.35 * (1 + math.cos(0.49 * math.pi)), 50: 0.3},
        ),
        (
            "WarmUpStableDecayLR",
            {"warmup_steps": 10, "decay_start_steps": 80, "lr_end": 0.5},
            {79: 1.0, 80: 1.0, 90: 0.75, 100: 0.5},
        ),
    ],
)
def test_schedule(kind, options, expected):
    rate = schedule(kind, **options)
    assert {step: rate(step) for step in expected} == pytest.approx(expected)


@pytest.mark.parametrize(
    ("warmup", "millionths"),
    [
        ({"warmup_steps": 10}, [0, 100, 200, 300, 400, 500, 600, 700, 800, 900]),
        ({"warmup_ratio": 1}, [0, 100, 200, 300, 400, 500, 600, 700, 800, 900]),
        ({"warmup_steps": 20}, [0, 50, 100, 150, 200, 250, 300, 350, 400, 450]),
    ],
)
@pytest.mark.parametrize("kind", ["CosineWithWarmUpLR", "LinearWithWarmUpLR", "ConstantWarmUpLR"])
def test_warm_up_as_long_as_the_run_or_longer(kind, warmup, millionths):
    """PUB2-LR-01, rows a and b: that the rate of the file is never reached is said by parallel-config."""
    rate = build_schedule(kind, 0.001, total_steps=10, options=warmup)
    assert [rate(step) for step in range(10)] == pytest.approx([number * 1e-6 for number in millionths])


@pytest.mark.parametrize(
    ("kind", "options", "named"),
    [
        ("CosineAnnealingLR", {"warmup_steps": 0}, "CosineAnnealingLR"),
        ("ConstantWarmUpLR", {}, "warmup_steps or warmup_ratio"),
        ("ConstantWarmUpLR", {"warmup_steps": -1}, "-1"),
        ("ConstantWarmUpLR", {"warmup_ratio": 1.5}, "1.5"),
        ("ConstantWarmUpLR", {"warmup_stps": 1}, "warmup_stps"),
        ("WarmUpStableDecayLR", {"warmup_steps": 0}, "decay_start_steps"),
        ("WarmUpStableDecayLR", {"warmup_steps": 0, "decay_start_steps": 101}, "101"),
    ],
)
def test_schedule_refuses(kind, options, named):
    with pytest.raises(UserError, match=named):
        schedule(kind, **options)


def test_adamw_equals_the_published_algorithm_one_number_at_a_time():
    generator = np.random.default_rng(0)
    size, steps, (beta1, beta2), eps, weight_decay = 40_000, 3, (0.9, 0.95), 1e-8, 0.1
    values = generator.standard_normal(size)
    decay = generator.random(size) < 0.5
    gradients = [generator.standard_normal(size) * 10.0**-step for step in range(steps)]
    rates = [0.0, 1e-2, 3e-3]
    checked = [0, 1, 2**15 - 1, 2**15, size - 1]
    expected = {}
    for index in checked:
        theta, m, v = float(values[index]), 0.0, 0.0
        for step, (gradient, lr) in enumerate(zip(gradients, rates, strict=True), start=1):
            g = float(gradient[index])
            theta -= lr * weight_decay * theta * bool(decay[index])
            m = beta1 * m + (1 - beta1) * g
            v = beta2 * v + (1 - beta2) * g * g
            theta -= lr * (m / (1 - beta1**step)) / (math.sqrt(v / (1 - beta2**step)) + eps)
        expected[index] = theta
    optimizer = AdamW(values, decay=decay, betas=(beta1, beta2), eps=eps, weight_decay=weight_decay)
    for gradient, lr in zip(gradients, rates, strict=True):
        before = gradient.copy()
        optimizer.step(gradient, lr=lr)
        np.testing.assert_array_equal(gradient, before)
    assert {index: values[index] for index in checked} == pytest.approx(expected, rel=1e-13)


def test_adamw_of_a_rank_that_holds_nothing():
    optimizer = AdamW(np.empty(0, np.float32))
    assert optimizer.step(np.empty(0, np.float32), lr=1e-3)
    assert optimizer.steps == 1


@pytest.mark.parametrize("place", [0, 2**15, 70_000 - 1])
@pytest.mark.parametrize(
    ("value", "gradient", "lr", "weight_decay"),
    [(3e38, -1.0, 3e38, 0.0), (1e10, 0.0, 1.0, 1e30), (1.0, -1.0, 1e39, 0.0)],
    ids=["sum", "decay", "rate beyond float32"],
)
def test_adamw_says_that_an_update_overflowed_in_any_of_its_blocks(place, value, gradient, lr, weight_decay):
    values = np.zeros(70_000, np.float32)
    gradients = np.zeros_like(values)
    values[place], gradients[place] = value, gradient
    optimizer = AdamW(values, weight_decay=weight_decay)
    assert not optimizer.step(gradients, lr=lr)
    assert not np.isfinite(values[place])


def test_adamw_leaves_what_has_no_gradient_where_it_is_and_refuses_to_divide_by_0():
    # PUB2-OPT-01: an id that does not occur has moments of 0.
    for eps in (1e-20, 1e-8):
        values = np.ones(3, np.float32)
        assert AdamW(values, eps=eps, weight_decay=0.0).step(np.array([0.0, 1.0, 1e-30], np.float32), lr=0.5)
        assert (values[0], values[2]) == (1.0, pytest.approx(1.0))
        assert values[1] == pytest.approx(0.5)
    for dtype, eps in (
        ("float32", 0.0),
        ("float32", 1e-50),
        ("float64", 0.0),
        ("float64", -1e-8),
        ("float32", math.nan),
    ):
        with pytest.raises(ValueError, match="eps"):
            AdamW(np.ones(3, dtype), eps=eps)
    AdamW(np.ones(3), eps=1e-50)


@pytest.mark.parametrize(
    ("norm", "max_norm", "expected"),
    [
        (10.0, 5.0, 0.5),
        (5.0, 5.0, 1.0),
        (3.0, 5.0, 1.0),
        (10.0, 0.0, 1.0),
        (10.0, -1.0, 1.0),
        (0.0, 1.0, 1.0),
    ],
)
def test_clip_coefficient(norm, max_norm, expected):
    # PUB-NORM-01: norm 10, max_norm 5 gives 0.5. A max_norm of 0 or less means no clipping.
    assert clip_coefficient(norm, max_norm) == pytest.approx(expected, rel=1e-6)


def test_global_norm_of_one_rank_in_float64():
    alone = connect("single")
    large = np.full(10, 1e25, np.float32)  # its squares overflow float32
    parts = [(np.array([[3.0, 4.0]]), 1), (np.array([12.0], np.float32), 1)]
    assert global_norm(parts, alone) == pytest.approx(13.0)
    assert global_norm([(large, 1)], alone) == pytest.approx(math.sqrt(10) * 1e25)
    assert global_norm([], alone) == 0.0


def test_global_norm_of_more_elements_than_are_squared_at_a_time():
    values = np.random.default_rng(0).standard_normal((3, 30_001)).astype(np.float32)
    expected = math.sqrt(math.fsum(float(value) ** 2 for value in values.reshape(-1)) / 2)
    assert global_norm([(values, 2)], connect("single")) == pytest.approx(expected, rel=1e-13)


@pytest.mark.parametrize("wrong", [math.nan, math.inf, 1e200])
def test_global_norm_says_where_gradients_are_not_finite(wrong):
    values = np.ones(100_000)
    values[70_000:] = wrong
    assert not math.isfinite(global_norm([(values, 1)], connect("single")))
