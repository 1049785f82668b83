"""The first words between a rank, or another scheduler, and the server of its job: each shows that it knows the token.

server: cmd=challenge nonce=S
client: cmd=initack pmiid=RANK ... nonce=C proof=P     with P over S and all words before it
server: cmd=initack rc=0 proof=Q                       with Q over C and S; or rc=1 reason=..., or rc=2 reason=...
"""

from __future__ import annotations

import asyncio
import secrets
import socket
from collections.abc import Callable
from urllib.parse import quote

from attrs import define, field, frozen

from device_mesh.pmi import LINE_BYTES, ProtocolError, parse, read_line
from device_mesh.secret import FILE_VARIABLE, VARIABLE, proof, proves

FIRST_LINE_SECONDS = 10.0
"""How long a client that has connected may take to show who it is."""

ANSWER_SECONDS = 30.0
"""How long a server may take to answer a client."""

FULL = 2
"""The `rc` with which those are refused of whom several come: ranks of another job, or without its token."""

_NO_TOKEN = (
    "it does not know the token of the job here: all nodes of a job need the same one, in "
    f"{VARIABLE} or the file that {FILE_VARIABLE} names, and another job needs another port"
)


@frozen
class Greeting:
    """What a client said that knows the token, and the proof to give it in return."""

    words: dict[str, str]
    proof: str


@define(eq=False)
class Door:
    """Clients that have connected and have not shown yet that they belong to the job.

    token:   that of the job.
    most:    how many may be on the way at a time; where more come, the one that has been longest has to leave.
    refused: told of each that is sent away.
    """

    token: bytes
    most: int
    refused: Callable[[str], None]
    _waiting: dict[asyncio.StreamWriter, None] = field(init=False, factory=dict)

    async def greet(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, where: str) -> Greeting | None:
        """What a client says first; None for one that is not of the job."""
        while len(self._waiting) >= self.most:
            oldest = next(iter(self._waiting))
            del self._waiting[oldest]
            oldest.close()
        self._waiting[writer] = None
        challenge = secrets.token_hex(16)
        line = b""
        try:
            writer.write(f"cmd=challenge nonce={challenge}\n".encode())
            line = await asyncio.wait_for(read_line(reader), FIRST_LINE_SECONDS)
        except (TimeoutError, ProtocolError):
            pass
        finally:
            self._waiting.pop(writer, None)
        words = parse(line)
        if words.get("cmd") not in ("initack", "observe"):
            said = repr(line[:40].decode("ascii", "replace").strip()) if line else "nothing to the point"
            self.refused(f"a client at {where} that does not speak PMI-1: it said {said}")
            return None
        signed, _, given = line.decode("ascii", "replace").strip().rpartition(" proof=")
        if not proves(given, self.token, "client", challenge, signed):
            self.refused(f"a client at {where}: {_NO_TOKEN}")
            writer.write(f"cmd={words['cmd']} rc={FULL} reason={quote(_NO_TOKEN)}\n".encode())
            return None
        return Greeting(words, proof(self.token, "server", words.get("nonce", ""), challenge))


class TurnedAway(Exception):
    """The server hung up before it answered: too many clients came at once, or it is none of ours."""


def greet(connection: socket.socket, lines: socket.SocketIO, token: bytes, words: str) -> dict[str, str]:
    """Say `words` to the server of the job, and return its answer; nothing if it is not that server.

    lines: the connection as a file that reads not a byte more than a line.

    Raises TurnedAway, and OSError where the connection fails or the answer takes too long.
    """
    connection.settimeout(ANSWER_SECONDS)
    challenge = _heard(lines)
    if challenge.get("cmd") != "challenge":
        return {}
    nonce = secrets.token_hex(16)
    said = f"{words} nonce={nonce}"
    connection.sendall(f"{said} proof={proof(token, 'client', challenge.get('nonce', ''), said)}\n".encode())
    answer = _heard(lines)
    if answer.get("rc") != "0":
        return answer
    known = proves(answer.get("proof", ""), token, "server", nonce, challenge.get("nonce", ""))
    return answer if known else {}


def _heard(lines: socket.SocketIO) -> dict[str, str]:
    try:
        line = lines.readline(LINE_BYTES)
    except ConnectionError as error:
        raise TurnedAway from error
    if not line:
        raise TurnedAway
    return parse(line)
