"""The mesh's arithmetic: public cases, a peer library's rank lists, brute force, cost, errors."""

from __future__ import annotations

import itertools
import pickle
import sys
import tracemalloc
from collections.abc import Callable

import attrs
import numpy as np
import pytest
from device_mesh import ParallelMesh
from hypothesis import given, settings
from hypothesis import strategies as st
from parallel_config import ParallelPlan


@attrs.frozen
class Sizes:
    """Any object with the six degrees will do as a plan."""

    pp: int = 1
    dp_replicate: int = 1
    dp_shard: int = 1
    cp: int = 1
    tp: int = 1
    ep: int = 1


BASE = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
SINGLES_16 = [[rank] for rank in range(16)]
PAIRS_16 = [[rank, rank + 1] for rank in range(0, 16, 2)]
EIGHTS_APART = [[rank, rank + 8] for rank in range(8)]
FOURS_APART = [[0, 4], [1, 5], [2, 6], [3, 7], [8, 12], [9, 13], [10, 14], [11, 15]]


def groups(mesh: ParallelMesh, axis: str) -> list[list[int]]:
    return mesh.groups(axis).tolist()


def test_pub_mesh_01_all_groups_of_16_ranks() -> None:
    """PUB-MESH-01."""
    plan = ParallelPlan.from_degrees(16, pipeline_parallel=2, context_parallel=2, tensor_parallel=2, expert_parallel=4)
    mesh = ParallelMesh(plan)
    sizes = {axis: mesh.size(axis) for axis in ("batch", "dp_replicate", "dp_shard", "fsdp", "efsdp")}
    assert sizes == {"batch": 2, "dp_replicate": 1, "dp_shard": 2, "fsdp": 4, "efsdp": 2}
    assert groups(mesh, "pp") == EIGHTS_APART
    assert groups(mesh, "dp_replicate") == SINGLES_16
    assert groups(mesh, "fsdp") == [[0, 2, 4, 6], [1, 3, 5, 7], [8, 10, 12, 14], [9, 11, 13, 15]]
    assert groups(mesh, "tp") == PAIRS_16
    assert groups(mesh, "dp_shard") == FOURS_APART
    assert groups(mesh, "cp") == [[0, 2], [1, 3], [4, 6], [5, 7], [8, 10], [9, 11], [12, 14], [13, 15]]
    assert groups(mesh, "efsdp") == FOURS_APART
    assert groups(mesh, "ep") == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11], [12, 13, 14, 15]]


@pytest.mark.parametrize(
    ("degrees", "sizes", "fsdp", "tp"),
    [
        (
            {"data_parallel_shard": 8},
            {"batch": 16, "dp_replicate": 2, "dp_shard": 8, "fsdp": 8},
            [[0, 1, 2, 3, 4, 5, 6, 7], [8, 9, 10, 11, 12, 13, 14, 15]],
            SINGLES_16,
        ),
        (
            {"tensor_parallel": 2, "data_parallel_shard": 4},
            {"batch": 8, "dp_replicate": 2, "dp_shard": 4, "fsdp": 4},
            [[0, 2, 4, 6], [1, 3, 5, 7], [8, 10, 12, 14], [9, 11, 13, 15]],
            PAIRS_16,
        ),
    ],
    ids=["a", "b"],
)
def test_pub_mesh_02_hsdp_shards_inside_the_node(
    degrees: dict[str, int], sizes: dict[str, int], fsdp: list[list[int]], tp: list[list[int]]
) -> None:
    """PUB-MESH-02, rows a and b."""
    mesh = ParallelMesh(ParallelPlan.from_degrees(16, **degrees), ranks_per_node=8)
    assert {axis: mesh.size(axis) for axis in sizes} == sizes
    assert groups(mesh, "fsdp") == fsdp
    assert groups(mesh, "dp_replicate") == EIGHTS_APART
    assert groups(mesh, "tp") == tp
    assert mesh.within_node("fsdp")
    assert not mesh.within_node("dp_replicate")


@pytest.mark.parametrize(
    ("world_size", "degrees", "shards", "shard_of_rank"),
    [
        (8, {"pipeline_parallel": 2, "tensor_parallel": 2}, 2, [0, 0, 1, 1, 0, 0, 1, 1]),
        (
            16,
            {"pipeline_parallel": 2, "context_parallel": 2, "tensor_parallel": 2},
            2,
            [0, 0, 0, 0, 1, 1, 1, 1, 0, 0, 0, 0, 1, 1, 1, 1],
        ),
        (8, {"tensor_parallel": 2, "data_parallel_shard": 2}, 4, [0, 0, 1, 1, 2, 2, 3, 3]),
    ],
    ids=["a", "b", "c"],
)
def test_pub_data_01_which_shard_a_rank_reads(
    world_size: int, degrees: dict[str, int], shards: int, shard_of_rank: list[int]
) -> None:
    """PUB-DATA-01, rows a, b and c."""
    mesh = ParallelMesh(ParallelPlan.from_degrees(world_size, **degrees))
    assert mesh.size("batch") == shards
    assert [mesh.shard_index(rank) for rank in range(world_size)] == shard_of_rank


