"""Collectives against NumPy."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from typing import Any

import numpy as np
from device_mesh import Communicator, Traffic
from rank_support import (
    DTYPES,
    FLOATS,
    LAYOUTS,
    REDUCTIONS,
    WITH_EACH_WAIT,
    case,
    check_equal,
    everyone,
    make,
    raises,
    reduced,
    type_of,
    uneven,
)


@case(DTYPES, tuple(REDUCTIONS), mccl=(2,))
def all_reduce(comm: Communicator, dtype: str, op: str) -> None:
    expected = reduced(everyone(comm, (5, 3), dtype), op)
    check_equal(comm.all_reduce(make(comm.rank, (5, 3), dtype), op), expected, dtype, exact=op != "sum")


@case(("max", "min"))
def all_reduce_of_bool(comm: Communicator, op: str) -> None:
    stacked = np.stack([np.arange(9) % (rank + 2) == 0 for rank in range(comm.size)])
    expected = stacked.any(axis=0) if op == "max" else stacked.all(axis=0)
    check_equal(comm.all_reduce(stacked[comm.rank], op), expected, "bool")
    with raises(TypeError, "cannot sum bool"):
        comm.all_reduce(stacked[comm.rank])


@case(tuple(LAYOUTS), ((4, 3), (3, 2, 2), (0, 3), (3, 0)), mccl=(2,))
def any_layout(comm: Communicator, layout: str, shape: tuple[int, ...]) -> None:
    stacked = everyone(comm, shape, "float64")
    x = LAYOUTS[layout](stacked[comm.rank])
    check_equal(comm.all_reduce(x), stacked.sum(axis=0), "float64", exact=False)
    check_equal(comm.all_gather(x), np.concatenate(list(stacked)), "float64")
    tall = np.concatenate([stacked] * comm.size, axis=1)
    rows = slice(comm.rank * shape[0], (comm.rank + 1) * shape[0])
    own = LAYOUTS[layout](tall[comm.rank])
    check_equal(comm.reduce_scatter(own), tall.sum(axis=0)[rows], "float64", exact=False)
    check_equal(comm.all_to_all(own), np.concatenate(list(tall[:, rows])), "float64")
    check_equal(comm.broadcast(x, comm.size - 1), stacked[-1], "float64")


@case(modes=("plain",))
def traffic_is_counted_and_changes_nothing(comm: Communicator) -> None:
    n, traffic = comm.size, Traffic()
    counted = traffic.count(comm, "all")
    rows = list(range(1, n + 1))
    x = np.ones((n, 4))
    check_equal(counted.all_reduce(x), np.full((n, 4), n), "float64", exact=False)
    counted.all_gather(np.ones((rows[comm.rank], 2)), sizes=rows)
    gathering = counted.iall_gather(np.ones(3), out=np.empty(3 * n))
    counted.reduce_scatter(np.ones(sum(rows)), sizes=rows)
    counted.all_to_all(x)
    counted.all_to_all(np.ones(sum(rows)), send_sizes=rows, receive_sizes=[rows[comm.rank]] * n)
    counted.broadcast(x, 0)
    own = rows[comm.rank]
    receive = [own] * n
    scattering = counted.ireduce_scatter(np.ones(sum(rows)), sizes=rows, out=np.empty(own))
    counted.iall_to_all(np.ones(sum(rows)), send_sizes=rows, receive_sizes=receive, out=np.empty(n * own)).wait()
    for request in (gathering, scattering, gathering):
        request.wait()
    ends = [moment.call.operation for moment in traffic.moments if moment.what == "end"]
    assert ends[-3:] == ["all_to_all", "all_gather", "reduce_scatter"]
    assert len(traffic.moments) == 2 * len(traffic.calls)
    expected = [
        round(2 * 32 * (n - 1)),
        16 * (sum(rows) - own),
        24 * (n - 1),
        8 * own * (n - 1),
        32 * (n - 1),
        8 * own * (n - 1),
        0 if comm.rank == 0 else 32 * n,
        8 * own * (n - 1),
        8 * own * (n - 1),
    ]
    assert [call.received_bytes for call in traffic.calls] == expected
    if n > 1:
        before, after = (comm.rank - 1) % n, (comm.rank + 1) % n
        request = counted.isend(x, after)
        counted.recv(np.empty_like(x), before)
        request.wait()
        assert [(call.operation, call.received_bytes) for call in traffic.calls[-2:]] == [("send", 0), ("recv", 32 * n)]
    assert {call.group for call in traffic.calls} == {"all"}


@case(DTYPES, modes=WITH_EACH_WAIT)
def all_gather_under_way(comm: Communicator, dtype: str) -> None:
    """Two at a time, finished in the other order; the second only polled."""
    first, second = everyone(comm, (4, 3), dtype), everyone(comm, (2,), dtype)
    outs = [np.empty((comm.size * len(x[0]), *x.shape[2:]), type_of(dtype)) for x in (first, second)]
    requests = [
        comm.iall_gather(LAYOUTS["transposed"](first[comm.rank]), out=outs[0]),
        comm.iall_gather(second[comm.rank], out=outs[1]),
    ]
    while not requests[1].done():
        pass
    requests[0].wait()
    requests[0].wait()
    check_equal(outs[0], np.concatenate(list(first)), dtype)
    check_equal(outs[1], np.concatenate(list(second)), dtype)
    with raises(ValueError, "iall_gather", "shape"):
        comm.iall_gather(first[comm.rank], out=np.empty((1, 1), type_of(dtype)))


@case(DTYPES, modes=WITH_EACH_WAIT)
def reduce_scatter_under_way(comm: Communicator, dtype: str) -> None:
    """Uneven and even at a time, another call between; the first only polled. Equal to the blocking form to the bit."""
    sizes = uneven(comm.size)
    first, second = everyone(comm, (sum(sizes), 3), dtype), everyone(comm, (2 * comm.size,), dtype)
    outs = [np.empty((sizes[comm.rank], 3), type_of(dtype)), np.empty(2, type_of(dtype))]
    requests = [
        comm.ireduce_scatter(LAYOUTS["transposed"](first[comm.rank]), sizes=sizes, out=outs[0]),
        comm.ireduce_scatter(second[comm.rank], "max", out=outs[1]),
    ]
    blocking = comm.reduce_scatter(first[comm.rank], sizes=sizes)
    requests[1].wait()
    while not requests[0].done():
        pass
    requests[0].wait()
    np.testing.assert_array_equal(outs[0], blocking)
    start = sum(sizes[: comm.rank])
    check_equal(outs[0], reduced(first, "sum")[start : start + sizes[comm.rank]], dtype, exact=False)
    check_equal(outs[1], reduced(second, "max")[2 * comm.rank : 2 * comm.rank + 2], dtype)
    with raises(ValueError, "ireduce_scatter", "shape"):
        comm.ireduce_scatter(second[comm.rank], out=np.empty(3, type_of(dtype)))


@case(modes=WITH_EACH_WAIT)
def all_gather_and_all_to_all_of_different_sizes_under_way(comm: Communicator) -> None:
    sizes = uneven(comm.size)
    pieces = [make(rank, (rows, 3), "float32") for rank, rows in enumerate(sizes)]
    gathered = np.empty((sum(sizes), 3), np.float32)
    rows = np.array([[(i + 2 * j) % 3 for j in range(comm.size)] for i in range(comm.size)])
    blocks = [[make(i, (rows[i, j], 2), "float64", salt=j) for j in range(comm.size)] for i in range(comm.size)]
    exchanged = np.empty((rows[:, comm.rank].sum(), 2))
    ramp, swapped = np.arange(comm.size) + 100 * comm.rank, np.empty(comm.size, np.int64)
    requests = [
        comm.iall_gather(pieces[comm.rank], sizes=sizes, out=gathered),
        comm.iall_to_all(
            np.concatenate(blocks[comm.rank]),
            send_sizes=rows[comm.rank],
            receive_sizes=rows[:, comm.rank],
            out=exchanged,
        ),
        comm.iall_to_all(ramp, out=swapped),
    ]
    for request in reversed(requests):
        request.wait()
        assert request.done()
    check_equal(gathered, np.concatenate(pieces), "float32")
    check_equal(exchanged, np.concatenate([blocks[i][comm.rank] for i in range(comm.size)]), "float64")
    check_equal(swapped, 100 * np.arange(comm.size) + comm.rank, "int64")
    with raises(ValueError, "iall_to_all", "shape"):
        comm.iall_to_all(ramp, out=np.empty(comm.size + 1, np.int64))


@case(modes=WITH_EACH_WAIT)
def single_numbers(comm: Communicator) -> None:
    x = np.asarray(comm.rank + 1.0)
    check_equal(comm.all_reduce(x), np.asarray(comm.size * (comm.size + 1) / 2), "float64")
    check_equal(comm.broadcast(x, comm.size - 1), np.asarray(float(comm.size)), "float64")
    with raises(ValueError, "all_gather works along dim 0", "reshape(1)"):
        comm.all_gather(x)


@case(DTYPES)
def all_gather_uneven(comm: Communicator, dtype: str) -> None:
    sizes = uneven(comm.size)
    pieces = [make(rank, (rows, 3), dtype) for rank, rows in enumerate(sizes)]
    check_equal(comm.all_gather(pieces[comm.rank], sizes=sizes), np.concatenate(pieces), dtype)


@case(DTYPES, tuple(REDUCTIONS), mccl=(2,))
def reduce_scatter_uneven(comm: Communicator, dtype: str, op: str) -> None:
    sizes = uneven(comm.size)
    stacked = everyone(comm, (sum(sizes), 3), dtype)
    start = sum(sizes[: comm.rank])
    expected = reduced(stacked, op)[start : start + sizes[comm.rank]]
    actual = comm.reduce_scatter(stacked[comm.rank], op, sizes=sizes)
    check_equal(actual, expected, dtype, exact=op != "sum")


@case(DTYPES, tuple(REDUCTIONS), mccl=(2,))
def reduce_scatter(comm: Communicator, dtype: str, op: str) -> None:
    stacked = everyone(comm, (2 * comm.size, 3), dtype)
    expected = reduced(stacked, op)[2 * comm.rank : 2 * comm.rank + 2]
    check_equal(comm.reduce_scatter(stacked[comm.rank], op), expected, dtype, exact=op != "sum")


@case(modes=WITH_EACH_WAIT)
def sizes_in_any_kind_of_sequence(comm: Communicator) -> None:
    kinds: list[Callable[[list[int]], Any]] = [list, tuple, np.array]
    sizes = kinds[comm.rank % 3]([1] * comm.size)
    x = np.full(1, comm.rank)
    check_equal(comm.all_gather(x, sizes=sizes), np.arange(comm.size), "int64")
    ramp = np.arange(comm.size)
    check_equal(comm.reduce_scatter(ramp, sizes=sizes), comm.size * x, "int64")
    exchanged = comm.all_to_all(np.full(comm.size, comm.rank), send_sizes=sizes, receive_sizes=sizes)
    check_equal(exchanged, ramp, "int64")


@case((*DTYPES, "bool"))
def all_to_all_uneven(comm: Communicator, dtype: str) -> None:
    rows = np.array([[(i + 2 * j) % 3 for j in range(comm.size)] for i in range(comm.size)])
    blocks = [[make(i, (rows[i, j], 2), dtype, salt=j) for j in range(comm.size)] for i in range(comm.size)]
    actual = comm.all_to_all(
        np.concatenate(blocks[comm.rank]),
        send_sizes=rows[comm.rank].tolist(),
        receive_sizes=rows[:, comm.rank].tolist(),
    )
    check_equal(actual, np.concatenate([blocks[i][comm.rank] for i in range(comm.size)]), dtype)


@case()
def all_to_all_where_one_rank_has_nothing(comm: Communicator) -> None:
    last = comm.size - 1
    sent = [0 if comm.rank == last else 2] * comm.size
    received = [0 if rank == last else 2 for rank in range(comm.size)]
    x = np.full((sum(sent), 1), comm.rank)
    expected = np.repeat(np.arange(last), 2).reshape(-1, 1)
    check_equal(comm.all_to_all(x, send_sizes=sent, receive_sizes=received), expected, "int64")


@case((*DTYPES, "bool"))
def broadcast_from_every_root(comm: Communicator, dtype: str) -> None:
    for root in range(comm.size):
        x = make(comm.rank, (3, 2), dtype)
        check_equal(comm.broadcast(x, root), make(root, (3, 2), dtype), dtype)
        np.testing.assert_array_equal(x, make(comm.rank, (3, 2), dtype))


@case(("float16", "bfloat16"), modes=WITH_EACH_WAIT)
def sums_of_16_bits_are_rounded_once(comm: Communicator, dtype: str) -> None:
    # Plus 1 the first number is itself, so a sum that is rounded after every addition would stay there.
    most, large = {"float16": (2048, 40_000), "bfloat16": (256, 2e38)}[dtype]
    total = np.full(comm.size, most + comm.size - 1)
    x = np.full(comm.size, 1 if comm.rank else most, type_of(dtype))
    check_equal(comm.all_reduce(x), total, dtype)
    check_equal(comm.reduce_scatter(x), total[:1], dtype)
    x = np.full(2, large, type_of(dtype))
    check_equal(comm.all_reduce(x), np.full(2, x[0] if comm.size == 1 else np.inf), dtype)


@case(FLOATS)
def sums_are_the_same_on_every_rank(comm: Communicator, dtype: str) -> None:
    for length in (1, 1_000, 100_001):
        mine = comm.all_reduce(make(comm.rank, (length,), dtype))
        table = comm.all_gather(mine.reshape(1, -1))
        assert all(row.tobytes() == table[0].tobytes() for row in table)


@case(("float32", "float16", "bfloat16", "bool"), modes=WITH_EACH_WAIT)
def out_is_filled_and_returned(comm: Communicator, dtype: str) -> None:
    x = make(comm.rank, (comm.size, 2), dtype)
    ones = [1] * comm.size
    calls: list[tuple[Callable[..., np.ndarray], dict[str, Any]]] = [
        (comm.all_reduce, {"op": "max"}),
        (comm.all_gather, {}),
        (comm.all_gather, {"sizes": [comm.size] * comm.size}),
        (comm.reduce_scatter, {"op": "max"}),
        (comm.reduce_scatter, {"op": "max", "sizes": ones}),
        (comm.all_to_all, {}),
        (comm.all_to_all, {"send_sizes": ones, "receive_sizes": ones}),
        (comm.broadcast, {}),
    ]
    for call, arguments in calls:
        expected = call(x, **arguments)
        out = np.zeros_like(expected)
        assert call(x, **arguments, out=out) is out
        np.testing.assert_array_equal(out, expected)
        np.testing.assert_array_equal(x, make(comm.rank, (comm.size, 2), dtype))


@case(("float32", "float16", "bfloat16"), modes=WITH_EACH_WAIT)
def out_may_overlap_the_input(comm: Communicator, dtype: str) -> None:
    stacked = everyone(comm, (4,), dtype)
    x = stacked[comm.rank].copy()
    assert comm.all_reduce(x, out=x) is x
    check_equal(x, reduced(stacked, "sum"), dtype, exact=False)
    shared = np.zeros(4 * comm.size, type_of(dtype))
    own = shared[4 * comm.rank : 4 * comm.rank + 4]
    own[:] = stacked[comm.rank]
    comm.all_gather(own, out=shared)
    check_equal(shared, stacked.reshape(-1), dtype)
    comm.reduce_scatter(shared, out=own)
    check_equal(own, comm.size * stacked[comm.rank].astype(np.float64), dtype, exact=False)
    whole = np.repeat(np.arange(comm.size), 2) + 100 * comm.rank
    comm.all_to_all(whole, out=whole)
    check_equal(whole, np.repeat(100 * np.arange(comm.size), 2) + comm.rank, "int64")
    comm.broadcast(x, out=x)
    everywhere = comm.all_gather(x.reshape(1, -1))
    np.testing.assert_array_equal(everywhere, np.broadcast_to(everywhere[0], everywhere.shape))


@case(mccl=())  # what is composed there copies
def nothing_is_copied_on_the_way(comm: Communicator) -> None:
    rows, width = 64 * comm.size, 4_096
    x, small = np.ones((rows, width), np.float32), np.ones((64, width), np.float32)
    same, part, whole = np.empty_like(x), np.empty_like(small), np.empty_like(x)
    tracemalloc.start()
    comm.all_reduce(x, out=same)
    comm.all_reduce(x, out=x)
    comm.all_gather(small, out=whole)
    comm.reduce_scatter(x, out=part)
    comm.all_to_all(x, out=whole)
    comm.broadcast(x, out=x)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < small.nbytes / 4, f"{peak} bytes were allocated for arrays of {small.nbytes} and {x.nbytes}"
