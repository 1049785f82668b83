"""Which calls of `mindspore.mint.distributed` the mindspore backend makes on Ascend, recorded in place of HCCL.

HCCL itself runs on no CPU: what it does with these calls is not tested here.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
from attrs import define, field
from device_mesh import abort_on_error
from device_mesh.engine import Group
from device_mesh.hccl import Hccl
from device_mesh.mindspore_backend import MindSporeCommunicator
from mindspore import Tensor

WORLD = "hccl_world_group"
STARTED = {"group": WORLD, "async_op": True}


@define
class Handle:
    waited: int = 0

    def wait(self) -> None:
        self.waited += 1


@define
class Event:
    answers: list[bool]

    def record(self) -> None:
        self.answers = [False, True]

    def query(self) -> bool:
        return self.answers.pop(0)


@define
class Recorder:
    """Stands for `mint.distributed` and `mindspore.runtime`: writes down calls, and fills tensors by `effects`."""

    calls: list[tuple[Any, ...]] = field(factory=list)
    effects: dict[str, Callable[..., None]] = field(factory=dict)
    handle: Handle = field(factory=Handle)

    Stream = staticmethod(lambda: None)
    StreamCtx = staticmethod(nullcontext)
    Event = staticmethod(lambda: Event([]))
    P2POp = staticmethod(lambda *arguments: arguments)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            self.calls.append((name, *map(shown, arguments), options))
            if name in self.effects:
                self.effects[name](*arguments)
            return [self.handle] if name == "batch_isend_irecv" else self.handle if options.get("async_op") else None

        return call


def shown(argument: Any) -> Any:
    """A tensor as its dtype and size, also in the operations of a list."""
    if isinstance(argument, Tensor):
        return f"{argument.asnumpy().dtype}[{argument.size}]"
    if isinstance(argument, list | tuple):
        return type(argument)(map(shown, argument))
    return argument


def fill(tensor: Tensor, values: Any) -> None:
    """Write into a tensor's memory, as a collective does."""
    tensor.asnumpy()[...] = values


@pytest.fixture
def hccl() -> Recorder:
    return Recorder()


@pytest.fixture
def world(hccl: Recorder) -> MindSporeCommunicator:
    """Rank 1 of 4."""
    engine = Hccl({WORLD}, hccl, hccl, hccl.create_group)
    return MindSporeCommunicator(engine, Group(WORLD, (0, 1, 2, 3), WORLD), 1, (0, 1, 2, 3))


def test_all_reduce(hccl: Recorder, world: MindSporeCommunicator) -> None:
    hccl.effects["all_reduce"] = lambda tensor, op: fill(tensor, 4 * tensor.asnumpy())
    x = np.arange(6, dtype=np.float32).reshape(2, 3)
    np.testing.assert_array_equal(world.all_reduce(x), 4 * x)
    half = world.all_reduce(x.astype(np.float16), "max")
    np.testing.assert_array_equal(half, (4 * x).astype(np.float16), strict=True)
    assert hccl.calls == [("all_reduce", "float32[6]", op, {"group": WORLD}) for op in ("sum", "max")]
    assert world.all_reduce(x[:0]).shape == (0, 3)
    assert len(hccl.calls) == 2


@pytest.mark.parametrize(
    ("dtype", "op"),
    [
        *itertools.product(("bool", "uint8", "uint16", "uint32", "uint64", "int8", "int64"), ("max", "min")),
        *itertools.product(("uint8", "uint64", "int8"), ("sum",)),
    ],
)
def test_reductions_of_whole_numbers_on_signed_ones(
    hccl: Recorder, world: MindSporeCommunicator, dtype: str, op: str
) -> None:
    """The two arrays meet in the form in which they would travel."""
    top = 1 if dtype == "bool" else np.iinfo(dtype).max
    x, other = np.array([0, top, 3, 0], dtype), np.array([top, 0, 2, 0], dtype)
    ufunc = {"max": np.maximum, "min": np.minimum, "sum": np.add}[op]
    sent: list[np.ndarray] = []
    hccl.effects["all_reduce"] = lambda tensor, op: sent.append(tensor.asnumpy().copy())
    world.all_reduce(other, op)
    hccl.effects["all_reduce"] = lambda tensor, op: fill(tensor, ufunc(tensor.asnumpy(), sent[0]))
    np.testing.assert_array_equal(world.all_reduce(x, op), ufunc(x, other), strict=True)
    assert sent[0].dtype == f"int{8 * x.itemsize}"


