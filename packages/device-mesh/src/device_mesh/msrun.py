"""Ranks that MindSpore's msrun started on CPUs: its scheduler process lets the workers find each other.

msrun starts the same program as every worker and once more as scheduler, and tells all of them the scheduler's address.
The scheduler answers there (`Rendezvous`). A worker connects first and loads MPI when all are there; the connection
becomes MPI's, and a thread watches it: when the scheduler hangs up, the job is over and so is the worker. When msrun
is gone, the thread sends its own process SIGTERM: a program that handles it ends in its own time, any other at once.
"""

from __future__ import annotations

import asyncio
import errno
import os
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import NoReturn
from urllib.parse import unquote

from attrs import define, frozen

from device_mesh import shared_memory
from device_mesh.launch import Launch, LaunchError, launched
from device_mesh.pmi import LINE_BYTES, parse
from device_mesh.rendezvous import FULL, Aborted, Ended, Rendezvous, keep_alive
from device_mesh.variables import of_another_start

_RETRY_SECONDS = 0.1
_LOCAL_SCHEDULER_SECONDS = 60.0
_NO_WORKER_SECONDS = 5.0
_ANSWER_SECONDS = 30.0
_MSRUN_SECONDS = 1.0


@frozen
class _Scheduler:
    """Where msrun says the scheduler is, and how many ranks wait for each other how long."""

    host: str
    port: int
    size: int
    wait_seconds: float | None

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> _Scheduler:
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


def schedule(environment: Mapping[str, str] = os.environ) -> int:
    """Be msrun's scheduler until the job is over; returns the exit code. What a person should know is printed."""
    where = _Scheduler.of(environment)
    msrun = Msrun.that_joins()
    try:
        listener = where.listen()
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            return _leave_to_other(where, msrun)
        return _fail(
            f"cannot listen on {where}: {error.strerror}. Give msrun a --master_addr and --master_port to use."
        )
    seconds = "" if where.wait_seconds is None else f", {where.wait_seconds:g} s at most"
    _say(f"Waiting for {where.size} ranks on {where}{seconds}. Rank 0 reports the run in its log (worker_0.log).")
    try:
        job = where.job(msrun)
        asyncio.run(_serve(Rendezvous(where.size, where.wait_seconds, _say, _watch_of(msrun), job), listener, msrun))
    except Aborted as ended:
        _say(str(ended))
        return ended.exit_code
    except Ended as ended:
        return _fail(str(ended), ended.exit_code)
    _say("All ranks have finished.")
    return 0


async def _serve(rendezvous: Rendezvous, listener: socket.socket, msrun: Msrun | None) -> None:
    loop = asyncio.get_running_loop()

    def end(number: signal.Signals) -> None:
        rendezvous.end(Aborted(f"The scheduler was ended by {number.name}.", exit_code=128 + number))

    def end_unless_with_msrun() -> None:
        if msrun is None or not msrun.is_gone():
            end(signal.SIGTERM)

    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:  # as a job in the background has it
        loop.add_signal_handler(signal.SIGINT, end, signal.SIGINT)
    # Where msrun got the same signal, the workers end by themselves; it may be a moment behind.
    loop.add_signal_handler(signal.SIGTERM, loop.call_later, _MSRUN_SECONDS, end_unless_with_msrun)
    await rendezvous.serve(listener)


def _leave_to_other(where: _Scheduler, msrun: Msrun | None) -> int:
    """Where another scheduler of the same job has the port (a second msrun on its machine), wait until it is done."""
    taken = f"cannot listen on {where}, where another program does"
    with suppress(OSError), socket.create_connection((where.host, where.port), _ANSWER_SECONDS) as other:
        other.sendall(f"cmd=observe size={where.size}{_name(where, msrun)}\n".encode())
        with other.makefile("rb", buffering=0) as lines:
            answer = parse(lines.readline(LINE_BYTES))
            if answer.get("cmd") == "observe" and answer.get("rc") == "0":
                _say(f"Another msrun of this job has its scheduler on {where} and connects these workers too.")
                return _observe(other, where, msrun)
        if answer.get("cmd") == "observe":
            taken = f"another job, of {answer.get('size', '')[:20]} ranks, has {where}"
    return _fail(f"{taken}. Give msrun another --master_port.")


