"""A worker that MindSpore's msrun started on CPUs: it meets the others at msrun's scheduler process.

It connects there (`msrun_scheduler.py`) and loads MPI when all are there; the connection becomes MPI's, and a thread
watches it: when the scheduler hangs up, the job is over and so is the worker. When msrun is gone, the thread sends its
own process SIGTERM: a program that handles it ends in its own time, any other at once.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import sys
import threading
import time
from contextlib import suppress
from functools import cache
from typing import NoReturn
from urllib.parse import unquote

from attrs import define

from device_mesh import greeting, shared_memory
from device_mesh.launch import Launch, LaunchError, launched
from device_mesh.msrun_process import Msrun, SchedulerAddress, words_of
from device_mesh.pmi import LINE_BYTES, parse
from device_mesh.rendezvous import keep_alive
from device_mesh.secret import read_token
from device_mesh.variables import of_another_start

_RETRY_SECONDS = 0.1
_LOCAL_SCHEDULER_SECONDS = 60.0
_TURNED_AWAY_SECONDS = 10.0


@cache
def join() -> None:
    """Meet the other workers of msrun at the scheduler, and leave in the environment what MPI needs to connect them.

    Raises LaunchError where that fails. What is the same for all workers only the first of each node raises; the others
    wait to be ended with it.
    """
    launch = launched()
    assert launch is not None
    where = SchedulerAddress.of(os.environ)
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
    connection, answer = _meet(where, launch, msrun)
    _await_all(connection, answer, where, launch)
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


def _reach(where: SchedulerAddress, launch: Launch, msrun: Msrun | None) -> socket.socket:
    """Connect; the scheduler may start after its workers, on another machine much later."""
    own = launch.rank == launch.local_rank and where.is_here()
    limits = [_LOCAL_SCHEDULER_SECONDS if own else None, where.wait_seconds]
    limit = min((seconds for seconds in limits if seconds is not None), default=None)
    start = time.monotonic()
    while True:
        try:
            connection = socket.create_connection((where.host, where.port), timeout=greeting.ANSWER_SECONDS)
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


def _meet(where: SchedulerAddress, launch: Launch, msrun: Msrun | None) -> tuple[socket.socket, dict[str, str]]:
    """Connect and say who we are; again where the scheduler is overrun by clients and hangs up."""
    try:
        token = read_token()
    except LaunchError as error:
        problem = str(error)
    else:
        words = f"cmd=initack pmiid={launch.rank} size={where.size}{words_of(where, msrun)}"
        first_time = time.monotonic()
        while True:
            connection = _reach(where, launch, msrun)
            with connection.makefile("rb", buffering=0) as lines:  # not a byte beyond what is asked for: MPI reads on
                try:
                    return connection, greeting.greet(connection, lines, token, words)
                except OSError:
                    return connection, {}
                except greeting.TurnedAway:
                    connection.close()
            if time.monotonic() - first_time > _TURNED_AWAY_SECONDS:
                return connection, {}
            time.sleep(_RETRY_SECONDS)
    _fail_together(launch, problem)


def _await_all(connection: socket.socket, answer: dict[str, str], where: SchedulerAddress, launch: Launch) -> None:
    """Return when all ranks are there."""
    if answer.get("cmd") != "initack":
        _fail_together(
            launch, f"what answers on {where} is not the scheduler of this job: give msrun another --master_port"
        )
    if answer.get("rc") != "0":
        refusal = f"the scheduler on {where} refused this worker: {unquote(answer.get('reason', ''))}"
        if answer.get("rc") == str(greeting.FULL):
            _fail_together(launch, refusal)
        raise LaunchError(refusal)
    last: dict[str, str] = {}
    with connection.makefile("rb", buffering=0) as lines, suppress(OSError):
        connection.settimeout(None if where.wait_seconds is None else where.wait_seconds + greeting.ANSWER_SECONDS)
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
    where: SchedulerAddress
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


def _end(launch: Launch, where: SchedulerAddress, reason: str | None) -> NoReturn:
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
