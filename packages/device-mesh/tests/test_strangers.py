"""Strangers at the port of a job that is joining: the job joins and finishes all the same.

The job is three ranks that speak PMI-1 to a real server. Strangers play before and while its ranks join.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable

import pytest
from device_mesh import greeting
from device_mesh.pmi import parse
from device_mesh.secret import proof
from rendezvous_job import SECONDS, TOKEN, Client, Job


def finished(job: Job, ranks: list[Client]) -> None:
    """The ranks exchange keys, meet and finish, and the server ends well."""
    for number, rank in enumerate(ranks):
        assert rank.ask(f"cmd=put key=of-{number} value={number}")["rc"] == "0"
        rank.say("cmd=barrier_in")
    assert [rank.hear()["cmd"] for rank in ranks] == ["barrier_out"] * len(ranks)
    assert ranks[0].ask("cmd=get key=of-2")["value"] == "2"
    for rank in ranks:
        assert rank.ask("cmd=finalize")["cmd"] == "finalize_ack"
        rank.close()
    assert job.ended() == "None"


def say(line: str) -> Callable[[Job], None]:
    """Answer the challenge with a line, and hang up when the server does."""

    def play(job: Job) -> None:
        stranger = job.client()
        assert stranger.hear()["cmd"] == "challenge"
        stranger.say(line)
        if parse(line.encode()).get("cmd") in ("initack", "observe"):
            answer = stranger.hear()
            assert answer["rc"] == str(greeting.FULL)
            assert "does%20not%20know%20the%20token" in answer["reason"]

    return play


def wrong_token(job: Job) -> None:
    for words in ("cmd=initack pmiid=1 size=3", "cmd=observe size=3"):
        assert job.client().greet(words, b"another token of 16")["rc"] == str(greeting.FULL)


def half_a_line(job: Job) -> None:
    job.client().socket.sendall(b"cmd=initack pmiid=1")  # and silence


def giant_line(job: Job) -> None:
    stranger = job.client()
    try:
        for _ in range(100):
            stranger.socket.sendall(b"x" * 65_536)
    except ConnectionError:
        return
    assert _hung_up(stranger)


def flood(job: Job) -> None:
    for _ in range(500):
        job.client()


def keys_of_others(job: Job) -> None:
    """A stranger who does not greet and stores at once."""
    stranger = job.client()
    stranger.say("cmd=put key=of-2 value=mine\ncmd=barrier_in\ncmd=finalize\ncmd=abort exitcode=1")
    assert _hung_up(stranger)


def observers(job: Job) -> None:
    for _ in range(100):
        stranger = job.client()
        stranger.say("cmd=observe size=3")
        assert stranger.hear()["cmd"] == "challenge"
        assert stranger.hear()["rc"] == str(greeting.FULL)


def garbage(job: Job) -> None:
    job.client().socket.sendall(bytes(range(256)) * 8)


def _hung_up(stranger: Client) -> bool:
    """Whether the server ends the connection, without having taken the stranger in."""
    told = b""
    try:
        while more := stranger.socket.recv(4096):
            told += more
    except ConnectionError:
        pass
    return b"rc=0" not in told


STRANGERS: dict[str, Callable[[Job], None]] = {
    "initack without a proof": say("cmd=initack pmiid=1 size=3"),
    "initack with an empty proof": say("cmd=initack pmiid=1 size=3 nonce=0 proof="),
    "initack with a proof of nothing": say(f"cmd=initack pmiid=1 size=3 nonce=0 proof={proof(b'', 'client')}"),
    "two proofs": say("cmd=initack pmiid=1 proof=0 proof=0"),
    "abort": say("cmd=abort exitcode=1"),
    "finalize": say("cmd=finalize"),
    "wrong token": wrong_token,
    "garbage": garbage,
    "half a line and silence": half_a_line,
    "giant line": giant_line,
    "flood of connections": flood,
    "keys of others": keys_of_others,
    "observers without end": observers,
}


@pytest.mark.parametrize("stranger", STRANGERS.values(), ids=STRANGERS)
def test_a_job_joins_and_finishes_beside_a_stranger(
    stranger: Callable[[Job], None], caplog: pytest.LogCaptureFixture
) -> None:
    with Job(3) as job:
        stranger(job)
        ranks = [job.rank(0)]
        stranger(job)
        ranks += [job.rank(1), job.rank(2)]
        for rank in ranks:
            assert [rank.hear()["cmd"] for _ in range(3)] == ["set"] * 3
        stranger(job)
        finished(job, ranks)
    assert caplog.records == []  # of asyncio, which reports what a server forgot to end


def test_a_recorded_greeting_is_worth_nothing() -> None:
    """The words by which a rank was taken in, said once more: the challenge is another one."""
    with Job(3) as job:
        rank = job.client()
        challenge = rank.hear()["nonce"]
        said = "cmd=initack pmiid=1 size=3 nonce=00"
        recorded = f"{said} proof={proof(TOKEN, 'client', challenge, said)}"
        assert rank.ask(recorded)["rc"] == "0"
        replay = job.client()
        assert replay.hear()["nonce"] != challenge
        assert replay.ask(recorded)["rc"] == str(greeting.FULL)
        ranks = [job.rank(0), rank, job.rank(2)]
        for member in ranks:
            assert [member.hear()["cmd"] for _ in range(3)] == ["set"] * 3
        finished(job, ranks)


def test_a_rank_cannot_change_what_another_stored() -> None:
    with Job(3) as job:
        ranks = job.ranks()
        assert ranks[0].ask("cmd=put key=of-0 value=0")["rc"] == "0"
        assert ranks[1].ask("cmd=put key=of-0 value=1") == {"cmd": "put_result", "rc": "-1", "msg": "key_of_rank_0"}
        assert ranks[2].ask("cmd=get key=of-0")["value"] == "0"
        finished(job, ranks)


def test_schedulers_that_wait_for_the_end_are_not_more_than_ranks() -> None:
    with Job(3) as job:
        waiting = [job.client() for _ in range(5)]
        assert [client.greet("cmd=observe size=3")["rc"] for client in waiting] == ["0", "0", "0", "1", "1"]
        waiting[0].close()
        deadline = time.monotonic() + SECONDS
        while job.client().greet("cmd=observe size=3")["rc"] != "0":
            assert time.monotonic() < deadline
        finished(job, job.ranks())


@pytest.mark.parametrize("answer", [b"cmd=initack rc=0\n", b"cmd=initack rc=0 proof=00\n", b"220 mail ready\n"])
def test_a_stranger_in_the_place_of_the_server_is_not_believed(answer: bytes) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        client = Client(socket.create_connection(listener.getsockname(), timeout=SECONDS))
        stranger, _ = listener.accept()
        with stranger:
            stranger.sendall(b"cmd=challenge nonce=00\n" + answer)
            assert client.greet("cmd=initack pmiid=0 size=3").get("rc") != "0"
            assert TOKEN not in stranger.recv(4096)
        client.close()


def test_a_server_that_hangs_up_before_it_answers_is_asked_again() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        client = Client(socket.create_connection(listener.getsockname(), timeout=SECONDS))
        listener.accept()[0].close()
        with pytest.raises(greeting.TurnedAway):
            client.greet("cmd=initack pmiid=0 size=3")
        client.close()
