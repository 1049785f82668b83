"""A server where the ranks of an MPI job find each other without mpiexec, and which notices when one of them dies.

It speaks PMI-1. Each rank keeps one connection for as long as it lives. It shows that it knows the job's token
(`greeting.py`), says `cmd=initack pmiid=RANK size=RANKS msrun=ID job=ID` (all but its rank may be left out; `job` is
said where one msrun starts all ranks) and is told to go on when all ranks have come. A connection that ends before
`cmd=finalize` is a rank that died, and ends the job: the others are told `cmd=ended reason=...` and cut off.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from urllib.parse import quote

from attrs import define, field

from device_mesh.greeting import FULL, Door, Greeting
from device_mesh.pmi import LINE_BYTES, KeyValues, ProtocolError, parse, read_line

_FLUSH_SECONDS = 1.0
_WATCH_SECONDS = 0.5
_STRANGERS = 64
_REFUSALS_SHOWN = 100


class Ended(Exception):
    """The job is over before its time. `exit_code` is what it should end with."""

    def __init__(self, reason: str, *, exit_code: int = 1) -> None:
        super().__init__(reason)
        self.exit_code = exit_code


class Aborted(Ended):
    """A rank ended the job itself, and said why in its own log."""


@define(eq=False)
class _Member:
    """A rank that has joined. `msrun` is what started it, if it says."""

    rank: int
    msrun: str | None
    where: str
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    finished: bool = False
    gone: bool = False

    def tell(self, line: str) -> None:
        self.writer.write(f"{line}\n".encode())


@define(eq=False)
class Rendezvous:
    """The ranks of one job, as its server sees them.

    token:        what only processes of the job know.
    size:         how many ranks the job has.
    wait_seconds: how long they may take to join, and then to start MPI together; None: for ever.
    say:          takes each line that a person should read.
    watch:        called twice a second with whether ranks are still missing; may raise `Ended` to end the job.
    job:          the `job` that ranks must say they are of; None: they must say none.
    """

    token: bytes
    size: int
    wait_seconds: float | None
    say: Callable[[str], None]
    watch: Callable[[bool], None] = lambda missing: None
    job: str | None = None
    _values: KeyValues = field(init=False)
    _members: dict[int, _Member] = field(init=False, factory=dict)
    _in_barrier: set[int] = field(init=False, factory=set)
    _met: bool = field(init=False, default=False)
    _waiting_since: float = field(init=False, factory=time.monotonic)
    _observers: list[asyncio.StreamWriter] = field(init=False, factory=list)
    _door: Door = field(init=False)
    _refusals: int = field(init=False, default=0)
    _over: asyncio.Future[None] = field(init=False)

    def __attrs_post_init__(self) -> None:
        self._door = Door(self.token, self.size + _STRANGERS, self._refused)
        self._values = KeyValues(f"job_{os.getpid()}_{secrets.token_hex(8)}", self.size)

    async def serve(self, listener: socket.socket) -> None:
        """Answer ranks that connect to `listener` until all have finished.

        Raises `Ended` where they cannot: some did not come, one died, aborted or broke the protocol.
        """
        loop = asyncio.get_running_loop()
        self._over = loop.create_future()
        server = await asyncio.start_server(self._connected, sock=listener, limit=LINE_BYTES)
        watching = loop.create_task(self._watch())
        farewell = "cmd=finished"
        try:
            await self._over
        except Ended as ended:
            farewell = f"cmd=ended reason={quote(str(ended))}"
            raise
        finally:
            watching.cancel()
            server.close()
            await self._dismiss(farewell)

    def end(self, ended: Ended) -> None:
        """End the job; who comes first says why."""
        if not self._over.done():
            self._over.set_exception(ended)

    def _missing(self) -> list[int]:
        return [rank for rank in range(self.size) if rank not in self._members]

    async def _watch(self) -> None:
        while not self._over.done():
            missing = self._missing()
            try:
                self.watch(bool(missing))
                self._check_time(missing)
            except Ended as ended:
                self.end(ended)
            await asyncio.sleep(_WATCH_SECONDS)

    def _check_time(self, missing: Sequence[int]) -> None:
        if self.wait_seconds is None or time.monotonic() - self._waiting_since <= self.wait_seconds:
            return
        if missing:
            raise Ended(
                f"{len(self._members)} of {self.size} ranks joined within {self.wait_seconds:g} s, and "
                f"{name_ranks(missing)} did not: were they started, and what do their logs say?"
            )
        if self._in_barrier and not self._met:
            late = [rank for rank in range(self.size) if rank not in self._in_barrier]
            raise Ended(
                f"{name_ranks(late)} joined and did not start MPI within {self.wait_seconds:g} s of the others."
            )

    async def _dismiss(self, line: str) -> None:
        """Tell everyone that it is over, and hang up."""
        writers = [member.writer for member in self._members.values()] + self._observers
        for writer in writers:
            if not writer.is_closing():
                writer.write(f"{line}\n".encode())
                writer.close()
        with suppress(TimeoutError):
            farewells = (writer.wait_closed() for writer in writers)
            await asyncio.wait_for(asyncio.gather(*farewells, return_exceptions=True), _FLUSH_SECONDS)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        where = "{}:{}".format(*writer.get_extra_info("peername")[:2])
        keep_alive(writer.get_extra_info("socket"))
        try:
            greeting = await self._door.greet(reader, writer, where)
            if greeting is None:
                return
            if greeting.words["cmd"] == "observe":
                await self._observe(reader, writer, greeting)
            elif (member := self._admit(greeting, reader, writer, where)) is not None:
                await self._listen(member)
        except (ConnectionError, asyncio.CancelledError):
            pass  # cancelled: the job is over, and this client still there
        finally:
            writer.close()

    def _admit(
        self, greeting: Greeting, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, where: str
    ) -> _Member | None:
        """Take in a rank, and let all go on if it was the last; None for who is not a rank of this job."""
        words = greeting.words
        problem = self._problem(words)
        if problem is not None:
            self._refused(f"a worker at {where}: {problem}")
            rc = 1 if self._missing() and words.get("job") == self.job else FULL
            writer.write(f"cmd=initack rc={rc} reason={quote(problem)}\n".encode())
            return None
        member = _Member(int(words["pmiid"]), words.get("msrun"), where, reader, writer)
        self._members[member.rank] = member
        member.tell(f"cmd=initack rc=0 proof={greeting.proof}")
        if not self._missing():
            self.say(f"All {self.size} ranks have joined.")
            for other in self._members.values():
                other.tell(f"cmd=set size={self.size}\ncmd=set rank={other.rank}\ncmd=set debug=0")
        return member

    def _problem(self, words: dict[str, str]) -> str | None:
        """Why a client is not a rank of this job."""
        rank, size = words.get("pmiid", "")[:20], words.get("size", str(self.size))[:20]
        if size != str(self.size):
            return f"it is one of {size} ranks, and the job here has {self.size}"
        if words.get("job") != self.job:
            return f"it is of another job than the {self.size} ranks here: another job needs another port"
        if not (rank.isascii() and rank.isdigit() and int(rank) < self.size):
            return f"its rank is {rank!r}, and the job here has ranks 0 to {self.size - 1}"
        if int(rank) in self._members:
            known = f"rank {rank} has joined already, from {self._members[int(rank)].where}"
            full = f"{known}, and so have all {self.size} of the job here: another job needs another port"
            return known if self._missing() else full
        return None

    def _refused(self, whom: str) -> None:
        self._refusals += 1
        if self._refusals <= _REFUSALS_SHOWN:
            self.say(f"Refused {whom}.")

    async def _observe(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, greeting: Greeting) -> None:
        """Let another scheduler of the same job wait for its end; send one of another job away.

        It is of the same job if no msrun starts all ranks of either, and ranks are still missing or its msrun started
        some of those that have come. There are not more of them than ranks.
        """
        words = greeting.words
        related = "msrun" in words and any(member.msrun == words["msrun"] for member in self._members.values())
        several = self.job is None and "job" not in words
        full = len(self._observers) >= self.size
        if full or words.get("size") != str(self.size) or not (several and (self._missing() or related)):
            writer.write(f"cmd=observe rc=1 size={self.size}\n".encode())
            return
        writer.write(f"cmd=observe rc=0 proof={greeting.proof}\n".encode())
        self._observers.append(writer)
        with suppress(ProtocolError):
            await read_line(reader)
        self._observers.remove(writer)

    async def _listen(self, member: _Member) -> None:
        """Answer a rank until it hangs up, and judge whether it may."""
        try:
            while line := await read_line(member.reader):
                self._answer(member, parse(line))
        except ProtocolError as error:
            self.end(Ended(f"Rank {member.rank} of {self.size}, at {member.where}, {error}."))
        except Ended as ended:
            self.end(ended)
        member.gone = True
        if not member.finished:
            self.end(Ended(self._died(member)))
        elif not self._missing() and all(other.gone for other in self._members.values()) and not self._over.done():
            self._over.set_result(None)

    def _answer(self, member: _Member, request: dict[str, str]) -> None:
        match request.get("cmd"):
            case "barrier_in":
                self._enter_barrier(member)
            case "finalize":
                member.finished = True
                member.tell("cmd=finalize_ack rc=0")
            case "abort":
                code = request.get("exitcode", "")[:4]
                raise Aborted(
                    f"Rank {member.rank} of {self.size} ended the job with exit code {code}; its log says why.",
                    exit_code=int(code) if code.isascii() and code.isdigit() and 0 < int(code) < 256 else 1,
                )
            case _:
                member.tell(self._values.answer(request, member.rank))

    def _enter_barrier(self, member: _Member) -> None:
        if not self._in_barrier:
            self._waiting_since = time.monotonic()
        self._in_barrier.add(member.rank)
        if len(self._in_barrier) == self.size:
            self._in_barrier.clear()
            self._met = True  # the later ones end ranks that finish, which may take one of them long
            for other in self._members.values():
                other.tell("cmd=barrier_out rc=0")

    def _died(self, member: _Member) -> str:
        who = f"Rank {member.rank} of {self.size}, at {member.where}, ended"
        if missing := self._missing():
            return f"{who} while {name_ranks(missing)} had not joined: look into the logs of the missing first."
        return f"{who} without finishing."


def name_ranks(ranks: Sequence[int]) -> str:
    """
    >>> name_ranks([3]), name_ranks(range(4)), name_ranks(range(100))
    ('rank 3', 'ranks 0, 1, 2, 3', 'ranks 0, 1, 2, 3, 4, 5, 6, 7, … (100 in all)')
    """
    shown = ", ".join(map(str, ranks[:8]))
    if len(ranks) > 8:
        shown += f", … ({len(ranks)} in all)"
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}"


def keep_alive(connection: socket.socket) -> None:
    """Notice within a minute that the other side's machine is gone."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (("TCP_KEEPIDLE", 30), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 3)):
        if hasattr(socket, option):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
