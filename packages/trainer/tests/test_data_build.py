"""`parallel-train data`: from text to a corpus and back, and input that cannot be used."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

import pytest
from parallel_trainer.cli import data
from parallel_trainer.data.build import build_corpus
from parallel_trainer.data.documents import TextFile, python_stdlib_files, read_documents
from parallel_trainer.data.indexed import IndexedCorpus
from parallel_trainer.data.tokenizer import ByteTokenizer
from parallel_trainer.errors import UserError


def run(*arguments: str | Path) -> int:
    parser = argparse.ArgumentParser()
    data.add_parser(parser.add_subparsers())
    args = parser.parse_args(["data", *map(str, arguments)])
    return int(args.run(args))


def texts(prefix: Path) -> list[str]:
    corpus = IndexedCorpus.open(prefix)
    return [ByteTokenizer().decode(corpus.document(number)) for number in range(len(corpus.documents) - 1)]


def test_files_lines_and_folders_become_documents(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "in"
    (folder / "b").mkdir(parents=True)
    (folder / "b" / "z.txt").write_text("last", encoding="utf-8")
    (folder / "a.txt").write_bytes(b"\xef\xbb\xbfwith a mark\r\n")
    (folder / "c.txt").write_text(" \n")
    (folder / ".hidden").write_text("hidden")
    lines = tmp_path / "more.jsonl"
    lines.write_text('{"text": "grüße"}\n\n{"text": ""}\n{"text": "two"}', encoding="utf-8")
    assert run("build", "--input", lines, folder, "--output", tmp_path / "out" / "corpus") == 0
    assert texts(tmp_path / "out" / "corpus") == [
        "grüße<EOD>",
        "two<EOD>",
        "with a mark\r\n<EOD>",
        "last<EOD>",
    ]
    printed = capsys.readouterr().out
    assert "4 documents, 31 tokens (uint16), end of document 256, vocabulary 257" in printed
    assert "documents without text, left out: 2" in printed


def test_extensions_and_keys_choose_what_is_read(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("no")
    (tmp_path / "b.md").write_text("yes")
    (tmp_path / "c.jsonl").write_text('{"body": "also"}')
    run(
        "build",
        "--input",
        tmp_path,
        "--extension",
        "md",
        ".jsonl",
        "--jsonl-key",
        "body",
        "--output",
        tmp_path / "o",
    )
    assert texts(tmp_path / "o") == ["yes<EOD>", "also<EOD>"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", b"good \xff bad", r"a\.txt is not UTF-8 text: byte 5 is 0xff"),
        ("a.txt", b"\xef\xbb\xbfgood \xff bad", r"a\.txt is not UTF-8 text: byte 8 is 0xff"),
        ("a.txt", b"cut \xc3", r"a\.txt is not UTF-8 text: byte 4 is 0xc3"),
        ("a.jsonl", b'{"text": "x"}\n\xff', r"a\.jsonl:2 is not UTF-8 text: byte 14 is 0xff"),
        ("a.jsonl", b'{"text": "x"}\n{"text"', r"a\.jsonl:2: not JSON at column 8"),
        ("a.jsonl", b'{"txt": "x"}', r"a\.jsonl:1: no key 'text', found keys txt"),
        ("a.jsonl", b"[1]", r"a\.jsonl:1: no key 'text', found a list"),
        ("a.jsonl", b'{"text": 3}', r"a\.jsonl:1: 'text' must be a text and is a int"),
        ("a.jsonl", b'{"text": "a\\ud800"}', r"a\.jsonl:1: 'text' has half of a surrogate pair.*character 1"),
        ("a.jsonl", b"[" * 100_000, r"a\.jsonl:1: JSON that cannot be read"),
        ("a.jsonl", b"[" + b"1" * 10_000 + b"]", r"a\.jsonl:1: JSON that cannot be read"),
        ("a.txt", b"", "no text: the input holds 1 empty documents"),
        ("a.jsonl", b"\n\n", "no text: the input holds 0 empty documents"),
    ],
)  # fmt: skip
def test_bad_input_is_named_and_nothing_is_written(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=message):
        run("build", "--input", tmp_path / name, "--output", tmp_path / "corpus")
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_input_that_is_not_there_or_empty_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="neither a file nor a folder"):
        run("build", "--input", tmp_path / "no", "--output", tmp_path / "corpus")
    with pytest.raises(UserError, match=r"holds no file whose name ends in \.txt"):
        run("build", "--input", tmp_path, "--extension", "txt", "--output", tmp_path / "corpus")
    assert list(tmp_path.iterdir()) == []


def test_an_unreadable_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(UserError, match="loop cannot be read: "):
        list(read_documents(TextFile(tmp_path / "loop")))


def test_the_standard_library_is_sources_without_tests_in_a_fixed_order(tmp_path: Path) -> None:
    files = python_stdlib_files()
    names = [file.path.as_posix() for file in files]
    assert files == python_stdlib_files()
    assert json.__file__ in names
    assert not [name for name in names if "/test/" in name or "site-packages" in name]
    some = [file for file in files if file.path.name in {"abc.py", "bisect.py"}]
    built = build_corpus(some, tmp_path / "corpus", tokenizer=ByteTokenizer())
    assert built.documents == len(some) >= 2
    assert built.tokens == sum(file.path.stat().st_size + 1 for file in some)
    assert texts(tmp_path / "corpus")[0] == some[0].path.read_text(encoding="utf-8") + "<EOD>"


def test_library_sources_that_are_not_utf8_are_counted(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_bytes(b"# \xe9")
    (tmp_path / "b.py").write_bytes(b"# e")
    files = [TextFile(tmp_path / name, skip_undecodable=True) for name in ("a.py", "b.py")]
    built = build_corpus(files, tmp_path / "corpus", tokenizer=ByteTokenizer())
    assert (built.documents, built.undecodable) == (1, 1)


def test_show_describes_a_corpus_and_prints_a_document(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "ab"}\n{"text": "cdef"}')
    run("build", "--input", tmp_path / "a.jsonl", "--output", tmp_path / "corpus")
    capsys.readouterr()
    assert run("show", tmp_path / "corpus") == 0
    rows = dict(line.split("  ", 1) for line in capsys.readouterr().out.splitlines())
    assert {name: value.strip() for name, value in rows.items()} == {
        "documents": "2",
        "sequences": "2",
        "tokens": "8",
        "dtype": "uint16",
        "largest token id": "256, so model.vocab_size must be at least 257",
        "end of document": "256, the last token of every document",
        "shortest document": "3 tokens",
        "median document": "4 tokens",
        "longest document": "5 tokens (document 1)",
        "document 0 starts": "'ab<EOD>'",
    }
    run("show", tmp_path / "corpus", "--document", "1")
    assert capsys.readouterr().out == "cdef<EOD>\n"
    with pytest.raises(UserError, match="no document 2: it has 0 … 1"):
        run("show", tmp_path / "corpus", "--document", "2")


def test_data_needs_no_framework() -> None:
    """The data commands must answer at once: MindSpore takes seconds to import."""
    code = "import sys, parallel_trainer.data, parallel_trainer.data.build; print('mindspore' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
