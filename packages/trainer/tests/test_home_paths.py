"""`~` in an argument of any command is the home folder: shells leave it as it is after `--output=`."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest
from parallel_trainer import run_mindformer
from parallel_trainer.cli import checkpoint, data, evaluate, main, plan, run, verify


def parsers() -> list[argparse.ArgumentParser]:
    """Those of all commands and of their sub-commands."""
    top = argparse.ArgumentParser()
    commands = top.add_subparsers()
    for module in (run, evaluate, verify, plan, data, checkpoint):
        module.add_parser(commands)
    found = [top, run_mindformer._parser()]
    for parser in found:
        for action in parser._actions:
            if isinstance(action, argparse._SubParsersAction):
                found += action.choices.values()
    return found


def test_every_argument_that_is_a_path_takes_a_home_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    paths = ("config", "output", "output_dir", "checkpoint", "destination", "folder", "prefix", "input", "tokenizer")
    seen = set()
    for parser in parsers():
        for action in parser._actions:
            if action.dest in paths:
                seen.add(action.dest)
                assert action.type is not None, (parser.prog, action.dest)
                assert str(action.type("~/x")) == "/home/me/x", (parser.prog, action.dest)
    assert seen == set(paths)


def test_nothing_is_called_tilde(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.chdir(tmp_path)
    (home / "a.txt").write_text("text")
    assert main(["data", "build", "--input=~/a.txt", "--output=~/corpus"]) == 0
    assert main(["data", "show", "~/corpus"]) == 0
    assert (home / "corpus.bin").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["home"]
    with pytest.raises(SystemExit):
        main(["data", "build", "--input=a.txt", "--output=~no-such-user/corpus"])
    assert "'~no-such-user/corpus' has no home folder for ~no-such-user" in capsys.readouterr().err
