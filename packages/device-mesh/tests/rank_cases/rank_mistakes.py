"""What is refused: wrong arguments on the calling rank, different calls on all ranks."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import numpy as np
from device_mesh import Communicator, CommunicatorMismatch
from device_mesh.debug import CheckedCommunicator
from rank_support import (
    case,
    check_equal,
    raises,
)


@case(modes=("plain",))  # debug mode finds some of these while comparing, on all ranks
def arguments_that_cannot_work(comm: Communicator) -> None:
    x = np.zeros((comm.size + 1, 2)) if comm.size > 1 else np.zeros((2, 2))
    if comm.size > 1:
        for call in (comm.reduce_scatter, comm.all_to_all):
            with raises(ValueError, f"{comm.size + 1} rows", f"{comm.size} ranks"):
                call(x)
    with raises(ValueError, "sizes=[7]", "one size of 0 or more" if comm.size > 1 else "adds up to 7"):
        comm.reduce_scatter(x, sizes=[7])
    with raises(ValueError, "sizes"):
        comm.all_gather(x, sizes=[len(x) + 1] * comm.size)
    with raises(ValueError, "receive_sizes is missing"):
        comm.all_to_all(x, send_sizes=[1] * comm.size)
    with raises(ValueError, "result has shape", "float64"):
        comm.all_reduce(x, out=np.zeros_like(x, dtype=np.float32))
    with raises(ValueError, "not C-contiguous"):
        comm.all_reduce(x, out=np.zeros((2, len(x))).T)
    with raises(ValueError, "op='mean'", "'sum', 'max' or 'min'"):
        comm.all_reduce(x, "mean")
    with raises(ValueError, f"root {comm.size}"):
        comm.broadcast(x, comm.size)
    with raises(TypeError, "a communicator takes NumPy arrays"):
        comm.all_reduce([1.0])
    for strange in (np.zeros(2, ">f4"), np.zeros(2, object), np.zeros(2, complex)):
        with raises(TypeError, f"dtype {strange.dtype}", "float32"):
            comm.all_reduce(strange)
    locked = np.zeros(2)
    locked.flags.writeable = False
    with raises(ValueError, "read-only"):
        comm.all_reduce(np.zeros(2), out=locked)


def mismatched(comm: Communicator, call: Callable[[], Any], *parts: str) -> None:
    """Every rank must raise, name both ranks and their calls, and be able to go on."""
    first, last = comm.ranks[0], comm.ranks[-1]
    with raises(CommunicatorMismatch, f"rank {first} called", f"rank {last} called", "at rank_mistakes.py:", *parts):
        call()
    check_equal(comm.all_reduce(np.array([1])), np.array([comm.size]), "int64")


def differs(comm: Communicator) -> bool:
    return comm.rank == comm.size - 1


@case(worlds=(2, 8), modes=("debug",))
def mismatch_of_shapes(comm: Communicator) -> None:
    x = np.zeros((2, 3 + differs(comm)))
    for name in ("all_reduce", "all_gather", "broadcast", "all_to_all"):
        mismatched(comm, lambda name=name: getattr(comm, name)(x), "(2, 3)", "(2, 4)", name)
    for name in ("iall_gather", "ireduce_scatter", "iall_to_all"):
        mismatched(comm, lambda name=name: getattr(comm, name)(x, out=x), "(2, 3)", "(2, 4)", name)


@case(worlds=(2, 8), modes=("debug",))
def mismatch_of_dtypes(comm: Communicator) -> None:
    x = np.zeros(comm.size, np.int32 if differs(comm) else np.float32)
    for name in ("all_reduce", "all_gather", "broadcast", "reduce_scatter", "all_to_all"):
        mismatched(comm, lambda name=name: getattr(comm, name)(x), "dtype int32", "dtype float32")


@case(worlds=(2, 8), modes=("debug",))
def mismatch_of_operations(comm: Communicator) -> None:
    x = np.zeros(comm.size)
    op = "max" if differs(comm) else "sum"
    mismatched(comm, lambda: comm.all_reduce(x, op), "op='max'", "op='sum'")
    mismatched(comm, lambda: comm.broadcast(x, int(differs(comm))), "root=0", "root=1")
    mismatched(comm, comm.barrier if differs(comm) else lambda: comm.all_reduce(x), "barrier()", "all_reduce(")


@case(worlds=(2, 8), modes=("debug",))
def mismatch_of_sizes(comm: Communicator) -> None:
    ones = [1] * comm.size
    mismatched(
        comm,
        lambda: comm.reduce_scatter(np.zeros(comm.size), sizes=None if differs(comm) else ones),
        f"sizes={ones}",
    )
    mismatched(
        comm,
        lambda: comm.all_gather(np.zeros((1 + differs(comm), 2)), sizes=ones),
        f"rank {comm.ranks[-1]} gives 2 rows, not the 1",
    )


@case(worlds=(2, 8), modes=("debug",))
def mismatch_of_lengths(comm: Communicator) -> None:
    sizes = [1] * (comm.size - differs(comm))
    mismatched(
        comm,
        lambda: comm.all_to_all(np.zeros(comm.size), send_sizes=sizes, receive_sizes=[1] * comm.size),
        f"send_sizes={[1] * comm.size}",
    )
    with raises(ValueError, "send_sizes=[5]", f"each of its {comm.size} ranks"):
        comm.all_to_all(np.zeros(5), send_sizes=[5], receive_sizes=[5])


@case(worlds=(2, 8), modes=("debug",))
def mismatch_of_an_exchange(comm: Communicator) -> None:
    sent = [1] * comm.size
    received = [1] * comm.size
    if differs(comm):
        received[0] = 2
    mismatched(
        comm,
        lambda: comm.all_to_all(np.zeros(comm.size), send_sizes=sent, receive_sizes=received),
        f"rank {comm.ranks[0]} sends 1 rows to rank {comm.ranks[-1]}, which expects 2",
    )


@case(worlds=(2,), modes=("plain",), mccl=())
def a_late_call_after_a_timeout(comm: Communicator) -> None:
    """The late rank's message arrives in memory kept for it, and the one that gave up stays refused."""
    checked = CheckedCommunicator.over(comm, 0.1)
    x = np.ones(3)
    if comm.rank == 0:
        silent = f"rank {comm.ranks[1]} of its group"
        with raises(CommunicatorMismatch, "called all_reduce(x of shape (3,)", silent, "no call within 0.1 s"):
            checked.all_reduce(x)
        gc.collect()
        taken = [np.zeros(4_096, np.uint8) for _ in range(1_000)]
        comm.send(x, 1)  # only now does rank 1 call
        check_equal(comm.all_reduce(x), 2 * x, "float64")
        assert not any(memory.any() for memory in taken)
        with raises(CommunicatorMismatch, silent, "no call within 0.1 s", "an earlier call; now it called barrier()"):
            checked.barrier()
    else:
        comm.recv(np.empty(3), 0)
        check_equal(checked.all_reduce(x), 2 * x, "float64")
