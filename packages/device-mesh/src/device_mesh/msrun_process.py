"""What msrun tells the processes that it starts: where the scheduler is, and whether msrun waits for them.

msrun starts the same program as every worker and once more as scheduler, and tells all of them the scheduler's address.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path

from attrs import frozen

from device_mesh.launch import LaunchError


@frozen
class SchedulerAddress:
    """Where msrun says the scheduler is, and how many ranks wait for each other how long."""

    host: str
    port: int
    size: int
    wait_seconds: float | None

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> SchedulerAddress:
        try:
            seconds = float(environment.get("MS_TOPO_TIMEOUT", "600"))
            return cls(
                environment["MS_SCHED_HOST"],
                int(environment["MS_SCHED_PORT"]),
                int(environment["MS_WORKER_NUM"]),
                None if seconds < 0 else seconds,
            )
        except (KeyError, ValueError) as error:
            names = ("MS_WORKER_NUM", "MS_SCHED_HOST", "MS_SCHED_PORT", "MS_TOPO_TIMEOUT")
            said = ", ".join(f"{name}={environment.get(name, 'unset')}" for name in names)
            raise LaunchError(
                f"this process is one of msrun's, but its variables do not say where the others are: {said}. "
                "Start the program with msrun, or with mpiexec"
            ) from error

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"

    def listen(self) -> socket.socket:
        family = socket.AF_INET6 if ":" in self.host else socket.AF_INET
        return socket.create_server((self.host, self.port), family=family, backlog=self.size + 64)

    def job(self, msrun: Msrun | None) -> str | None:
        """What tells the job from all others where one msrun starts its scheduler and all of its ranks, else None."""
        return str(msrun.pid) if msrun is not None and msrun.workers == self.size and self.is_here() else None

    def is_here(self) -> bool:
        """Whether the address is one of this machine."""
        try:
            with socket.socket(socket.AF_INET6 if ":" in self.host else socket.AF_INET) as probe:
                probe.bind((self.host, 0))
        except OSError:
            return False
        return True


@frozen
class Msrun:
    """The msrun that started this process and waits for its workers.

    workers: how many of them its `--local_worker_num` says, if it is there.
    """

    pid: int
    workers: int | None = None

    @classmethod
    def that_joins(cls) -> Msrun | None:
        """None where msrun does not wait (without --join=True it ends when all are started), or cannot be looked at."""
        pid = os.getppid()
        with suppress(OSError):
            words = Path(f"/proc/{pid}/cmdline").read_text(encoding="utf-8").split("\0")
            name = " ".join(words[:3])
            if _option(words, "--join") == "True" and ("msrun" in name or "mindspore.parallel.cluster" in name):
                workers = _option(words, "--local_worker_num")
                return cls(pid, int(workers) if workers.isdecimal() else None)
        return None

    def is_gone(self) -> bool:
        """Whether it has ended and left us behind."""
        return os.getppid() != self.pid

    def has_worker(self) -> bool:
        """Whether any of its workers is alive; True where the system does not say."""
        try:
            children = Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text(encoding="ascii").split()
        except OSError:
            return True
        return any(_is_worker(int(child)) for child in children if int(child) != os.getpid())


def _option(words: Sequence[str], name: str) -> str:
    """What a command line gives an option first; empty where it has none."""
    for word, following in pairwise((*words, "")):
        if word == name:
            return following
        if word.startswith(f"{name}="):
            return word.removeprefix(f"{name}=")
    return ""


def words_of(where: SchedulerAddress, msrun: Msrun | None) -> str:
    """The words by which the server can tell that two processes belong to the same msrun, and to the same job."""
    job = where.job(msrun)
    return ("" if msrun is None else f" msrun={msrun.pid}") + ("" if job is None else f" job={job}")


def _is_worker(pid: int) -> bool:
    """Whether a child of msrun is neither dead nor the `tail` that shows a log."""
    with suppress(OSError):
        program = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[0]
        return bool(program) and Path(program.decode(errors="replace")).name != "tail"
    return False
