"""A server where ranks meet, in a thread of its own, and clients for it."""

from __future__ import annotations

import asyncio
import socket
import threading
from contextlib import suppress
from urllib.parse import unquote

from attrs import define, field
from device_mesh import greeting
from device_mesh.pmi import LINE_BYTES, parse
from device_mesh.rendezvous import Ended, Rendezvous

SECONDS = 60.0
TOKEN = b"a token of this job"


@define
class Job:
    """A server in a thread of its own, and its clients."""

    size: int
    wait_seconds: float | None = None
    job: str | None = None
    token: bytes = TOKEN
    said: list[str] = field(factory=list)
    end: Ended | None = None
    _server: Rendezvous = field(init=False)
    _loop: asyncio.AbstractEventLoop = field(init=False)
    _listener: socket.socket = field(factory=lambda: socket.create_server(("127.0.0.1", 0), backlog=128))
    _thread: threading.Thread = field(init=False)
    _clients: list[Client] = field(init=False, factory=list)
    _started: threading.Event = field(init=False, factory=threading.Event)

    def __enter__(self) -> Job:
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        assert self._started.wait(SECONDS)
        return self

    def _run(self) -> None:
        async def serve() -> None:
            self._loop = asyncio.get_running_loop()
            self._server = Rendezvous(self.token, self.size, self.wait_seconds, self.said.append, job=self.job)
            self._loop.call_soon(self._started.set)
            await self._server.serve(self._listener)

        try:
            asyncio.run(serve())
        except Ended as ended:
            self.end = ended

    def __exit__(self, *error: object) -> None:
        for client in self._clients:
            client.close()
        with suppress(RuntimeError):  # its loop has ended
            self._loop.call_soon_threadsafe(self._server.end, Ended("the test is over"))
        self._thread.join(SECONDS)
        self._listener.close()

    def client(self) -> Client:
        self._clients.append(Client(socket.create_connection(self._listener.getsockname(), timeout=SECONDS)))
        return self._clients[-1]

    def rank(self, rank: int, words: str = "") -> Client:
        """A rank that has joined."""
        client = self.client()
        answer = client.greet(f"cmd=initack pmiid={rank} size={self.size}{words}")
        assert (answer["cmd"], answer["rc"]) == ("initack", "0")
        return client

    def ranks(self, words: str = "") -> list[Client]:
        """All ranks, which have been told to go on."""
        clients = [self.rank(rank, words) for rank in range(self.size)]
        for rank, client in enumerate(clients):
            told = client.hear() | client.hear() | client.hear()
            assert told == {"cmd": "set", "size": str(self.size), "rank": str(rank), "debug": "0"}
        return clients

    def ended(self) -> str:
        """Why it ended, which it has to soon."""
        self._thread.join(SECONDS)
        assert not self._thread.is_alive()
        return str(self.end)


@define
class Client:
    socket: socket.socket

    def say(self, line: str) -> None:
        self.socket.sendall(f"{line}\n".encode())

    def hear(self) -> dict[str, str]:
        with self.socket.makefile("rb", buffering=0) as lines:
            return parse(lines.readline(LINE_BYTES))

    def greet(self, words: str, token: bytes = TOKEN) -> dict[str, str]:
        """Say this with a proof of knowing the token."""
        with self.socket.makefile("rb", buffering=0) as lines:
            return greeting.greet(self.socket, lines, token, words)

    def ask(self, line: str) -> dict[str, str]:
        self.say(line)
        return self.hear()

    def close(self) -> None:
        self.socket.close()

    def told_the_end(self) -> str:
        """The reason that a rank is given before it is cut off."""
        last = self.hear()
        assert last["cmd"] == "ended"
        assert self.socket.recv(1) == b""
        return unquote(last["reason"])
