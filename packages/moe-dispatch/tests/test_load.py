"""Load statistics and their picture."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from moe_dispatch import ExpertLoad


def test_numbers() -> None:
    load = ExpertLoad(4)
    for counts in ([2, 2, 2, 2], [8, 0, 0, 0], [0, 0, 0, 0], [3, 1, 0, 0]):
        load.record(np.array(counts))
    assert load.counts.dtype == np.int64
    assert load.counts.tolist()[3] == [3, 1, 0, 0]
    assert load.shares.tolist() == [[1, 1, 1, 1], [4, 0, 0, 0], [1, 1, 1, 1], [3, 1, 0, 0]]
    assert load.imbalance.tolist() == [1, 4, 1, 3]
    assert load.unused.tolist() == [0, 3, 4, 2]


def test_no_steps() -> None:
    load = ExpertLoad(4)
    assert load.counts.shape == (0, 4)
    assert load.imbalance.shape == load.unused.shape == (0,)
    with pytest.raises(ValueError, match="heat map of 0 steps"):
        load.save_heat_map("never.png")


@pytest.mark.parametrize("counts", [np.zeros(3, np.int64), np.zeros(4), np.array([1, -1, 0, 0])])
def test_wrong_counts(counts: np.ndarray) -> None:
    with pytest.raises(ValueError, match="4 integers of 0 or more"):
        ExpertLoad(4).record(counts)


def test_heat_map(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="needs Matplotlib: pip install 'moe-dispatch[plot]'")
    from matplotlib.image import imread

    even, skewed = ExpertLoad(8), ExpertLoad(8)
    for _ in range(5):
        even.record(np.full(8, 10))
        skewed.record(np.array([80, 0, 0, 0, 0, 0, 0, 0]))
    even.save_heat_map(tmp_path / "even.png")
    skewed.save_heat_map(tmp_path / "skewed.png")
    skewed.save_heat_map(tmp_path / "skewed.svg")
    a, b = (imread(tmp_path / name)[..., :3] for name in ("even.png", "skewed.png"))
    # In the middle of the map is expert 3 or 4: as many rows as the mean, near white; or none, blue.
    middle = tuple(length // 3 for length in a.shape[:2])
    assert a[middle].min() > 0.9
    assert b[middle][2] > b[middle][0] + 0.2
    assert (tmp_path / "skewed.svg").read_text().lstrip().startswith("<?xml")
    with pytest.raises(ValueError, match="webm"):
        even.save_heat_map(tmp_path / "even.webm")
