"""The process that msrun starts as scheduler of a job on CPUs: it lets the workers find each other.

It answers on the address that msrun tells all processes (`Rendezvous`), and ends when the job is over.
"""

from __future__ import annotations

import asyncio
import errno
import os
import select
import signal
import socket
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from urllib.parse import unquote

from device_mesh import greeting
from device_mesh.launch import LaunchError
from device_mesh.msrun_process import Msrun, SchedulerAddress, words_of
from device_mesh.pmi import LINE_BYTES, parse
from device_mesh.rendezvous import Aborted, Ended, Rendezvous
from device_mesh.secret import read_token

_NO_WORKER_SECONDS = 5.0
_MSRUN_SECONDS = 1.0


def schedule(environment: Mapping[str, str] = os.environ) -> int:
    """Be msrun's scheduler until the job is over; returns the exit code. What a person should know is printed."""
    where = SchedulerAddress.of(environment)
    msrun = Msrun.that_joins()
    try:
        token = read_token(environment)
    except LaunchError as error:
        return _fail(str(error))
    try:
        listener = where.listen()
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            return _leave_to_other(where, msrun, token)
        return _fail(
            f"cannot listen on {where}: {error.strerror}. Give msrun a --master_addr and --master_port to use."
        )
    seconds = "" if where.wait_seconds is None else f", {where.wait_seconds:g} s at most"
    _say(f"Waiting for {where.size} ranks on {where}{seconds}. Rank 0 reports the run in its log (worker_0.log).")
    try:
        job = where.job(msrun)
        rendezvous = Rendezvous(token, where.size, where.wait_seconds, _say, _watch_of(msrun), job)
        asyncio.run(_serve(rendezvous, listener, msrun))
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


def _leave_to_other(where: SchedulerAddress, msrun: Msrun | None, token: bytes) -> int:
    """Where another scheduler of the same job has the port (a second msrun on its machine), wait until it is done."""
    taken = f"cannot listen on {where}, where another program does"
    with (
        suppress(OSError, greeting.TurnedAway),
        socket.create_connection((where.host, where.port), greeting.ANSWER_SECONDS) as other,
    ):
        with other.makefile("rb", buffering=0) as lines:
            answer = greeting.greet(other, lines, token, f"cmd=observe size={where.size}{words_of(where, msrun)}")
        if answer.get("rc") == "0":
            _say(f"Another msrun of this job has its scheduler on {where} and connects these workers too.")
            return _observe(other, where, msrun)
        if answer.get("rc") == str(greeting.FULL):
            taken = f"another job has {where}, with another token"
        elif answer.get("cmd") == "observe":
            taken = f"another job, of {answer.get('size', '')[:20]} ranks, has {where}"
    return _fail(f"{taken}. Give msrun another --master_port.")


def _observe(other: socket.socket, where: SchedulerAddress, msrun: Msrun | None) -> int:
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
