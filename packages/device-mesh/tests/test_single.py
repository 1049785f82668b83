"""The `single` backend, and connecting: what one process can do without any launcher."""

from __future__ import annotations

import subprocess
import sys

import device_mesh
import numpy as np
import pytest
from device_mesh import Communicator, CommunicatorMismatch, LaunchError, connect

LAUNCHER_VARIABLES = (
    *("PMI_SIZE", "PMI_PORT", "PMI_FD", "PMIX_RANK", "OMPI_COMM_WORLD_SIZE"),
    *("MS_ROLE", "MS_WORKER_NUM", "MS_SCHED_HOST", "MS_SCHED_PORT", "MS_NODE_ID", "RANK_ID", "DEVICE_ID"),
)


@pytest.fixture(autouse=True)
def _not_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*LAUNCHER_VARIABLES, "DEVICE_MESH_DEBUG"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(params=[False, True], ids=["plain", "debug"])
def alone(request: pytest.FixtureRequest) -> Communicator:
    return connect("single", debug=request.param)


def test_a_group_of_one(alone: Communicator) -> None:
    assert (alone.rank, alone.size, alone.ranks) == (0, 1, (0,))
    alone.barrier()
    assert alone.split(3).ranks == alone.subgroup([0]).ranks == (0,)


def test_collectives_copy_their_input(alone: Communicator) -> None:
    x = np.arange(6.0).reshape(2, 3).T
    for call in (alone.all_reduce, alone.all_gather, alone.reduce_scatter, alone.all_to_all, alone.broadcast):
        result = call(x)
        np.testing.assert_array_equal(result, [[0, 3], [1, 4], [2, 5]])
        assert result.flags.c_contiguous
        assert not np.shares_memory(result, x)


def test_collectives_under_way_fill_their_output(alone: Communicator) -> None:
    x = np.arange(6.0).reshape(3, 2)
    for call in (alone.iall_gather, alone.ireduce_scatter, alone.iall_to_all):
        out = np.zeros((3, 2))
        request = call(x, out=out)
        request.wait()
        assert request.done()
        np.testing.assert_array_equal(out, x)
    with pytest.raises(ValueError, match="cannot write its result into out of shape"):
        alone.iall_to_all(x, out=np.zeros(2))


def test_what_one_rank_refuses(alone: Communicator) -> None:
    with pytest.raises(ValueError, match="rank 0 in a group of one rank: there is no other rank"):
        alone.send(np.zeros(1), 0)
    # In debug mode the comparison finds it first.
    with pytest.raises((ValueError, CommunicatorMismatch), match=r"sends 2 rows to .* expects 3"):
        alone.all_to_all(np.zeros(2), send_sizes=[2], receive_sizes=[3])
    with pytest.raises((ValueError, CommunicatorMismatch), match=r"x has 2 rows|gives 2 rows, not the 3"):
        alone.all_gather(np.zeros(2), sizes=[3])


def test_other_than_arrays(alone: Communicator) -> None:
    with pytest.raises(TypeError, match=r"x is a builtins\.list, but a communicator takes NumPy arrays"):
        alone.all_reduce([1.0])  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="x has dtype complex128, which cannot be sent: it must be one of bool, "):
        alone.broadcast(np.zeros(2, complex))


def test_abort_ends_the_process(alone: Communicator) -> None:
    with pytest.raises(SystemExit) as ending:
        alone.abort(7)
    assert ending.value.code == 7


def test_auto_is_single_without_a_launcher() -> None:
    assert connect().size == 1


def test_unknown_backend() -> None:
    with pytest.raises(ValueError, match="unknown backend 'nccl': use 'auto', 'single', 'mpi' or 'mindspore'"):
        connect("nccl")  # type: ignore[arg-type]


def test_workers_of_msrun_are_not_taken_for_single_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MS_WORKER_NUM", "4")
    with pytest.raises(LaunchError, match="MS_WORKER_NUM=4, MS_SCHED_HOST=unset, MS_SCHED_PORT=unset"):
        connect()


def test_mpi_without_mpi4py(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("mpi", "mpi_start"):
        monkeypatch.delitem(sys.modules, f"device_mesh.{name}", raising=False)
        monkeypatch.delattr(device_mesh, name, raising=False)
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'device-mesh\[mpi\]'"):
        connect("mpi")


def test_mindspore_without_a_launcher_is_single() -> None:
    assert connect("mindspore").size == 1


def test_mindspore_under_mpiexec(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PMI_SIZE", "2")
    with pytest.raises(LaunchError, match="mpiexec started: start them with msrun, or use the mpi backend"):
        connect("mindspore")


def test_mindspore_without_mindspore(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MS_WORKER_NUM", "2")
    monkeypatch.delitem(sys.modules, "device_mesh.mindspore_backend", raising=False)
    monkeypatch.delattr(device_mesh, "mindspore_backend", raising=False)
    monkeypatch.setitem(sys.modules, "mindspore", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'device-mesh\[mindspore\]'"):
        connect("mindspore")


def test_importing_loads_neither_mpi_nor_mindspore() -> None:
    check = "import device_mesh, sys; print([m for m in ('mpi4py', 'mindspore') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_debug_can_be_asked_for_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = type(connect())
    monkeypatch.setenv("DEVICE_MESH_DEBUG", "0")
    assert type(connect()) is plain
    monkeypatch.setenv("DEVICE_MESH_DEBUG", "1")
    assert type(connect()) is not plain
    assert type(connect(debug=False)) is plain
