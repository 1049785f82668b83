"""What ranks that share experts must have done: `expert_checks.py` ran it."""

from __future__ import annotations

from typing import Any

import pytest
from cases import GLOBAL_BATCH, SEQ_LENGTH

Reports = dict[int, dict[str, Any]]


@pytest.mark.parametrize("world", [2, 4])
def test_a_step_whose_router_is_not_finite_ends_and_moves_neither_weights_nor_biases(
    reports: Reports, world: int
) -> None:
    found = reports[world]["checks"]["router_that_is_not_finite"]
    assert found["updated"] == [False, True]
    assert found["ranks that changed"] == 0
    # Two choices for each token, in one layer and in the one that predicts further.
    assert found["choices"] == [2 * GLOBAL_BATCH * SEQ_LENGTH] * 2
    assert found["largest move of a bias"] == pytest.approx(0.02)  # moe_router_bias_update_rate, once
