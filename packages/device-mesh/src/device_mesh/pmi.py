"""The words of PMI-1, the text protocol by which MPI's ranks learn of each other: one line a request, one an answer."""

from __future__ import annotations

import asyncio
from collections import Counter

from attrs import define, field

LINE_BYTES = 4096
"""No line is longer: room for the longest key and value that ranks are told they may use."""

_KEY_LENGTH, _VALUE_LENGTH, _NAME_LENGTH = 64, 1024, 256
_KEYS_PER_RANK = 1000
# What MPI can do without: starting more ranks, and finding other jobs by name.
_NOT_OFFERED = {
    "spawn": "spawn_result",
    "publish_name": "publish_result",
    "unpublish_name": "unpublish_result",
    "lookup_name": "lookup_result",
}


class ProtocolError(Exception):
    """A client said what PMI-1 does not have; the message says so after the client's name."""


def parse(line: bytes) -> dict[str, str]:
    """The `name=value` words of a line; others are left out.

    >>> parse(b"cmd=put kvsname=job key=a value=b=c\\n")
    {'cmd': 'put', 'kvsname': 'job', 'key': 'a', 'value': 'b=c'}
    """
    words = line.decode("ascii", "replace").split()
    return dict(word.split("=", 1) for word in words if "=" in word)


async def read_line(reader: asyncio.StreamReader) -> bytes:
    """The next line; empty at the end, however the connection came to it."""
    try:
        return await reader.readline()
    except ValueError as error:
        raise ProtocolError(f"sent a line of more than {LINE_BYTES} bytes") from error
    except (ConnectionError, TimeoutError):
        return b""


@define
class KeyValues:
    """What ranks tell each other before they can talk, and the answers to all requests that concern one rank alone.

    A key belongs to the rank that stored it first.

    job_name: MPICH names its shared memory after it, so no other job may have it.
    size:     how many ranks the job has.
    """

    job_name: str
    size: int
    _values: dict[str, str] = field(init=False, factory=dict)
    _owners: dict[str, int] = field(init=False, factory=dict)
    _stored: Counter[int] = field(init=False, factory=Counter)

    def answer(self, request: dict[str, str], rank: int) -> str:
        """The line that answers a request of a rank. Raises ProtocolError for a request that PMI-1 does not have."""
        match request.get("cmd", ""):
            case "init":
                return "cmd=response_to_init rc=0 pmi_version=1 pmi_subversion=1"
            case "get_maxes":
                return f"cmd=maxes rc=0 kvsname_max={_NAME_LENGTH} keylen_max={_KEY_LENGTH} vallen_max={_VALUE_LENGTH}"
            case "get_appnum":
                return "cmd=appnum rc=0 appnum=0"
            case "get_my_kvsname":
                return f"cmd=my_kvsname rc=0 kvsname={self.job_name}"
            case "get_universe_size":
                return f"cmd=universe_size rc=0 size={self.size}"
            case "put":
                return self._put(request.get("key", ""), request.get("value", ""), rank)
            case "get":
                value = self._values.get(request.get("key", ""))
                if value is None:
                    return "cmd=get_result rc=-1 msg=key_not_found value=unknown"
                return f"cmd=get_result rc=0 msg=success value={value}"
            case name if name in _NOT_OFFERED:
                return f"cmd={_NOT_OFFERED[name]} rc=-1 msg=not_offered"
        raise ProtocolError("sent a request that PMI-1 does not have")

    def _put(self, key: str, value: str, rank: int) -> str:
        if not 0 < len(key) <= _KEY_LENGTH or len(value) > _VALUE_LENGTH:
            raise ProtocolError(
                f"stored a key of {len(key)} and a value of {len(value)} characters, where {_KEY_LENGTH} and "
                f"{_VALUE_LENGTH} are the most"
            )
        owner = self._owners.setdefault(key, rank)
        if owner != rank:
            return f"cmd=put_result rc=-1 msg=key_of_rank_{owner}"
        if key not in self._values:
            self._stored[rank] += 1
        if self._stored[rank] > _KEYS_PER_RANK:
            raise ProtocolError(f"stored more than the {_KEYS_PER_RANK:,} keys that a rank may")
        self._values[key] = value
        return "cmd=put_result rc=0 msg=success"
