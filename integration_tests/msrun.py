"""MindSpore's launcher, as this machine's user would call it."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

BIN = Path(sys.executable).parent
ENVIRONMENT = os.environ | {"PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}", "GLOG_v": "3"}
MODULE = ["python", "-m", "parallel_trainer.run_mindformer"]

_STOP_SECONDS = 60.0


def msrun(folder: Path, workers: int, *program: str, seconds: float = 500.0) -> subprocess.CompletedProcess[str]:
    """What a call of msrun in `folder` comes to; its workers' logs are in `folder/logs`.

    Raises subprocess.TimeoutExpired, with the workers ended, where that takes more than `seconds`.
    """
    command = [str(BIN / "msrun"), f"--worker_num={workers}", f"--local_worker_num={workers}"]
    command += [f"--master_port={_free_port()}", "--join=True", "--log_dir=logs", *program]
    pipe = subprocess.PIPE
    with interruptible():
        job = subprocess.Popen(command, cwd=folder, env=ENVIRONMENT, stdout=pipe, stderr=pipe, text=True)
    with job:
        try:
            printed = job.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            job.send_signal(signal.SIGINT)  # msrun passes no other on to its workers
            try:
                job.communicate(timeout=_STOP_SECONDS)
            finally:
                job.kill()
            raise
    return subprocess.CompletedProcess(command, job.returncode, *printed)


@contextmanager
def interruptible() -> Iterator[None]:
    """Processes that start in here end at these signals, also where ours ignores them: `nohup`, jobs of a shell."""
    numbers = {signal.SIGINT: signal.default_int_handler, signal.SIGHUP: signal.SIG_DFL, signal.SIGTERM: signal.SIG_DFL}
    before = {number: signal.signal(number, handler) for number, handler in numbers.items()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
