"""Messages between two ranks, and groups of ranks."""

from __future__ import annotations

from types import SimpleNamespace
from unittest.mock import patch

import numpy as np
from device_mesh import AxisCommunicators, Communicator, ParallelMesh
from rank_support import (
    DTYPES,
    LAYOUTS,
    SEVERAL,
    WITH_EACH_WAIT,
    case,
    check_equal,
    make,
    raises,
    type_of,
)


@case(DTYPES, worlds=SEVERAL, mccl=(2,))
def ring_of_messages(comm: Communicator, dtype: str) -> None:
    after, before = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    out = np.empty((3, 2), type_of(dtype))
    request = comm.isend(LAYOUTS["transposed"](make(comm.rank, (3, 2), dtype)), after)
    assert comm.recv(out, before) is out
    request.wait()
    check_equal(out, make(before, (3, 2), dtype), dtype)
    receiving = comm.irecv(out, before)
    comm.send(make(comm.rank, (3, 2), dtype, salt=1), after)
    receiving.wait()
    assert receiving.done()
    receiving.wait()
    check_equal(out, make(before, (3, 2), dtype, salt=1), dtype)


@case(worlds=SEVERAL, mccl=())
def message_that_is_polled(comm: Communicator) -> None:
    out = np.empty(1)
    receiving = comm.irecv(out, (comm.rank - 1) % comm.size)
    comm.send(np.full(1, float(comm.rank)), (comm.rank + 1) % comm.size)
    while not receiving.done():
        pass
    assert receiving.done()
    check_equal(out, np.full(1, (comm.rank - 1) % comm.size), "float64")


@case(worlds=SEVERAL)
def messages_of_a_pair_in_both_directions(comm: Communicator) -> None:
    """Each rank of a pair sends to the other before it receives; two receives alike get what was sent in its order."""
    peer = comm.rank ^ 1
    if peer < comm.size:
        outs = [np.empty(2), np.empty(2), np.empty((0, 3))]
        receiving = [comm.irecv(out, peer) for out in outs]
        sending = [comm.isend(x, peer) for x in (np.full(2, float(comm.rank)), np.full(2, -1.0), np.empty((0, 3)))]
        for request in [*reversed(receiving), *sending]:
            request.wait()
        check_equal(outs[0], np.full(2, peer), "float64")
        check_equal(outs[1], np.full(2, -1), "float64")


@case(worlds=SEVERAL)
def tags_tell_messages_apart(comm: Communicator) -> None:
    if comm.rank == 0:
        requests = [comm.isend(np.array([tag]), 1, tag=tag) for tag in (1, 2)]
        for request in requests:
            request.wait()
    if comm.rank == 1:
        second, first = (comm.recv(np.zeros(1, np.int64), 0, tag=tag) for tag in (2, 1))
        assert (first[0], second[0]) == (1, 2)


@case((3, 5, 1_000_000), worlds=SEVERAL, modes=WITH_EACH_WAIT)
def message_of_a_wrong_size(comm: Communicator, length: int) -> None:
    """Too short, too long, and so long that MPI sends it in another way."""
    if comm.rank == 0:
        for _ in range(2):
            comm.send(np.zeros(length), 1)
        comm.send(np.ones(4), 1)
    if comm.rank == 1:
        parts = wrong_size(comm, length)
        with raises(ValueError, *parts):
            comm.recv(np.zeros(4), 0)
        waited = comm.irecv(np.zeros(4), 0)
        for call in (waited.wait, waited.wait, waited.done):
            with raises(ValueError, *parts):
                call()
        check_equal(comm.recv(np.zeros(4), 0), np.ones(4), "float64")


@case((3, 5, 1_000_000), worlds=SEVERAL, modes=WITH_EACH_WAIT, mccl=())
def polled_message_of_a_wrong_size(comm: Communicator, length: int) -> None:
    if comm.rank == 0:
        comm.send(np.zeros(length), 1)
    if comm.rank == 1:
        parts = wrong_size(comm, length)
        polled = comm.irecv(np.zeros(4), 0)
        with raises(ValueError, *parts):
            while not polled.done():
                pass
        for call in (polled.done, polled.wait):
            with raises(ValueError, *parts):
                call()


def wrong_size(comm: Communicator, length: int) -> tuple[str, ...]:
    """What is said of so many numbers from rank 0 where rank 1 expects four; MPI does not know how long it was."""
    given = "24 bytes" if length == 3 else "bytes"
    return f"rank {comm.ranks[1]} from {comm.ranks[0]} has", given, "shape (4,)", "float64, 32 bytes"


@case()
def message_to_nobody(comm: Communicator) -> None:
    for peer in (comm.rank, comm.size, -1):
        for call in (comm.send, comm.recv, comm.isend, comm.irecv):
            with raises(ValueError, f"with rank {peer}"):
                call(np.zeros(1), peer)


