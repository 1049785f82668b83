"""What the mindspore backend refuses on CPUs; what it does there, the cases of rank_cases/ test."""

from __future__ import annotations

import re

import numpy as np
import pytest
from device_mesh.engine import Group
from device_mesh.mccl import Mccl
from device_mesh.mindspore_backend import MindSporeCommunicator


def test_an_exchange_of_sizes_that_do_not_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other rank gives what this one gives: a row to each."""

    def gather(engine: Mccl, x: np.ndarray, rows: np.ndarray, group: Group) -> None:
        rows[...] = x

    monkeypatch.setattr(Mccl, "_gather", gather)
    world = MindSporeCommunicator(Mccl(0, {"world"}), Group("world", (0, 1), "world"), 0, (0, 1))
    x = np.array([5.0, 6.0])
    assert world.all_to_all(x, send_sizes=[1, 1], receive_sizes=[1, 1]).tolist() == [5, 5]
    said = "rank 0 expects [16, 8] bytes from the ranks (0, 1), which send it [8, 8]: its receive_sizes must be"
    with pytest.raises(ValueError, match=re.escape(said)):
        world.all_to_all(x, send_sizes=[1, 1], receive_sizes=[2, 1])
    with pytest.raises(ValueError, match=re.escape(said)):
        world.iall_to_all(x, send_sizes=[1, 1], receive_sizes=[2, 1], out=np.empty(3))
