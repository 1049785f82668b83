"""A failing rank: the job ends within seconds, with one message, last on the screen."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from attrs import frozen
from device_mesh import abort_on_error, connect
from device_mesh.variables import for_own_mpiexec

MPIEXEC = Path(sys.executable).with_name("mpiexec")
LIMIT_SECONDS = 60.0
"""A job that is not ended goes on for ten times as long."""
PROGRAM = """\
import os, sys, time
import numpy as np
from device_mesh import abort_on_error, connect

class UserError(ValueError):
    pass

def work(comm):
    BODY

comm = connect("mpi", debug=DEBUG, debug_timeout_seconds=5.0)
comm.barrier()
if comm.rank == 0:
    print("ready", time.time(), flush=True)
with abort_on_error(comm, message_only=(UserError,)):
    work(comm)
"""


@frozen
class Ending:
    code: int
    stderr: str
    seconds: float


def run(tmp_path: Path, body: str, *, ranks: int = 3, debug: bool = False) -> Ending:
    """Run `body` on some ranks; `seconds` counts from when all of them had started."""
    script = tmp_path / "program.py"
    script.write_text(PROGRAM.replace("BODY", body).replace("DEBUG", str(debug)))
    done = subprocess.run(
        [MPIEXEC, "-n", str(ranks), sys.executable, str(script)],
        capture_output=True,
        text=True,
        timeout=280,
        env=for_own_mpiexec(os.environ | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}),
    )
    started = max(float(line.split()[1]) for line in done.stdout.splitlines() if line.startswith("ready"))
    return Ending(done.returncode, done.stderr, time.time() - started)


def test_others_wait_in_a_collective(tmp_path: Path) -> None:
    ending = run(tmp_path, "comm.barrier() if comm.rank != 1 else {}['weights']")
    assert ending.code == 1
    assert ending.seconds < LIMIT_SECONDS
    lines = ending.stderr.splitlines()
    assert lines[0] == "rank 1 of 3 failed:"
    assert lines[1] == "Traceback (most recent call last):"
    assert lines[-1] == "KeyError: 'weights'"
    assert "in work" in ending.stderr
    assert "abort.py" not in ending.stderr


def test_an_error_common_to_all_ranks_is_shown_once(tmp_path: Path) -> None:
    ending = run(tmp_path, "raise RuntimeError('same everywhere')", ranks=4)
    assert ending.code == 1
    assert ending.seconds < LIMIT_SECONDS
    assert ending.stderr.startswith("rank 0 of 4 failed:\n")
    assert ending.stderr.endswith("RuntimeError: same everywhere\n")
    assert ending.stderr.count("Traceback") == 1


def test_the_lowest_of_several_failing_ranks_speaks(tmp_path: Path) -> None:
    ending = run(tmp_path, "comm.barrier() if comm.rank == 0 else 1 / 0")
    assert ending.stderr.startswith("rank 1 of 3 failed:\n")
    assert ending.stderr.endswith("ZeroDivisionError: division by zero\n")
    assert ending.stderr.count("Traceback") == 1


def test_a_long_traceback_arrives_whole(tmp_path: Path) -> None:
    ending = run(tmp_path, "raise ValueError('x' * 300_000 + ' end')", ranks=2)
    assert ending.stderr.endswith("x end\n")
    assert len(ending.stderr) > 300_000


def test_errors_of_the_user_come_without_a_traceback(tmp_path: Path) -> None:
    ending = run(tmp_path, "raise UserError('run.yaml:3: tensor_parallel 3 does not fit')")
    assert ending.code == 2
    assert ending.stderr == "run.yaml:3: tensor_parallel 3 does not fit\n"


@pytest.mark.parametrize(
    ("body", "code", "stderr"),
    [
        ("sys.exit(5) if comm.rank == 2 else comm.barrier()", 5, ""),
        ("sys.exit('no corpus')", 1, "no corpus\n"),
        ("raise KeyboardInterrupt", 130, "Interrupted.\n"),
        ("sys.exit(0)", 0, ""),
        ("comm.barrier()", 0, ""),
    ],
)
def test_exit_codes(tmp_path: Path, body: str, code: int, stderr: str) -> None:
    ending = run(tmp_path, body)
    assert (ending.code, ending.stderr) == (code, stderr)
    assert ending.seconds < LIMIT_SECONDS


def test_a_killed_rank_takes_the_job_down(tmp_path: Path) -> None:
    ending = run(tmp_path, "comm.barrier() if comm.rank else os.kill(os.getpid(), 9)")
    assert ending.code != 0
    assert ending.seconds < LIMIT_SECONDS


def test_a_rank_that_never_calls_is_named(tmp_path: Path) -> None:
    ending = run(tmp_path, "time.sleep(600) if comm.rank == 1 else comm.all_reduce(np.zeros(3))", debug=True)
    assert ending.code == 1
    assert ending.seconds < LIMIT_SECONDS
    assert "rank 0 called all_reduce(x of shape (3,) and dtype float64, op='sum') at program.py:9" in ending.stderr
    assert "rank 1 of its group (0, 1, 2) made no call within 5 s" in ending.stderr
    assert ending.stderr.count("Traceback") == 1


def test_different_calls_end_the_job_in_debug_mode(tmp_path: Path) -> None:
    ending = run(tmp_path, "comm.all_reduce(np.zeros(3 + (comm.rank == 2)))", debug=True)
    assert ending.seconds < LIMIT_SECONDS
    assert "CommunicatorMismatch: the ranks of a group made different collective calls:" in ending.stderr
    assert "rank 0 called all_reduce(x of shape (3,)" in ending.stderr
    assert "rank 2 called all_reduce(x of shape (4,)" in ending.stderr
    assert ending.stderr.count("Traceback") == 1


def test_one_rank_alone(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ending, abort_on_error(connect("single")):
        raise OSError("disk full")
    assert ending.value.code == 1
    printed = capsys.readouterr().err
    assert printed.startswith("Traceback (most recent call last):\n")
    assert printed.endswith("OSError: disk full\n")
