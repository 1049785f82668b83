"""What `parallel-train verify` says of two traces, without any rank."""

from __future__ import annotations

import math

import numpy as np
import pytest
from attrs import evolve
from parallel_trainer.cli.verify import _compare
from parallel_trainer.trace import Trace

ALONE = Trace(
    plan="1 rank",
    losses=(2.0, math.nan, 1.5),
    grad_norms=(0.5, math.nan, 0.25),
    weights={"w": np.ones(3)},
    other_losses={"balance_loss": (0.1, math.nan, 0.2)},
    tokens_per_expert=np.array([[[3, 1]], [[0, 0]], [[2, 2]]]),
)


def test_steps_that_both_skipped_agree(capsys: pytest.CaptureFixture[str]) -> None:
    assert _compare(ALONE, evolve(ALONE, plan="2 ranks"), "float64")
    assert "Equal within" in capsys.readouterr().out


@pytest.mark.parametrize(
    "changes",
    [
        {"losses": (2.0, 1.9, 1.5)},
        {"grad_norms": (0.5, math.nan, math.nan)},
        {"other_losses": {"balance_loss": (math.nan, math.nan, 0.2)}},
        {"tokens_per_expert": np.array([[[3, 1]], [[2, 2]], [[2, 2]]])},
    ],
)
def test_a_step_that_one_of_them_skipped_is_a_difference(
    changes: dict[str, object], capsys: pytest.CaptureFixture[str]
) -> None:
    assert not _compare(ALONE, evolve(ALONE, **changes), "float64")
    assert "DIFFERENT" in capsys.readouterr().out