def test_float64_is_refused_by_name(world: MindSporeCommunicator) -> None:
    with pytest.raises(TypeError, match=r"all_reduce of float64 does not work on HCCL, .* convert to float32"):
        world.all_reduce(np.zeros(2))
    with pytest.raises(TypeError, match=r"^reduce_scatter of float64"):
        world.reduce_scatter(np.zeros(4))
    with pytest.raises(TypeError, match=r"^ireduce_scatter of float64"):
        world.ireduce_scatter(np.zeros(4), out=np.zeros(1))


def test_all_gather(hccl: Recorder, world: MindSporeCommunicator) -> None:
    rows = np.arange(12, dtype=np.float64).reshape(6, 2)
    sizes = [0, 2, 3, 1]
    everything = rows.reshape(-1).view(np.int8)
    hccl.effects["all_gather_into_tensor_uneven"] = lambda out, x, counts: fill(out, everything)
    np.testing.assert_array_equal(world.all_gather(rows[:2], sizes=sizes), rows, strict=True)
    counts = [0, 32, 48, 16]
    assert hccl.calls == [("all_gather_into_tensor_uneven", "int8[96]", "int8[32]", counts, STARTED)]
    world.all_gather(rows)
    assert hccl.calls[1:] == [("all_gather_into_tensor", "int8[384]", "int8[96]", STARTED)]


def test_reduce_scatter(hccl: Recorder, world: MindSporeCommunicator) -> None:
    hccl.effects["reduce_scatter_tensor_uneven"] = lambda out, x, counts, op: fill(out, [5, 6, 7, 8])
    x = np.zeros((6, 2), np.float32)
    result = world.reduce_scatter(x, "min", sizes=[0, 2, 3, 1])
    np.testing.assert_array_equal(result, np.array([[5, 6], [7, 8]], np.float32), strict=True)
    world.reduce_scatter(x[:4])
    assert hccl.calls == [
        ("reduce_scatter_tensor_uneven", "float32[4]", "float32[12]", [0, 4, 6, 2], "min", STARTED),
        ("reduce_scatter_tensor", "float32[2]", "float32[8]", "sum", STARTED),
    ]


def test_all_to_all_and_what_is_left(hccl: Recorder, world: MindSporeCommunicator) -> None:
    hccl.effects["all_to_all_single"] = lambda out, x, received, sent: fill(out, [7, 0, 0, 0])
    hccl.effects["broadcast"] = lambda tensor, root: fill(tensor, 9)
    given = np.zeros(3, np.int32)
    result = world.all_to_all(given, send_sizes=[0, 1, 2, 0], receive_sizes=[1, 0, 0, 0])
    np.testing.assert_array_equal(result, np.array([7], np.int32), strict=True)
    np.testing.assert_array_equal(world.broadcast(np.zeros(2, np.int8), 3), [9, 9])
    world.barrier()
    assert hccl.calls == [
        ("all_to_all_single", "int8[4]", "int8[12]", [4, 0, 0, 0], [0, 4, 8, 0], STARTED),
        ("broadcast", "int8[2]", 3, {"group": WORLD}),
        ("barrier", {"group": WORLD}),
    ]