@case(modes=WITH_EACH_WAIT)
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


@case(worlds=SEVERAL)
def collectives_of_ranks_in_another_order(comm: Communicator) -> None:
    """The last rank first, then the others: an order that is neither the world's nor its own inverse."""
    size = comm.size
    group = comm.split(0, key=(comm.rank + 1) % size)
    order = [size - 1, *range(size - 1)]
    assert group.ranks == tuple(comm.ranks[member] for member in order)
    rank, sizes = group.rank, [member + 1 for member in order]
    check_equal(group.all_gather(np.full(sizes[rank], comm.rank), sizes=sizes), np.repeat(order, sizes), "int64")
    ramp = np.arange(sum(sizes))
    start = sum(sizes[:rank])
    check_equal(group.reduce_scatter(ramp, sizes=sizes), size * ramp[start : start + sizes[rank]], "int64")
    exchanged = group.all_to_all(ramp + 100 * rank, send_sizes=sizes, receive_sizes=[sizes[rank]] * size)
    own = ramp[start : start + sizes[rank]]
    check_equal(exchanged, np.concatenate([own + 100 * source for source in range(size)]), "int64")
    gathered, summed, swapped = np.empty(size, np.int64), np.empty(1, np.int64), np.empty(size, np.int64)
    requests = [
        group.iall_gather(np.array([comm.rank]), out=gathered),
        group.ireduce_scatter(np.array(order), out=summed),
        group.iall_to_all(np.arange(size) + 100 * rank, out=swapped),
    ]
    for request in reversed(requests):
        request.wait()
    check_equal(gathered, np.array(order), "int64")
    check_equal(summed, np.array([size * comm.rank]), "int64")
    check_equal(swapped, 100 * np.arange(size) + rank, "int64")
    check_equal(group.broadcast(np.array([comm.rank]), 0), np.array([size - 1]), "int64")
    if rank == 0:
        check_equal(group.recv(np.empty(1), size - 1), np.full(1, 7), "float64")
    if rank == size - 1:
        group.send(np.full(1, 7.0), 0)


@case(worlds=(2, 4), modes=())
def groups_made_in_different_orders(comm: Communicator) -> None:
    """On a ring, every rank first makes its group with the rank after it: if that waited, as in MPI, nobody could."""
    before, after = (comm.rank - 1) % comm.size, (comm.rank + 1) % comm.size
    forward = comm.subgroup((comm.rank, after), tag=comm.rank)
    backward = comm.subgroup((before, comm.rank), tag=before)
    for group in (forward, backward) if comm.rank % 2 == 0 else (backward, forward):
        check_equal(group.all_gather(np.array([comm.rank])), np.array(group.ranks), "int64")


@case(({"dp_shard": 4}, {"dp_shard": 2, "cp": 2, "tp": 2, "ep": 4}, {"pp": 2, "dp_replicate": 2, "tp": 2}))
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


@case(worlds=(4, 8))
def one_group_by_different_names(comm: Communicator) -> None:
    """Without context parallelism, fsdp and dp_shard are the same ranks; so are loss and batch."""
    mesh = ParallelMesh(SimpleNamespace(pp=1, dp_replicate=1, dp_shard=2, cp=1, tp=comm.size // 2, ep=1))
    comms = AxisCommunicators(mesh, comm)
    position = mesh.coordinate(comm.rank)["dp_shard"]
    group = comms["fsdp" if position == 0 else "dp_shard"]
    check_equal(group.all_gather(np.array([comm.rank])), np.array(mesh.group("fsdp", comm.rank)), "int64")
    assert comms["fsdp"] is comms["dp_shard"] is comms["loss"] is group


@case(worlds=(8,), modes=("plain",))
def wait_by_the_cores_of_a_node(comm: Communicator) -> None:
    """Ranks bound to a core each hold it; any crowded node makes all ranks of the job give way."""
    from device_mesh import waiting
    from mpi4py import MPI

    def chosen(*cores: int, nodes: int = 1) -> waiting.Wait:
        """What rank r chooses when it may use the cores `cores` and the ranks lie on so many nodes."""
        node = MPI.COMM_WORLD.Split(comm.rank * nodes // comm.size)
        with patch("os.sched_getaffinity", lambda process: set(cores)):
            wait = waiting.choose(MPI.COMM_WORLD, node)
        node.Free()
        return wait

    rank, half = comm.rank, comm.rank // 4
    assert chosen(rank) is waiting.hold_core
    assert chosen(*range(8)) is waiting.hold_core
    assert chosen(*range(7)) is waiting.give_way
    assert chosen(rank // 2) is waiting.give_way
    assert chosen(0) is waiting.give_way
    assert chosen(rank % 4, nodes=2) is waiting.hold_core
    assert chosen(rank % 4 if half == 0 else rank % 2, nodes=2) is waiting.give_way
