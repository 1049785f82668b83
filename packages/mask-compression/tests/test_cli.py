"""`mask-compression show`: what a user sees, in characters, as JSON, as a picture, and when the arguments are wrong."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import numpy as np
import pytest
from mask_compression.cli import main
from mask_oracle import square


def show(capsys: pytest.CaptureFixture[str], *arguments: object, code: int = 0) -> str:
    """What the command prints: on stdout if it succeeds, on stderr if it must not."""
    assert main(["show", *map(str, arguments)]) == code
    printed = capsys.readouterr()
    if code:
        assert printed.out == ""
        assert printed.err.count("\n") == 1
        return printed.err
    assert printed.err == ""
    return printed.out


def drawn(text: str) -> list[str]:
    """The last column of the lines of the drawing."""
    return [line.split()[-1] for line in text.split("\n\n")[1].splitlines()]


def test_every_pair_of_a_short_sequence(capsys: pytest.CaptureFixture[str]) -> None:
    text = show(capsys, "--tokens", "5,6,0,7,8,9,0,4", "--eod", 0)
    assert text.startswith("1 row of 8 tokens, 3 documents, 26.6 % of all pairs visible\n")
    assert drawn(text) == ["".join("·█"[seen] for seen in row) for row in square([3, 4, 1]).astype(int)]


def test_tiles(capsys: pytest.CaptureFixture[str]) -> None:
    text = show(capsys, "--lengths", "5,7,4", "--tile", 4)
    assert "tiles of 4 x 4: 0 full █, 6 partial ▒, 10 empty ·" in text
    assert drawn(text) == ["▒···", "▒▒··", "·▒▒·", "···▒"]
    assert drawn(show(capsys, "--lengths", "12", "--tile", 4)) == ["▒··", "█▒·", "██▒"]


def test_rows_of_a_batch(capsys: pytest.CaptureFixture[str]) -> None:
    text = show(capsys, "--lengths", "1,2/3", "--row", 1)
    assert text.startswith("2 rows of 3 tokens, 3 documents")
    assert drawn(text) == ["█··", "██·", "███"]
    assert drawn(show(capsys, "--lengths", "1,2/3")) == ["█··", "·█·", "·██"]


def test_context_parallel_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    text = show(capsys, "--lengths", "5,7,4", "--cp", 2)
    picture, ranks = text.split("\n\n")[1:]
    assert [line.split()[1] for line in picture.splitlines()] == ["0"] * 8 + ["1"] * 8
    assert ranks.splitlines() == [
        "context_parallel 2, contiguous: slowest rank / mean work = 1.208",
        "rank 0: holds 0-7; 21 visible pairs; keys from other ranks: none",
        "rank 1: holds 8-15; 32 visible pairs; keys from other ranks: 5-7",
    ]
    zigzag = show(capsys, "--lengths", "5,7,4", "--cp", 2, "--order", "zigzag", "--tile", 4).split("\n\n")[1]
    assert [line.split()[1:3] for line in zigzag.splitlines()] == [["0", "0"], ["1", "4"], ["1", "8"], ["0", "12"]]


def test_long_sequences_fit_the_screen(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    tokens = np.ones((2, 1_000_000), np.int32)
    tokens[1, 299_999::300_000] = 0
    np.save(tmp_path / "tokens.npy", tokens)
    text = show(capsys, "--tokens", tmp_path / "tokens.npy", "--eod", 0, "--row", 1, "--cp", 8)
    assert "row 1: documents of 300000 300000 300000 100000 tokens" in text
    assert max(map(len, text.splitlines())) <= 120
    assert {len(line) for line in drawn(text)} == {64}
    assert len(drawn(text)) <= 72


def test_json(capsys: pytest.CaptureFixture[str]) -> None:
    shown = json.loads(show(capsys, "--lengths", "5,7,4", "--cp", 2, "--tile", 4, "--json"))
    assert shown["ends"] == [5, 12, 16]
    assert shown["lengths"] == [5, 7, 4]
    assert shown["visible_pairs"] == 15 + 28 + 10
    assert shown["tiles"] == {"empty": 10, "partial": 6, "full": 0}
    assert shown["imbalance"] == pytest.approx(64 / 53)
    assert shown["ranks"][1] == {"rank": 1, "positions": [[8, 16]], "visible_pairs": 32, "remote_keys": [[5, 8]]}


@pytest.mark.parametrize("cp", [1, 4])
def test_pictures(capsys: pytest.CaptureFixture[str], tmp_path: Path, cp: int) -> None:
    pytest.importorskip("matplotlib", reason="pictures need Matplotlib: pip install 'mask-compression[plot]'")
    show(capsys, "--lengths", "300,2000,796,1000", "--cp", cp, "--png", tmp_path / "a.png", "--svg", tmp_path / "a.svg")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    assert ElementTree.parse(tmp_path / "a.svg").getroot().tag == "{http://www.w3.org/2000/svg}svg"
    # 64 x 64 tiles as one image; a path for each would take some 800 kB.
    assert (tmp_path / "a.svg").stat().st_size < 200_000


def test_pictures_without_matplotlib(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    monkeypatch.setitem(sys.modules, "matplotlib.backends.backend_agg", None)
    message = show(capsys, "--lengths", "4", "--png", tmp_path / "a.png", code=2)
    assert "pip install 'mask-compression[plot]'" in message
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--lengths", "5,x"], "--lengths '5,x' must be whole numbers with commas between them"),
        (["--lengths", "5,0,3"], "lengths[1] = 0 is a document without tokens"),
        (["--lengths", "5,7,3", "--cp", "2"], "seq_length 15 cannot be cut into equal pieces"),
        (["--lengths", "8", "--cp", "0"], "context_parallel = 0 must be at least 1"),
        (["--lengths", "8", "--row", "1"], "row 1 is outside the mask, which has one row, 0"),
        (["--lengths", "8", "--tile", "0"], "0"),
        (["--lengths", "200000", "--tile", "1"], "use a tile of 49 or more"),
        (["--lengths", "3,5/8", "--row", "2"], "row 2 is outside the mask, which has rows 0 to 1"),
        (["--lengths", "8", "--eod", "1"], "--eod goes with --tokens"),
        (["--tokens", "1,2"], "--tokens needs --eod"),
        (["--tokens", "1,2", "--eod", "-1"], "eod = -1 must be at least 0"),
        (["--tokens", "absent.npy", "--eod", "1"], "absent.npy"),
        (["--tokens", __file__ + ".npy", "--eod", "1"], ".npy"),
        (["--lengths", "99999999999999999999"], "must be whole numbers"),
    ],
)
def test_wrong_arguments(capsys: pytest.CaptureFixture[str], arguments: list[str], message: str) -> None:
    shown = show(capsys, *arguments, code=2)
    assert shown.startswith("mask-compression: ")
    assert message in shown


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"no array", "is no .npy file of integers"), (b"", "is no .npy file of integers")],
)
def test_files_that_hold_no_tokens(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, content: bytes, message: str
) -> None:
    (tmp_path / "tokens.npy").write_bytes(content)
    assert message in show(capsys, "--tokens", tmp_path / "tokens.npy", "--eod", 0, code=2)


def test_files_of_other_numbers(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    np.save(tmp_path / "tokens.npy", np.ones(4))
    message = show(capsys, "--tokens", tmp_path / "tokens.npy", "--eod", 0, code=2)
    assert "must hold integers, but its dtype is float64" in message


def test_files_are_named_by_what_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(["show", "--lengths", "4", "--png", "a.svg"])
    assert exit_.value.code == 2
    assert "'a.svg' must end with .png" in capsys.readouterr().err


def test_installed_command() -> None:
    command = Path(sys.executable).with_name("mask-compression")
    done = subprocess.run([command, "show", "--lengths", "2,1"], capture_output=True, text=True, check=True)
    assert drawn(done.stdout) == ["█··", "██·", "··█"]
    assert done.stderr == ""


def test_pub2_path_01_files_in_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As shells leave it after `--svg=`."""
    monkeypatch.setenv("HOME", str(tmp_path))
    np.save(tmp_path / "tokens.npy", np.array([5, 6, 0, 7]))
    assert main(["show", "--tokens=~/tokens.npy", "--eod", "0", "--svg=~/mask.svg"]) == 0
    assert (tmp_path / "mask.svg").exists()
    with pytest.raises(SystemExit):
        main(["show", "--lengths", "5", "--svg=~no-such-user/mask.svg"])


@pytest.mark.parametrize(("encoding", "signs"), [("ascii", "#."), ("latin-1", "#·"), ("utf-8", "█·")])
def test_pub2_cli_01_a_picture_where_the_terminal_is_not_utf_8(encoding: str, signs: str) -> None:
    command = [sys.executable, "-c", "from mask_compression.cli import main; raise SystemExit(main())"]
    done = subprocess.run(
        [*command, "show", "--lengths", "5,7,4", "--cp", "2"],
        env=os.environ | {"PYTHONIOENCODING": encoding, "LC_ALL": "C"},
        capture_output=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    visible, hidden = signs
    assert f"rank 1  12  {12 * hidden}{visible}{3 * hidden}\n" in done.stdout.decode(encoding)


@pytest.mark.parametrize("lengths", ["5,0,3", "0", "-1", "3,5/9", "2,2/3,0"])
def test_messages_name_options_and_no_python(lengths: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", f"--lengths={lengths}"]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"mask-compression: --lengths {lengths!r}: lengths")
    assert "allow_empty" not in said
    assert "from_lengths" not in said
