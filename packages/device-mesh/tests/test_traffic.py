"""What is counted, where one process is enough; bytes between ranks are in `rank_cases`."""

from __future__ import annotations

import doctest

import numpy as np
from device_mesh import AxisCommunicators, ParallelMesh, Traffic, connect, traffic
from parallel_config import ParallelPlan


def test_the_example_in_the_documentation() -> None:
    assert doctest.testmod(traffic).failed == 0


def test_calls_are_written_down_by_axis_and_occasion() -> None:
    found = Traffic()
    groups = AxisCommunicators(ParallelMesh(ParallelPlan.from_degrees(1)), connect("single"), found)
    with found.during("outside"):
        groups["fsdp"].all_gather(np.ones(3))
        with found.during("inside"):
            groups["tp"].split(0).all_reduce(np.ones(2))
    groups["tp"].barrier()
    assert [(call.group, call.operation, call.during) for call in found.calls] == [
        ("fsdp", "all_gather", "outside"),
        ("tp", "all_reduce", "inside"),
    ]
    assert found.received_bytes() == {"fsdp": 0, "tp": 0}


def test_the_end_of_a_call_is_where_it_is_awaited() -> None:
    found = Traffic()
    group = found.count(connect("single"), "fsdp")
    with found.during("first"):
        first = group.iall_gather(np.ones(2), out=np.empty(2))
    with found.during("second"):
        second = group.ireduce_scatter(np.ones(2), out=np.empty(2))
        group.all_reduce(np.ones(1))
        first.wait()
    assert second.done()
    second.wait()
    assert [(moment.what, moment.call.during, moment.call.operation) for moment in found.moments] == [
        ("start", "first", "all_gather"),
        ("start", "second", "reduce_scatter"),
        ("start", "second", "all_reduce"),
        ("end", "second", "all_reduce"),
        ("end", "first", "all_gather"),
        ("end", "second", "reduce_scatter"),
    ]
