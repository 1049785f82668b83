"""The pair of files against bytes written by hand, and every way in which it can be damaged."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from parallel_trainer.data.indexed import IndexedCorpus, IndexedWriter
from parallel_trainer.errors import UserError

MAGIC = bytes.fromhex("4D 4D 49 44 49 44 58 00 00")
INTEGER_CODES = {1: "B", 2: "b", 3: "h", 4: "i", 5: "q", 8: "H"}


def idx_bytes(
    lengths: list[int],
    documents: list[int],
    *,
    code: int = 8,
    size: int = 2,
    offsets: list[int] | None = None,
) -> bytes:
    if offsets is None:
        offsets = [sum(lengths[:number]) * size for number in range(len(lengths))]
    return (
        MAGIC
        + struct.pack("<QBQQ", 1, code, len(lengths), len(documents))
        + struct.pack(f"<{len(lengths)}i", *lengths)
        + struct.pack(f"<{len(offsets)}q", *offsets)
        + struct.pack(f"<{len(documents)}q", *documents)
    )


def write_pair(prefix: Path, idx: bytes, tokens: list[int], form: str = "H") -> None:
    Path(f"{prefix}.idx").write_bytes(idx)
    Path(f"{prefix}.bin").write_bytes(struct.pack(f"<{len(tokens)}{form}", *tokens))


def test_the_writer_writes_exactly_these_bytes(tmp_path: Path) -> None:
    with IndexedWriter(tmp_path / "text", vocab_size=257) as writer:
        writer.add_document(np.array([104, 105, 256]))
        writer.add_document(np.array([33, 256]))
    assert (tmp_path / "text.bin").read_bytes() == struct.pack("<5H", 104, 105, 256, 33, 256)
    assert (tmp_path / "text.idx").read_bytes() == idx_bytes([3, 2], [0, 1, 2])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["text.bin", "text.idx"]


def test_large_vocabularies_are_written_as_int32(tmp_path: Path) -> None:
    for vocab_size, code in ((65499, 8), (65500, 4)):
        with IndexedWriter(tmp_path / "text", vocab_size=vocab_size) as writer:
            writer.add_document(np.array([65000]))
        assert (tmp_path / "text.idx").read_bytes()[17] == code


@pytest.mark.parametrize("code", INTEGER_CODES)
def test_the_reader_reads_every_integer_dtype(tmp_path: Path, code: int) -> None:
    form = INTEGER_CODES[code]
    write_pair(tmp_path / "a.b", idx_bytes([2, 0, 3], [0, 1, 3], code=code, size=struct.calcsize(f"<{form}")),
               [7, 8, 9, 100, 11], form)  # fmt: skip
    corpus = IndexedCorpus.open(tmp_path / "a.b")
    assert [corpus.sequence(number).tolist() for number in range(len(corpus))] == [[7, 8], [], [9, 100, 11]]
    assert [corpus.document(number).tolist() for number in range(2)] == [[7, 8], [9, 100, 11]]
    assert corpus.sequence(2, start=1, stop=2).tolist() == [100]
    with pytest.raises(IndexError):
        corpus.document(2)


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.lists(st.integers(0, 70000), max_size=5), max_size=8))
def test_what_is_written_is_read(tmp_path: Path, documents: list[list[int]]) -> None:
    with IndexedWriter(tmp_path / "text", vocab_size=70001) as writer:
        for document in documents:
            writer.add_document(np.array(document, dtype=np.int64))
    corpus = IndexedCorpus.open(tmp_path / "text")
    assert [corpus.document(number).tolist() for number in range(len(documents))] == documents


def test_every_truncated_index_is_refused(tmp_path: Path) -> None:
    idx = idx_bytes([2, 3], [0, 1, 2])
    for size in range(len(idx)):
        write_pair(tmp_path / "text", idx[:size], [1, 2, 3, 4, 5])
        with pytest.raises(UserError, match=r"text\.idx is damaged: it has \d+ bytes"):
            IndexedCorpus.open(tmp_path / "text")


@pytest.mark.parametrize(
    ("idx", "message"),
    [
        (b"GGUF\x00\x00\x00\x00\x00" + idx_bytes([5], [0, 1])[9:], "is not the index of a corpus"),
        (MAGIC + struct.pack("<QBQQ", 2, 8, 0, 1), "format version 2; version 1"),
        (idx_bytes([5], [0, 1], code=9), "dtype code is 9; the codes are 1 to 8"),
        (idx_bytes([5], [0, 1], code=7), "float32"),
        (MAGIC + struct.pack("<QBQQ", 1, 8, 2**63, 2**63), "9223372036854775808 sequences"),
        (idx_bytes([5], [0, 1]) + b"\x00" * 3, "has 65 bytes; 1 sequences and 2 document entries take 62"),
        (idx_bytes([2, 3], [0, 1, 2]) + b"\x00\x00", "multimodal"),
        (idx_bytes([2, 3], [0, 1]), "run from 0 to 2"),
        (idx_bytes([2, 3], [1, 2]), "run from 0 to 2"),
        (idx_bytes([2, 3], []), "are empty; they must run from 0 to 2"),
        (idx_bytes([2, 3], [0, 2, 1, 2]), "document entry 2 is 1, less than 2"),
        (idx_bytes([-2, 7], [0, 1, 2]), "sequence 0 has -2 tokens"),
        (idx_bytes([2, 3], [0, 1, 2], offsets=[0, 2]), "sequence 1 is said to start at byte 2, .* byte 4"),
        (idx_bytes([2, 4], [0, 1, 2]), "has 10 bytes, but text.idx describes 6 tokens of 2 bytes = 12"),
        (idx_bytes([2, 2], [0, 1, 2]), "has 10 bytes, but text.idx describes 4 tokens of 2 bytes = 8"),
    ],
)  # fmt: skip
def test_a_damaged_index_is_refused_with_what_is_wrong(tmp_path: Path, idx: bytes, message: str) -> None:
    write_pair(tmp_path / "text", idx, [1, 2, 3, 4, 5])
    with pytest.raises(UserError, match=message):
        IndexedCorpus.open(tmp_path / "text")


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(place=st.integers(0, 73), value=st.integers(0, 255))
def test_a_changed_byte_is_refused_or_read_never_a_crash(tmp_path: Path, place: int, value: int) -> None:
    idx = bytearray(idx_bytes([2, 3], [0, 1, 2]))
    idx[place % len(idx)] = value
    write_pair(tmp_path / "text", bytes(idx), [1, 2, 3, 4, 5])
    try:
        corpus = IndexedCorpus.open(tmp_path / "text")
    except UserError:
        return
    assert corpus.tokens.nbytes == 10


@pytest.mark.parametrize("missing", ["bin", "idx"])
def test_a_missing_file_is_named_with_its_whole_path(tmp_path: Path, missing: str) -> None:
    write_pair(tmp_path / "text", idx_bytes([5], [0, 1]), [1, 2, 3, 4, 5])
    (tmp_path / f"text.{missing}").unlink()
    with pytest.raises(UserError, match=f"{tmp_path}/text.{missing} does not exist"):
        IndexedCorpus.open(tmp_path / "text")


def _interrupted(prefix: Path) -> None:
    with IndexedWriter(prefix, vocab_size=257) as writer:
        writer.add_document(np.array([2]))
        raise KeyboardInterrupt


def test_a_failing_writer_leaves_nothing_and_keeps_the_older_pair(tmp_path: Path) -> None:
    with IndexedWriter(tmp_path / "text", vocab_size=257) as writer:
        writer.add_document(np.array([1]))
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(KeyboardInterrupt):
        _interrupted(tmp_path / "text")
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


@pytest.mark.parametrize("token", [-1, 257, 65536])
def test_ids_outside_the_vocabulary_are_not_written(tmp_path: Path, token: int) -> None:
    with (
        pytest.raises(ValueError, match=f"{token}.*vocabulary of 257"),
        IndexedWriter(tmp_path / "text", vocab_size=257) as writer,
    ):
        writer.add_document(np.array([token]))
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with (
        pytest.raises(UserError, match="cannot be written"),
        IndexedWriter(tmp_path / "file" / "text", vocab_size=257),
    ):
        pass
