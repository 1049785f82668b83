"""Whatever the text, the outcome is a configuration or a ConfigError."""

from __future__ import annotations

import random
import warnings
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from parallel_config import ConfigError, ConfigWarning, loads, plan, read, repairs

SHIPPED = (Path(__file__).parent / "data" / "pretrain_deepseek3_1b_8p_pynative.yaml").read_text()

scalars = st.sampled_from(
    [
        "1",
        "-1",
        "0",
        "2.5",
        "true",
        "no",
        "null",
        "~",
        "auto",
        "'x'",
        "1e-5",
        "010",
        "[]",
        "{}",
        "[0-1, 2]",
        "&a b",
        "*a",
        "!!int 3",
    ]
)
keys = st.sampled_from(
    [
        "tensor_parallel",
        "pipeline_parallel",
        "pipeline_parallel_layers_per_stage",
        "expert_parallel",
        "global_batch_size",
        "betas",
        "dataloader",
        "config",
        "type",
        "layers",
        "x",
        "<<",
        "1",
        "mode",
    ]
)
sections = st.sampled_from(
    [
        "parallelism",
        "training",
        "model",
        "train_dataset",
        "eval_dataset",
        "optimizer",
        "callbacks",
        "recompute",
        "swap",
        "monitor",
        "nothing",
    ]
)


def outcome(text: str) -> None:
    """Load and plan; anything but a ConfigError propagates and fails the test."""
    failure = None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConfigWarning)
        try:
            plan(loads(text), 8)
        except ConfigError as error:
            failure = error
    if failure is not None:
        assert failure.problems
        assert str(failure)
        assert all(problem.suggestion for problem in failure.problems)


@settings(max_examples=150, deadline=None)
@given(st.text(max_size=200))
def test_any_text(text: str) -> None:
    outcome(text)


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(sections, st.lists(st.tuples(keys, scalars), max_size=5)), max_size=5))
def test_any_sections(content: list[tuple[str, list[tuple[str, str]]]]) -> None:
    lines = []
    for section, fields in content:
        lines.append(f"{section}:")
        lines += [f"  {key}: {value}" for key, value in fields]
    outcome("\n".join(lines))


@pytest.mark.parametrize("seed", range(100))
def test_any_damage_to_a_real_file(seed: int) -> None:
    rng = random.Random(seed)
    text = SHIPPED
    for _ in range(rng.randint(1, 3)):
        at = rng.randrange(len(text))
        damage = rng.choice(["", "\t", ":", "\n", "- ", "[", "}", "'", '"', "&", "*", "!", "#", "x", "0", "é", "\x01"])
        text = text[:at] + damage + text[at + rng.randint(0, 3) :]
    outcome(text)
    assert isinstance(repairs(read(text, "run.yaml"), 8), tuple)