# Rank lists that HyperParallel (mindspore-ai/hyper-parallel, commit fdd0a808) computes for the same views.
@pytest.mark.parametrize(
    ("sizes", "axis", "expected"),
    [
        (Sizes(dp_shard=8), "fsdp", [[0, 1, 2, 3, 4, 5, 6, 7]]),
        (Sizes(dp_replicate=2, dp_shard=8), "dp_replicate", EIGHTS_APART),
        (Sizes(dp_replicate=2, dp_shard=8), "batch", [list(range(16))]),
        (Sizes(dp_shard=4, tp=2), "fsdp", [[0, 2, 4, 6], [1, 3, 5, 7]]),
        (Sizes(dp_shard=4, tp=2), "batch", [[0, 2, 4, 6], [1, 3, 5, 7]]),
        (Sizes(dp_shard=4, tp=2), "loss", [[0, 2, 4, 6], [1, 3, 5, 7]]),
        (Sizes(dp_shard=4, cp=2), "batch", [[0, 2, 4, 6], [1, 3, 5, 7]]),
        (Sizes(dp_shard=4, cp=2), "loss", [[0, 1, 2, 3, 4, 5, 6, 7]]),
        (Sizes(dp_shard=2, cp=2, tp=2), "dp_shard", [[0, 4], [1, 5], [2, 6], [3, 7]]),
        (Sizes(dp_shard=2, cp=2, tp=2), "cp", [[0, 2], [1, 3], [4, 6], [5, 7]]),
        (Sizes(dp_shard=2, cp=2, tp=2), "fsdp", [[0, 2, 4, 6], [1, 3, 5, 7]]),
        (Sizes(dp_shard=2, tp=4), "fsdp", [[0, 4], [1, 5], [2, 6], [3, 7]]),
        (Sizes(dp_shard=2, tp=4), "tp", [[0, 1, 2, 3], [4, 5, 6, 7]]),
    ],
)
def test_rank_lists_of_a_peer(sizes: Sizes, axis: str, expected: list[list[int]]) -> None:
    assert groups(ParallelMesh(sizes), axis) == expected


def by_brute_force(sizes: Sizes) -> dict[str, dict[int, int]]:
    """Each rank's index on each axis, by listing the world in nested loops."""
    index: dict[str, dict[int, int]] = {}
    positions = itertools.product(*(range(getattr(sizes, axis)) for axis in BASE))
    for rank, (pp, dp_replicate, dp_shard, cp, tp) in enumerate(positions):
        in_replica = (dp_shard * sizes.cp + cp) * sizes.tp + tp
        batch = dp_replicate * sizes.dp_shard + dp_shard
        values = {
            "pp": pp,
            "dp_replicate": dp_replicate,
            "dp_shard": dp_shard,
            "cp": cp,
            "tp": tp,
            "batch": batch,
            "fsdp": dp_shard * sizes.cp + cp,
            "efsdp": in_replica // sizes.ep,
            "ep": in_replica % sizes.ep,
            "loss": batch * sizes.cp + cp,
            "world": rank,
        }
        for axis, value in values.items():
            index.setdefault(axis, {})[rank] = value
    return index


@st.composite
def any_sizes(draw: st.DrawFn) -> Sizes:
    small = st.sampled_from([1, 2, 3, 4])
    degrees = {axis: draw(small) for axis in BASE}
    replica = degrees["dp_shard"] * degrees["cp"] * degrees["tp"]
    return Sizes(**degrees, ep=draw(st.sampled_from([n for n in range(1, replica + 1) if replica % n == 0])))


