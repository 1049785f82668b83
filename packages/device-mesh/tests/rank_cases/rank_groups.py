"""Messages between two ranks, and groups of ranks."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
from device_mesh import AxisCommunicators, Communicator, ParallelMesh
from rank_support import (
    DTYPES,
    LAYOUTS,
    SEVERAL,
    case,
    check_equal,
    make,
    raises,
)


@case(DTYPES, worlds=SEVERAL)
def ring_of_messages(comm: Communicator, dtype: str) -> None:
    after, before = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    out = np.empty((3, 2), dtype)
    request = comm.isend(LAYOUTS["transposed"](make(comm.rank, (3, 2), dtype)), after)
    assert comm.recv(out, before) is out
    request.wait()
    check_equal(out, make(before, (3, 2), dtype), dtype)
    out[:] = 0
    receiving = comm.irecv(out, before)
    comm.send(make(comm.rank, (3, 2), dtype, salt=1), after)
    while not receiving.done():
        pass
    assert receiving.done()
    receiving.wait()
    check_equal(out, make(before, (3, 2), dtype, salt=1), dtype)


@case(worlds=SEVERAL)
def tags_tell_messages_apart(comm: Communicator) -> None:
    if comm.rank == 0:
        requests = [comm.isend(np.array([tag]), 1, tag=tag) for tag in (1, 2)]
        for request in requests:
            request.wait()
    if comm.rank == 1:
        second, first = (comm.recv(np.zeros(1, np.int64), 0, tag=tag) for tag in (2, 1))
        assert (first[0], second[0]) == (1, 2)


@case(worlds=SEVERAL)
def message_of_a_wrong_size(comm: Communicator) -> None:
    if comm.rank == 0:
        comm.send(np.zeros(3), 1)
    if comm.rank == 1:
        sender, receiver = comm.ranks[0], comm.ranks[1]
        with raises(ValueError, f"rank {receiver} from {sender}", "24 bytes", "32 bytes"):
            comm.recv(np.zeros(4), 0)


@case()
def message_to_nobody(comm: Communicator) -> None:
    for peer in (comm.rank, comm.size, -1):
        for call in (comm.send, comm.recv, comm.isend, comm.irecv):
            with raises(ValueError, f"with rank {peer}"):
                call(np.zeros(1), peer)


@case()
def split_by_color_and_key(comm: Communicator) -> None:
    half = comm.split(comm.rank % 2, key=-comm.rank)
    members = [rank for rank in range(comm.size) if rank % 2 == comm.rank % 2][::-1]
    assert half.ranks == tuple(comm.ranks[member] for member in members)
    assert (half.size, half.rank) == (len(members), members.index(comm.rank))
    check_equal(half.all_gather(np.array([comm.rank])), np.array(members), "int64")
    again = half.split(0)
    assert again.ranks == tuple(sorted(half.ranks, reverse=True))
    with raises(ValueError, "color -1"):
        comm.split(-1)


@case()
def subgroup_without_the_others(comm: Communicator) -> None:
    chosen = tuple(range(0, comm.size, 2))
    if comm.rank in chosen:
        group = comm.subgroup(chosen)
        assert group.ranks == tuple(comm.ranks[member] for member in chosen)
        check_equal(group.all_reduce(np.array([comm.rank])), np.array([sum(chosen)]), "int64")
    else:
        with raises(ValueError, "only the listed ranks"):
            comm.subgroup(chosen)
    with raises(ValueError, "each once"):
        comm.subgroup((comm.rank, comm.rank))


@case(({"dp_shard": 2, "cp": 2, "tp": 2, "ep": 4}, {"pp": 2, "dp_replicate": 2, "tp": 2}, {"dp_shard": 4}))
def communicators_by_axis(comm: Communicator, degrees: dict[str, int]) -> None:
    whole = {"pp": 1, "dp_replicate": 1, "dp_shard": 1, "cp": 1, "tp": 1, "ep": 1} | degrees
    mesh = ParallelMesh(SimpleNamespace(**whole))
    if comm.size != mesh.world_size:
        with raises(ValueError, f"{comm.size} ranks were started", f"multiply to {mesh.world_size}"):
            AxisCommunicators(mesh, comm)
        return
    comms = AxisCommunicators(mesh, comm)
    for axis in mesh.axes:
        group = mesh.group(axis, comm.rank)
        assert comms[axis] is comms[axis]
        check_equal(comms[axis].all_gather(np.array([comm.rank])), np.array(group), "int64")
    assert comms["world"] is comm
    assert comms["dp_shard"] is comms["dp_shard" if degrees.get("cp", 1) > 1 else "fsdp"]
    with raises(ValueError, "unknown mesh axis 'dp'", "dp_replicate, dp_shard"):
        comms["dp"]


@case(worlds=(4, 8))
def axes_used_by_some_ranks_only(comm: Communicator) -> None:
    mesh = ParallelMesh(SimpleNamespace(pp=1, dp_replicate=1, dp_shard=comm.size // 2, cp=1, tp=2, ep=1))
    comms = AxisCommunicators(mesh, comm)
    if mesh.coordinate(comm.rank)["dp_shard"] == 0:
        check_equal(comms["tp"].all_reduce(np.array([1])), np.array([2]), "int64")
    if mesh.coordinate(comm.rank)["tp"] == 1:
        check_equal(comms["dp_shard"].all_reduce(np.array([1])), np.array([comm.size // 2]), "int64")