def _observe(other: socket.socket, where: _Scheduler, msrun: Msrun | None) -> int:
    """Wait for the end of the job, or of the own workers: msrun judges these by itself."""
    start = time.monotonic()
    while not select.select([other], [], [], 1.0)[0]:
        settled = time.monotonic() - start > _NO_WORKER_SECONDS
        if msrun is not None and (msrun.is_gone() or (settled and not msrun.has_worker())):
            return 0
    last = parse(other.recv(LINE_BYTES))
    if last.get("cmd") == "finished":
        return 0
    return _fail(unquote(last.get("reason", f"the scheduler on {where} is gone.")))


def _watch_of(msrun: Msrun | None) -> Callable[[bool], None]:
    """What a scheduler looks at from time to time: is its msrun there, and has that any worker left that could join?"""
    seen = time.monotonic()
    told = False

    def watch(missing: bool) -> None:
        nonlocal seen, told
        if msrun is None or told:
            return
        if msrun.is_gone():
            if missing:
                raise Ended(f"The msrun that waited for this job, process {msrun.pid}, was killed.")
            _say(f"The msrun that waited for this job, process {msrun.pid}, was killed: its workers get SIGTERM.")
            told = True
        elif not missing or msrun.has_worker():
            seen = time.monotonic()
        elif time.monotonic() - seen > _NO_WORKER_SECONDS:
            # Whether that is an error msrun sees by the workers' exit codes.
            raise Ended("All workers of this msrun ended before all ranks had joined; their logs say why.", exit_code=0)

    return watch


def _say(text: str) -> None:
    print(text, flush=True)


def _fail(text: str, exit_code: int = 2) -> int:
    _say(f"Error: {text}")  # msrun shows the lines of scheduler.log that have this word
    return exit_code


@cache
def join() -> None:
    """Meet the other workers of msrun at the scheduler, and leave in the environment what MPI needs to connect them.

    Raises LaunchError where that fails. What is the same for all workers only the first of each node raises; the others
    wait to be ended with it.
    """
    launch = launched()
    assert launch is not None
    where = _Scheduler.of(os.environ)
    if launch.rank is None:
        _fail_together(
            launch,
            "msrun left the numbers of the workers to MindSpore's cluster, which does not run on CPUs here: give each "
            "msrun its --node_rank",
        )
    if "mpi4py.MPI" in sys.modules:
        _fail_together(
            launch,
            "mpi4py.MPI was imported before connect(), and each worker has begun as an MPI of its own: connect first",
        )
    msrun = Msrun.that_joins()
    _check_memory(launch, msrun)
    connection = _reach(where, launch, msrun)
    _greet(connection, where, launch, msrun)
    for name in of_another_start(os.environ):
        del os.environ[name]  # of the launcher that started msrun
    os.environ |= {"PMI_FD": str(os.dup(connection.fileno())), "PMI_RANK": str(launch.rank)}
    os.environ["PMI_SIZE"] = str(where.size)
    watcher = _Watcher(connection, launch, where, msrun)
    threading.Thread(target=watcher.run, name="msrun-scheduler", daemon=True).start()


def _check_memory(launch: Launch, msrun: Msrun | None) -> None:
    """Where the number of workers here is known they fail together; else those that do not fit beside the first."""
    workers = None if msrun is None else msrun.workers
    try:
        shared_memory.check(workers or (launch.local_rank or 0) + 1)
    except LaunchError as error:
        if workers is None:
            raise
        problem = str(error)
    else:
        return
    _fail_together(launch, problem)


