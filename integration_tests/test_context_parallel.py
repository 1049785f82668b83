"""What context-parallel attention must have given on its own: `context_checks.py` ran it."""

from __future__ import annotations

from typing import Any

import pytest

Reports = dict[int, dict[str, Any]]
TOLERANCE = {"float64": 1e-12, "float32": 1e-5}


@pytest.mark.parametrize("world", [2, 4, 8])
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_every_method_gives_dense_attention_and_its_gradients(reports: Reports, world: int, dtype: str) -> None:
    found = reports[world]["checks"]["attention_everywhere"]
    judged = {name: difference for name, difference in found.items() if name.endswith(dtype)}
    methods = {2: 4, 4: 6, 8: 8}[world]
    assert len(judged) == {"float64": 14, "float32": 6}[dtype] * methods
    assert {name: difference for name, difference in judged.items() if not difference <= TOLERANCE[dtype]} == {}


@pytest.mark.parametrize("world", [2, 4, 8])
def test_blocks_in_which_a_query_sees_nothing_change_nothing(reports: Reports, world: int) -> None:
    found = reports[world]["checks"]["empty_blocks"]
    assert len(found) == {2: 4, 4: 6, 8: 8}[world]
    assert {name: difference for name, difference in found.items() if not difference <= 1e-13} == {}


def test_memory_of_the_ring_does_not_grow_with_the_ranks(reports: Reports) -> None:
    four, eight = (reports[world]["checks"]["ring_memory"] for world in (4, 8))
    # Gathering holds every rank's block. The ring's two come with the output so far, the part that is merged into it,
    # what becomes of both and a temporary of that, half a block each; in backward with two blocks of gradients and what
    # this rank adds to them.
    for world, found in ((4, four), (8, eight)):
        assert found["gathered"][0] > world
        assert found["ring"][0] < 2 + 4 / 2 + 0.1
        assert found["ring"][1] < 2 + 2 + 4
    assert eight["gathered"][1] > four["gathered"][1] + 4
    assert eight["ring"] == pytest.approx(four["ring"], rel=0.02)
