"""The server where ranks find each other, with clients that speak PMI-1, badly or not at all."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import suppress
from urllib.parse import unquote

import pytest
from device_mesh import greeting
from device_mesh.pmi import LINE_BYTES, KeyValues, ProtocolError
from device_mesh.rendezvous import Aborted, name_ranks
from rendezvous_job import SECONDS, Client, Job


@pytest.fixture
def job() -> Iterator[Job]:
    with Job(3) as job:
        yield job


def test_a_job_from_joining_to_finishing(job: Job) -> None:
    first, *others = clients = job.ranks()
    assert first.ask("cmd=init pmi_version=1 pmi_subversion=1")["rc"] == "0"
    names = {client.ask("cmd=get_my_kvsname")["kvsname"] for client in clients}
    assert len(names) == 1
    assert first.ask("cmd=get_universe_size")["size"] == "3"
    assert others[0].ask(f"cmd=put kvsname={names.pop()} key=where value=a=b;c")["rc"] == "0"
    for client in clients:
        client.say("cmd=barrier_in")
    assert [client.hear() for client in clients] == [{"cmd": "barrier_out", "rc": "0"}] * 3
    assert first.ask("cmd=get kvsname=x key=where")["value"] == "a=b;c"
    assert first.ask("cmd=get kvsname=x key=nothing")["rc"] == "-1"
    for client in clients:
        assert client.ask("cmd=finalize")["cmd"] == "finalize_ack"
        client.close()
    assert job.ended() == "None"


def test_a_barrier_waits_for_all(job: Job) -> None:
    clients = job.ranks()
    for client in clients[:2]:
        client.say("cmd=barrier_in")
    clients[0].socket.settimeout(0.3)
    with pytest.raises(TimeoutError):
        clients[0].socket.recv(1)
    clients[2].say("cmd=barrier_in")
    assert clients[0].hear()["cmd"] == "barrier_out"


def test_jobs_have_names_of_their_own() -> None:
    """MPICH names shared memory after them."""
    with Job(1) as job, Job(1) as other:
        (rank,), (other_rank,) = job.ranks(), other.ranks()
        assert rank.ask("cmd=get_my_kvsname") != other_rank.ask("cmd=get_my_kvsname")


def test_nobody_goes_on_before_all_are_there(job: Job) -> None:
    first = job.rank(0)
    job.rank(1)
    first.socket.settimeout(0.3)
    with pytest.raises(TimeoutError):
        first.socket.recv(1)


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ("cmd=initack pmiid=3", "its rank is '3', and the job here has ranks 0 to 2"),
        ("cmd=initack pmiid=-1", "its rank is '-1', and the job here has ranks 0 to 2"),
        ("cmd=initack pmiid=" + "9" * 3000, f"its rank is '{'9' * 20}', and the job here has ranks 0 to 2"),
        ("cmd=initack", "its rank is '', and the job here has ranks 0 to 2"),
        ("cmd=initack pmiid=1 size=8", "it is one of 8 ranks, and the job here has 3"),
        ("cmd=initack pmiid=0", "rank 0 has joined already, from 127.0.0.1:"),
    ],
)
def test_who_is_not_a_rank_is_refused_and_the_job_goes_on(job: Job, words: str, reason: str) -> None:
    joined = [job.rank(0)]
    answer = job.client().greet(words)
    assert answer["rc"] == "1"
    assert unquote(answer["reason"]).startswith(reason)
    joined += [job.rank(1), job.rank(2)]
    assert joined[0].hear() == {"cmd": "set", "size": "3"}
    assert [line for line in job.said if line.startswith("Refused a worker at 127.0.0.1:")]


@pytest.mark.parametrize(("own", "words"), [(None, " job=8"), ("7", " job=8"), ("7", "")])
def test_ranks_and_schedulers_of_another_job_are_refused(own: str | None, words: str) -> None:
    with Job(2, job=own) as job:
        answer = job.client().greet(f"cmd=initack pmiid=0 size=2{words}")
        assert answer["rc"] == str(greeting.FULL)
        assert unquote(answer["reason"]) == (
            "it is of another job than the 2 ranks here: another job needs another port"
        )
        assert job.client().greet(f"cmd=observe size=2 msrun=8{words}") == {"cmd": "observe", "rc": "1", "size": "2"}
        job.ranks("" if own is None else f" job={own}")


def test_a_rank_too_many_is_told_that_the_job_has_all(job: Job) -> None:
    job.ranks()
    answer = job.client().greet("cmd=initack pmiid=1 size=3")
    assert answer["rc"] == str(greeting.FULL)
    assert unquote(answer["reason"]).endswith("all 3 of the job here: another job needs another port")


@pytest.mark.parametrize(
    "words", [b"GET / HTTP/1.1\r\nHost: here\r\n\r\n", b"\x16\x03\x01\x02\x00\n", b"\n", b"x" * 70_000]
)
def test_a_client_that_speaks_something_else_is_sent_away(job: Job, words: bytes) -> None:
    stranger = job.client()
    stranger.socket.sendall(words)
    with suppress(ConnectionResetError):  # cut off with words unread
        assert stranger.hear()["cmd"] == "challenge"
        assert stranger.socket.recv(1) == b""
    job.ranks()
    assert "a client at 127.0.0.1:" in job.said[0]
    assert "does not speak PMI-1" in job.said[0]


def test_clients_that_say_nothing_do_not_keep_ranks_out(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(greeting, "FIRST_LINE_SECONDS", 5.0)
    strangers = [job.client() for _ in range(100)]
    begin = time.monotonic()
    while (cut_off := sum(map(_cut_off, strangers))) < 100 - (3 + 64) and time.monotonic() < begin + SECONDS:
        time.sleep(0.05)
    assert cut_off == 100 - (3 + 64)  # at once: there is room for the ranks and 64 more
    assert [_cut_off(stranger) for stranger in strangers].index(False) == cut_off  # the first of them
    while not all(map(_cut_off, strangers)) and time.monotonic() < begin + SECONDS:
        time.sleep(0.05)
    assert all(map(_cut_off, strangers))
    job.ranks()


def _cut_off(client: Client) -> bool:
    """Whether the server has hung up after its challenge."""
    client.socket.setblocking(False)
    try:
        while client.socket.recv(LINE_BYTES):
            pass
    except BlockingIOError:
        return False
    return True


def test_ranks_that_do_not_come_are_named() -> None:
    reason = "1 of 3 ranks joined within 2 s, and ranks 0, 2 did not: were they started, and what do their logs say?"
    with Job(3, wait_seconds=2.0) as job:
        assert job.rank(1).told_the_end() == reason
        assert job.ended() == reason


def test_ranks_that_do_not_start_mpi_are_named() -> None:
    with Job(3, wait_seconds=2.0) as job:
        clients = job.ranks()
        clients[0].say("cmd=barrier_in")
        assert clients[2].told_the_end() == "ranks 1, 2 joined and did not start MPI within 2 s of the others."


def test_finishing_may_take_one_rank_long() -> None:
    with Job(2, wait_seconds=2.0) as job:
        clients = job.ranks()
        for pause in (0.0, 3.0):
            clients[0].say("cmd=barrier_in")
            time.sleep(pause)
            clients[1].say("cmd=barrier_in")
            assert [client.hear()["cmd"] for client in clients] == ["barrier_out"] * 2


def test_a_rank_that_dies_before_the_others_have_joined(job: Job) -> None:
    waiting, dying = job.rank(0), job.rank(2)
    dying.close()
    reason = waiting.told_the_end()
    assert reason.startswith("Rank 2 of 3, at 127.0.0.1:")
    assert reason.endswith("ended while rank 1 had not joined: look into the logs of the missing first.")
    assert job.ended() == reason


def test_a_rank_that_dies_ends_the_job(job: Job) -> None:
    clients = job.ranks()
    clients[1].close()
    assert clients[0].told_the_end().endswith("ended without finishing.")
    assert clients[2].told_the_end().startswith("Rank 1 of 3, at 127.0.0.1:")
    assert job.ended().startswith("Rank 1 of 3")


@pytest.mark.parametrize(("asked", "code"), [("7", 7), ("0", 1), ("-3", 1), ("999", 1), ("x", 1)])
def test_a_rank_that_aborts_decides_the_exit_code(job: Job, asked: str, code: int) -> None:
    clients = job.ranks()
    clients[1].say(f"cmd=abort exitcode={asked} message=abort")
    assert clients[0].told_the_end().startswith("Rank 1 of 3 ended the job with exit code")
    job.ended()
    assert isinstance(job.end, Aborted)
    assert job.end.exit_code == code


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("cmd=put key=a value=" + "v" * 5000, "sent a line of more than 4096 bytes."),
        (
            "cmd=put key=a value=" + "v" * 1025,
            "stored a key of 1 and a value of 1025 characters, where 64 and 1024 are the most.",
        ),
        ("cmd=put key= value=v", "stored a key of 0 and a value of 1 characters, where 64 and 1024 are the most."),
        ("cmd=format_disk", "sent a request that PMI-1 does not have."),
    ],
)
def test_a_rank_that_breaks_the_protocol_ends_the_job(job: Job, line: str, reason: str) -> None:
    clients = job.ranks()
    clients[2].say(line)
    assert clients[0].told_the_end().endswith(reason)
    assert job.ended().startswith("Rank 2 of 3, at 127.0.0.1:")


def test_another_scheduler_waits_for_the_end_of_its_own_job_only(job: Job) -> None:
    assert job.client().greet("cmd=observe size=4") == {"cmd": "observe", "rc": "1", "size": "3"}
    observer = job.client()
    assert observer.greet("cmd=observe size=3")["rc"] == "0"
    clients = job.ranks(" msrun=77")
    assert job.client().greet("cmd=observe size=3")["rc"] == "1"
    assert job.client().greet("cmd=observe size=3 msrun=78")["rc"] == "1"
    assert job.client().greet("cmd=observe size=3 msrun=77")["rc"] == "0"
    for client in clients:
        client.ask("cmd=finalize")
        client.close()
    assert observer.hear() == {"cmd": "finished"}


def test_what_ranks_may_store_is_limited() -> None:
    values = KeyValues("job", 1)
    for key in range(1000):
        values.answer({"cmd": "put", "key": str(key), "value": ""}, 0)
    values.answer({"cmd": "put", "key": "0", "value": "again"}, 0)
    with pytest.raises(ProtocolError, match="stored more than the 1,000 keys that a rank may"):
        values.answer({"cmd": "put", "key": "one more", "value": ""}, 0)


def test_a_key_belongs_to_the_rank_that_stored_it() -> None:
    values = KeyValues("job", 2)
    assert values.answer({"cmd": "put", "key": "k", "value": "of 0"}, 0) == "cmd=put_result rc=0 msg=success"
    assert values.answer({"cmd": "put", "key": "k", "value": "of 1"}, 1) == "cmd=put_result rc=-1 msg=key_of_rank_0"
    assert values.answer({"cmd": "get", "key": "k"}, 1).endswith("value=of 0")


@pytest.mark.parametrize("call", ["spawn", "publish_name", "unpublish_name", "lookup_name"])
def test_what_is_not_offered_is_declined(call: str) -> None:
    assert "rc=-1" in KeyValues("job", 1).answer({"cmd": call}, 0)


def test_ranks_in_words() -> None:
    assert name_ranks([3]) == "rank 3"
    assert name_ranks([1, 2]) == "ranks 1, 2"
    assert name_ranks(range(100)) == "ranks 0, 1, 2, 3, 4, 5, 6, 7, … (100 in all)"