def test_all_gather_under_way(hccl: Recorder, world: MindSporeCommunicator) -> None:
    """The result is there when the handle's event has happened, and not before."""
    hccl.effects["all_gather_into_tensor"] = lambda out, x: fill(out, [1, 2, 3, 4])
    outs = np.zeros((2, 4), np.int8)
    polled, waited = (world.iall_gather(np.zeros(1, np.int8), out=out) for out in outs)
    assert hccl.calls == [("all_gather_into_tensor", "int8[4]", "int8[1]", STARTED)] * 2
    assert [polled.done(), outs[0].any(), polled.done(), polled.done()] == [False, False, True, True]
    assert not outs[1].any()
    before = hccl.handle.waited
    waited.wait()
    waited.wait()
    assert hccl.handle.waited == before + 1
    np.testing.assert_array_equal(outs, [[1, 2, 3, 4]] * 2)


def test_reduce_scatter_under_way(hccl: Recorder, world: MindSporeCommunicator) -> None:
    """What travels as another dtype is turned back when the handle's event has happened, and not before."""
    hccl.effects["reduce_scatter_tensor"] = lambda out, x, op: fill(out, 2 * x.asnumpy()[1:2])
    hccl.effects["reduce_scatter_tensor_uneven"] = lambda out, x, counts, op: fill(out, x.asnumpy()[:2])
    half, whole = np.zeros(1, np.float16), np.zeros(2, np.uint16)
    summing = world.ireduce_scatter(np.array([1, 2.5, 3, 4], np.float16), out=half)
    largest = world.ireduce_scatter(np.array([0, 40_000, 7], np.uint16), "max", sizes=[0, 2, 1, 0], out=whole)
    assert hccl.calls == [
        ("reduce_scatter_tensor", "float32[1]", "float32[4]", "sum", STARTED),
        ("reduce_scatter_tensor_uneven", "int16[2]", "int16[3]", [0, 2, 1, 0], "max", STARTED),
    ]
    assert [summing.done(), half[0], largest.done(), whole.any()] == [False, 0, False, False]
    assert [summing.done(), summing.done(), half[0]] == [True, True, 5]
    largest.wait()
    np.testing.assert_array_equal(whole, [0, 40_000])


def test_results_of_ranks_in_another_order_under_way(hccl: Recorder, world: MindSporeCommunicator) -> None:
    """HCCL knows the group as ranks 1, 2, 3; the last of these is the first here."""
    hccl.effects["all_gather_into_tensor_uneven"] = lambda out, x, counts: fill(out, [10, 11, 20, 30])
    hccl.effects["all_to_all_single"] = lambda out, x, received, sent: fill(out, [*x.asnumpy(), 100])
    group = world.subgroup((3, 1, 2))
    gathered, exchanged = np.zeros((2, 4), np.int8)
    requests = [
        group.iall_gather(np.array([10, 11], np.int8), sizes=[1, 2, 1], out=gathered),
        group.iall_to_all(np.array([3, 1, 2], np.int8), send_sizes=[1, 1, 1], receive_sizes=[2, 1, 1], out=exchanged),
    ]
    (_, name, *_), *started = hccl.calls
    options = {"group": name, "async_op": True}
    assert started == [
        ("all_gather_into_tensor_uneven", "int8[4]", "int8[2]", [2, 1, 1], options),
        ("all_to_all_single", "int8[4]", "int8[3]", [1, 1, 2], [1, 1, 1], options),
    ]
    assert not gathered.any()
    assert not exchanged.any()
    for request in reversed(requests):
        request.wait()
        request.wait()
    np.testing.assert_array_equal(gathered, [30, 10, 11, 20])
    np.testing.assert_array_equal(exchanged, [3, 100, 1, 2])


def test_what_is_started_is_named_in_errors(hccl: Recorder, world: MindSporeCommunicator) -> None:
    x, out = np.zeros((5, 2), np.float32), np.zeros(3, np.float32)
    with pytest.raises(ValueError, match=r"^ireduce_scatter cannot divide 5 rows equally among 4 ranks"):
        world.ireduce_scatter(x, out=out)
    with pytest.raises(ValueError, match=r"^iall_to_all cannot divide 5 rows equally among 4 ranks"):
        world.iall_to_all(x, out=out)
    with pytest.raises(ValueError, match=r"^iall_gather was given sizes=\[1, 1, 1, 1\]"):
        world.iall_gather(x, sizes=[1] * 4, out=out)
    for call in (world.iall_gather, world.ireduce_scatter, world.iall_to_all):
        with pytest.raises(ValueError, match=f"^{call.__name__} cannot write its result into out of shape"):
            call(x[:4], out=out)
    assert hccl.calls == []