@given(any_sizes(), st.integers(1, 40))
@settings(max_examples=60, deadline=None)
def test_everything_agrees_with_listing_the_world(sizes: Sizes, ranks_per_node: int) -> None:
    mesh = ParallelMesh(sizes, ranks_per_node=ranks_per_node)
    index = by_brute_force(sizes)
    assert set(mesh.axes) == set(index)
    world = range(len(index["world"]))
    assert mesh.world_size == len(world)
    assert {view: int(np.prod([mesh.size(axis) for axis in axes])) for view, axes in mesh.views.items()} == (
        dict.fromkeys(mesh.views, len(world))
    )
    views = {axis: next(axes for axes in mesh.views.values() if axis in axes) for axis in mesh.axes}
    for rank in world:
        assert mesh.coordinate(rank) == {axis: index[axis][rank] for axis in mesh.axes}
    for axis in mesh.axes:
        others = [other for other in views[axis] if other != axis]
        expected: dict[tuple[int, ...], list[int]] = {}
        for rank in world:
            expected.setdefault(tuple(index[other][rank] for other in others), []).append(rank)
        assert groups(mesh, axis) == sorted(expected.values())
        for group in expected.values():
            assert all(mesh.group(axis, rank) == tuple(group) for rank in group)
        nodes = [{rank // ranks_per_node for rank in group} for group in expected.values()]
        assert mesh.within_node(axis) == all(len(node) == 1 for node in nodes), axis


def lines_run(action: Callable[[], None]) -> int:
    """How many lines of Python an action takes, in whatever it calls: the same on every machine, as time is not."""
    count = 0

    def seen(frame: object, event: str, argument: object) -> object:
        nonlocal count
        count += event == "line"
        return seen

    before = sys.gettrace()
    sys.settrace(seen)
    try:
        action()
    finally:
        sys.settrace(before)
    return count


def test_all_groups_of_16384_ranks_are_made_without_going_through_the_ranks() -> None:
    def everything() -> None:
        mesh = ParallelMesh(Sizes(pp=4, dp_replicate=4, dp_shard=32, cp=4, tp=8, ep=64))
        assert mesh.world_size == 16_384
        for axes in mesh.views.values():
            for axis in axes:
                mesh.groups(axis)

    assert lines_run(everything) < 16_384 / 4


def test_a_query_costs_the_same_at_any_world_size() -> None:
    def queries(mesh: ParallelMesh) -> None:
        for rank in range(0, mesh.world_size, mesh.world_size // 8):
            mesh.coordinate(rank)
            mesh.group("tp", rank)

    small = lines_run(lambda: queries(ParallelMesh(Sizes(pp=2, tp=4))))
    large_mesh = Sizes(pp=8, dp_replicate=16, dp_shard=64, cp=4, tp=4)
    assert ParallelMesh(large_mesh).world_size == 131_072
    tracemalloc.start()
    large = lines_run(lambda: queries(ParallelMesh(large_mesh)))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert large < 2 * small
    assert peak < 131_072


def test_meshes_are_values() -> None:
    sizes = Sizes(dp_shard=4, tp=2)
    assert ParallelMesh(sizes) == ParallelMesh(sizes)
    assert len({ParallelMesh(sizes), ParallelMesh(sizes), ParallelMesh(sizes, ranks_per_node=4)}) == 2
    assert ParallelMesh(sizes) != ParallelMesh(Sizes(dp_shard=2, tp=4))
    assert pickle.loads(pickle.dumps(ParallelMesh(sizes))) == ParallelMesh(sizes)
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        ParallelMesh(sizes).world_size = 3  # type: ignore[misc]


def test_groups_are_an_array() -> None:
    table = ParallelMesh(Sizes(dp_shard=4, tp=2)).groups("fsdp")
    assert (table.shape, table.dtype) == ((2, 4), np.int64)


@pytest.mark.parametrize("axis", ["dp", "TP", "", None, ("dp_shard", "cp")])
def test_unknown_axis_lists_the_axes(axis: str) -> None:
    mesh = ParallelMesh(Sizes(dp_shard=2))
    for query in (mesh.size, mesh.groups, lambda axis: mesh.group(axis, 0)):
        with pytest.raises(ValueError, match=r"unknown mesh axis .*: a mesh has the axes pp, dp_rep"):
            query(axis)


@pytest.mark.parametrize("rank", [-1, 8, 1_000_000])
def test_rank_outside_the_world(rank: int) -> None:
    mesh = ParallelMesh(Sizes(dp_shard=8))
    for query in (mesh.coordinate, mesh.shard_index, lambda rank: mesh.group("tp", rank)):
        with pytest.raises(ValueError, match=rf"rank {rank} is outside the mesh: ranks go from 0 to 7"):
            query(rank)


@pytest.mark.parametrize("name", ["pp", "tp", "ep"])
def test_degrees_must_be_positive_ints(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} = 0 must be at least 1"):
        ParallelMesh(Sizes(**{name: 0}))
    for value in (2.0, "2", True, None):
        with pytest.raises(TypeError, match=f"{name} = {value!r} must be an int"):
            ParallelMesh(Sizes(**{name: value}))  # type: ignore[arg-type]


def test_ep_must_divide_a_replica() -> None:
    with pytest.raises(ValueError, match=r"ep = 3 .* must divide .* = 2 x 2 x 2 = 8; use one of 1, 2, 4, 8"):
        ParallelMesh(Sizes(dp_replicate=3, dp_shard=2, cp=2, tp=2, ep=3))


def test_within_node_needs_a_node() -> None:
    with pytest.raises(ValueError, match=r"within_node\('tp'\) needs .* ranks_per_node=8"):
        ParallelMesh(Sizes(tp=2)).within_node("tp")
    with pytest.raises(ValueError, match="ranks_per_node = 0 must be at least 1"):
        ParallelMesh(Sizes(tp=2), ranks_per_node=0)
