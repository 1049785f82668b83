"""Finding out that we are a rank, and comparing two traces."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import numpy as np
import pytest
from parallel_trainer.cli.verify import _compare, largest_weight_difference
from parallel_trainer.trace import Trace


def joined(rank: int, launcher: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """A process that a launcher called `rank` joins the others."""
    program = "from device_mesh import launched\nfrom parallel_trainer.launch.joining import join\njoin(launched())"
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PMI")}
    environment |= {name: value.format(rank=rank) for name, value in launcher.items()}
    return subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=False)


def test_ranks_that_mpi_does_not_connect_do_not_train_copies() -> None:
    """Each process of a launcher that mpi4py does not know sees a world of one; one of them says so."""
    launcher = {"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "{rank}"}
    first, second = joined(0, launcher), joined(1, launcher)
    assert first.returncode != 0
    assert second.returncode != 0
    assert "launcher started 4 ranks, and MPI connects 1" in first.stderr
    assert "MPI connects" not in second.stderr


def test_ranks_of_pmix_do_not_train_copies() -> None:
    """The launcher tells MPI alone how many there are, and PyPI's MPICH does not know PMIx: one of them says so."""
    first, second = (joined(rank, {"PMIX_RANK": "{rank}"}) for rank in (0, 1))
    assert 0 not in (first.returncode, second.returncode)
    assert "env -u PMIX_RANK -u PMIX_NAMESPACE" in first.stderr
    assert second.stderr == ""


def test_one_rank_needs_no_mpi() -> None:
    """PUB2-LAUNCH-04: shared memory that MPI does not make is not left behind."""
    program = (
        "import sys\nfrom device_mesh import connect, launched\nassert launched().size == connect().size == 1\n"
        "sys.exit('mpi4py' in sys.modules)"
    )
    environment = os.environ | {"PMI_SIZE": "1", "PMI_RANK": "0", "PMI_FD": "97"}
    assert subprocess.run([sys.executable, "-c", program], env=environment, timeout=60, check=False).returncode == 0


def test_ranks_have_the_time_to_save_however_often_a_scheduler_says_terminate() -> None:
    """A rank that needs half a second after the first signal, and a burst of them to the process that started it."""
    rank = (
        "import signal, time\n"
        "told = []\n"
        "signal.signal(signal.SIGTERM, lambda *_: told.append(1))\n"
        "print('ready', flush=True)\n"
        "while not told: time.sleep(0.01)\n"
        "end = time.monotonic() + 0.5\n"
        "while time.monotonic() < end: time.sleep(0.05)\n"
        "print('saved', flush=True)\n"
    )
    program = (
        "import sys\nfrom parallel_trainer.launch.mpiexec import run_ranks\n"
        f"sys.exit(run_ranks(1, ['-c', {rank!r}], stop_on_sigterm=True))"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        for _ in range(200):
            process.terminate()
            time.sleep(2e-5)
        assert process.communicate(timeout=120)[0] == "saved\n"
    assert process.returncode == 0


def test_a_rank_that_was_told_to_stop_cannot_be_terminated_while_it_ends() -> None:
    """The second signal comes when Python has given up its handlers."""
    program = (
        "import ctypes, os, signal\n"
        "from device_mesh import connect\n"
        "from parallel_trainer.launch.stopping import StopRequest\n"
        "class Last:\n"
        "    kill, pid = ctypes.CDLL(None).kill, os.getpid()\n"
        "    def __del__(self): self.kill(self.pid, 15)\n"
        "stop = StopRequest(connect('single'))\n"
        "assert not stop.requested()\n"
        "os.kill(os.getpid(), signal.SIGTERM)\n"
        "assert stop.requested()\n"
        "signal.last = Last()\n"
    )
    assert subprocess.run([sys.executable, "-c", program], timeout=60, check=False).returncode == 0


def trace(loss: float = 2.0, norm: float = 1.0, weight: float = 0.5, mtp: float = 5.0, load: int = 3) -> Trace:
    return Trace(
        "1 rank",
        (3.0, loss),
        (4.0, norm),
        {"a": np.array([0.25, 0.125]), "b": np.array([weight, -1.0])},
        {"mtp_loss": (6.0, mtp)},
        np.array([[[4, 2]], [[load, 6 - load]]]),
    )


@pytest.mark.parametrize(
    ("other", "dtype", "equal"),
    [
        (trace(), "float64", True),
        (trace(loss=2.0 + 1e-12), "float64", True),
        (trace(loss=2.0 + 1e-8), "float64", False),
        (trace(norm=1.0 + 1e-8), "float64", False),
        (trace(mtp=5.0 + 1e-7), "float64", False),
        (trace(mtp=5.0 + 1e-12), "float64", True),
        (trace(load=4), "float64", False),
        (trace(load=4), "float32", False),
        (trace(weight=0.5 + 1e-8), "float64", False),
        (trace(loss=float("nan")), "float64", False),
        (trace(weight=float("nan")), "float64", False),
        (trace(loss=2.0 + 1e-6, norm=1 + 1e-5, weight=0.6), "float32", True),
        (trace(loss=2.0 + 1e-4), "float32", False),
        (trace(norm=1.0 + 1e-3), "float32", False),
    ],
)
def test_verdict(other: Trace, dtype: str, equal: bool, capsys: pytest.CaptureFixture[str]) -> None:
    assert _compare(trace(), other, dtype) is equal
    assert ("DIFFERENT" in capsys.readouterr().out) is not equal


def test_verdict_names_what_routers_did_differently(capsys: pytest.CaptureFixture[str]) -> None:
    _compare(trace(), trace(load=5), "float64")
    shown = capsys.readouterr().out
    assert "mtp_loss of each step, 1 rank: 6.000000000000, 5.000000000000" in shown
    assert "Of 12 choices of experts, the plan made 2 differently" in shown
    assert "DIFFERENT: loads of experts by 2 choices" in shown


def test_weight_that_is_not_a_number_is_the_largest_difference() -> None:
    alone = {name: np.ones(2) for name in "abc"}
    name, difference, relative = largest_weight_difference(alone, alone | {"a": np.array([1.0, np.nan])})
    assert name == "a"
    assert np.isnan([difference, relative]).all()


def test_largest_weight_difference_names_the_weight() -> None:
    name, difference, relative = largest_weight_difference(trace().weights, trace(weight=0.75).weights)
    assert (name, difference, relative) == ("b", 0.25, 0.25)


def test_trace_survives_saving(tmp_path) -> None:
    before = trace(loss=0.1 + 0.2)
    before.save(tmp_path)
    after = Trace.load(tmp_path)
    assert (after.losses, after.grad_norms) == (before.losses, before.grad_norms)
    assert after.other_losses == before.other_losses
    np.testing.assert_array_equal(after.tokens_per_expert, before.tokens_per_expert)
    np.testing.assert_array_equal(after.weights["b"], before.weights["b"])