def test_messages_start_together(hccl: Recorder, world: MindSporeCommunicator) -> None:
    def receive(operations: list[tuple[Any, ...]]) -> None:
        for kind, tensor, *_ in operations:
            if kind == "irecv":
                fill(tensor, 5)

    hccl.effects["batch_isend_irecv"] = receive
    out = np.zeros((1, 3), np.int8)
    sending, receiving = world.isend(np.ones(2, np.float32), 2), world.irecv(out, 0)
    assert hccl.calls == []
    receiving.wait()
    sending.wait()
    batch = [("isend", "int8[8]", 2, WORLD), ("irecv", "int8[3]", 0, WORLD)]
    assert hccl.calls == [("batch_isend_irecv", batch, {})]
    np.testing.assert_array_equal(out, [[5, 5, 5]])
    request = world.isend(np.ones(1, np.int8), 0)
    world.barrier()
    assert [name for name, *_ in hccl.calls[1:]] == ["batch_isend_irecv", "barrier"]
    assert [request.done(), request.done()] == [False, True]
    world.recv(np.empty((0, 2)), 3)
    assert len(hccl.calls) == 3


def test_groups_are_made_by_their_first_collective(hccl: Recorder, world: MindSporeCommunicator) -> None:
    """In ascending order whatever order was asked for; messages need none."""
    group = world.subgroup((3, 1))
    again = world.subgroup((3, 1))
    assert (group.ranks, group.rank, group.size) == ((3, 1), 1, 2)
    group.send(np.zeros(1, np.int8), 0)
    assert hccl.calls == [("batch_isend_irecv", [("isend", "int8[1]", 3, WORLD)], {})]
    hccl.effects["all_gather_into_tensor"] = lambda out, x: fill(out, [10, 30])
    np.testing.assert_array_equal(group.all_gather(np.zeros(1, np.int8)), [30, 10])
    np.testing.assert_array_equal(again.all_gather(np.zeros(1, np.int8)), [30, 10])
    made, *gathers = hccl.calls[1:]
    name = made[1]
    assert made == ("create_group", name, [1, 3], {})
    assert gathers == [("all_gather_into_tensor", "int8[2]", "int8[1]", {"group": name, "async_op": True})] * 2
    assert world.subgroup((3, 1), tag=1)._group.name != name
    assert len(name) < 128  # HCCL's limit


def test_split_makes_its_group_at_once(hccl: Recorder, world: MindSporeCommunicator) -> None:
    choices = np.array([[5, 0], [2, 9], [2, 1], [5, 0]], np.int64)
    hccl.effects["all_gather_into_tensor"] = lambda out, x: fill(out, choices.reshape(-1).view(np.int8))
    groups = [world.split(2, key=9), world.split(2, key=9)]
    assert [group.ranks for group in groups] == [(2, 1)] * 2
    made = [call for call in hccl.calls if call[0] == "create_group"]
    assert [members for _, _, members, _ in made] == [[1, 2]] * 2
    assert made[0][1] != made[1][1]
    groups[0].send(np.zeros(1, np.int8), 0)
    assert hccl.calls[-1] == ("batch_isend_irecv", [("isend", "int8[1]", 2, made[0][1])], {})


def test_a_failing_rank_speaks_at_once(
    hccl: Recorder, world: MindSporeCommunicator, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """HCCL, which may be what failed, is not called again."""
    monkeypatch.setattr("os._exit", sys.exit)
    with pytest.raises(SystemExit) as ending, abort_on_error(world):
        raise RuntimeError("out of memory")
    assert ending.value.code == 1
    assert "rank 1 of 4 failed:" in (printed := capsys.readouterr().err)
    assert printed.endswith("RuntimeError: out of memory\n")
    assert hccl.calls == []