def _reach(where: _Scheduler, launch: Launch, msrun: Msrun | None) -> socket.socket:
    """Connect; the scheduler may start after its workers, on another machine much later."""
    own = launch.rank == launch.local_rank and where.is_here()
    limits = [_LOCAL_SCHEDULER_SECONDS if own else None, where.wait_seconds]
    limit = min((seconds for seconds in limits if seconds is not None), default=None)
    start = time.monotonic()
    while True:
        try:
            connection = socket.create_connection((where.host, where.port), timeout=_ANSWER_SECONDS)
            if connection.getsockname() == connection.getpeername():
                # TCP connects a socket to itself where nobody listens and it happened to get that very port.
                connection.close()
                raise ConnectionRefusedError("nobody listens")
        except OSError as error:
            if limit is not None and time.monotonic() - start > limit:
                _fail_together(
                    launch,
                    f"the scheduler of this job does not answer on {where} ({error.strerror or error}), after "
                    f"{limit:g} s: its log is scheduler.log, where msrun with that --master_addr runs",
                )
            if msrun is not None and msrun.is_gone():
                sys.exit(1)
            time.sleep(_RETRY_SECONDS)
        else:
            keep_alive(connection)
            return connection


def _greet(connection: socket.socket, where: _Scheduler, launch: Launch, msrun: Msrun | None) -> None:
    """Say who we are, and return when all ranks are there."""
    nobody = f"what answers on {where} is not the scheduler of this job: give msrun another --master_port"
    answer: dict[str, str] = {}
    with connection.makefile("rb", buffering=0) as lines:  # not a byte beyond what is asked for: MPI reads on
        with suppress(OSError):
            connection.settimeout(_ANSWER_SECONDS)
            connection.sendall(f"cmd=initack pmiid={launch.rank} size={where.size}{_name(where, msrun)}\n".encode())
            answer = parse(lines.readline(LINE_BYTES))
        if answer.get("cmd") != "initack":
            _fail_together(launch, nobody)
        if answer.get("rc") != "0":
            refusal = f"the scheduler on {where} refused this worker: {unquote(answer.get('reason', ''))}"
            if answer.get("rc") == str(FULL):
                _fail_together(launch, refusal)
            raise LaunchError(refusal)
        last: dict[str, str] = {}
        with suppress(OSError):
            connection.settimeout(None if where.wait_seconds is None else where.wait_seconds + _ANSWER_SECONDS)
            while "debug" not in last and (line := lines.readline(LINE_BYTES)):
                last = parse(line)
        if "debug" not in last:
            _end(launch, where, last.get("reason"))
    connection.settimeout(None)


@define(eq=False)
class _Watcher:
    """Ends this worker when the job has ended elsewhere, and asks it to end when its msrun is gone."""

    connection: socket.socket
    launch: Launch
    where: _Scheduler
    msrun: Msrun | None

    def run(self) -> None:
        poll = select.poll()
        poll.register(self.connection, getattr(select, "POLLRDHUP", 0))
        msrun = self.msrun
        while not poll.poll(1000):
            if msrun is not None and msrun.is_gone():
                msrun = None
                os.kill(os.getpid(), signal.SIGTERM)
        last = b""
        with suppress(OSError):
            last = self.connection.recv(LINE_BYTES, socket.MSG_DONTWAIT)
        _end(self.launch, self.where, parse(last).get("reason"))


def _end(launch: Launch, where: _Scheduler, reason: str | None) -> NoReturn:
    """End at once, since the scheduler ended the job: it told why, or vanished itself."""
    if launch.speaks and reason is None:
        print(f"The scheduler on {where} is gone, and with it the job.", file=sys.stderr)
    elif launch.speaks and not where.is_here():  # here its log says why, and msrun shows it
        print(f"The scheduler on {where} ended the job: {unquote(reason or '')}", file=sys.stderr)
    with suppress(Exception):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(1)


def _fail_together(launch: Launch, message: str) -> NoReturn:
    """Raise in the worker that speaks."""
    if launch.speaks:
        raise LaunchError(message)
    launch.leave()


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


def _name(where: _Scheduler, msrun: Msrun | None) -> str:
    """The words by which the server can tell that two processes belong to the same msrun, and to the same job."""
    job = where.job(msrun)
    return ("" if msrun is None else f" msrun={msrun.pid}") + ("" if job is None else f" job={job}")


def _is_worker(pid: int) -> bool:
    """Whether a child of msrun is neither dead nor the `tail` that shows a log."""
    with suppress(OSError):
        program = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[0]
        return bool(program) and Path(program.decode(errors="replace")).name != "tail"
    return False
