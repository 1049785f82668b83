"""Finding out that we are a rank, and comparing two traces."""

from __future__ import annotations

import numpy as np
import pytest
from parallel_trainer.cli.verify import _compare, largest_weight_difference
from parallel_trainer.launch.mpiexec import started_ranks
from parallel_trainer.trace import Trace


def test_ranks_started_by_a_launcher() -> None:
    assert started_ranks({}) is None
    assert started_ranks({"PMI_SIZE": "4", "PMI_RANK": "1"}) == 4
    assert started_ranks({"OMPI_COMM_WORLD_SIZE": "2"}) == 2


def trace(loss: float = 2.0, norm: float = 1.0, weight: float = 0.5) -> Trace:
    return Trace((3.0, loss), (4.0, norm), {"a": np.array([0.25, 0.125]), "b": np.array([weight, -1.0])})


@pytest.mark.parametrize(
    ("other", "dtype", "equal"),
    [
        (trace(), "float64", True),
        (trace(loss=2.0 + 1e-12), "float64", True),
        (trace(loss=2.0 + 1e-8), "float64", False),
        (trace(norm=1.0 + 1e-8), "float64", False),
        (trace(weight=0.5 + 1e-8), "float64", False),
        (trace(loss=float("nan")), "float64", False),
        (trace(weight=float("nan")), "float64", False),
        (trace(loss=2.0 + 1e-6, norm=1 + 1e-5, weight=0.6), "float32", True),
        (trace(loss=2.0 + 1e-4), "float32", False),
        (trace(norm=1.0 + 1e-3), "float32", False),
    ],
)
def test_verdict(other: Trace, dtype: str, equal: bool, capsys: pytest.CaptureFixture[str]) -> None:
    assert _compare(trace(), other, "2 ranks", dtype) is equal
    assert ("DIFFERENT" in capsys.readouterr().out) is not equal


def test_largest_weight_difference_names_the_weight() -> None:
    name, difference, relative = largest_weight_difference(trace().weights, trace(weight=0.75).weights)
    assert (name, difference, relative) == ("b", 0.25, 0.25)


def test_trace_survives_saving(tmp_path) -> None:
    before = trace(loss=0.1 + 0.2)
    before.save(tmp_path)
    after = Trace.load(tmp_path)
    assert (after.losses, after.grad_norms) == (before.losses, before.grad_norms)
    np.testing.assert_array_equal(after.weights["b"], before.weights["b"])
