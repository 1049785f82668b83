"""Documents to build a corpus from: text files, JSON lines, folders, the standard library's sources."""

from __future__ import annotations

import codecs
import json
import os
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path

from attrs import frozen

from parallel_trainer.errors import UserError

NOT_LIBRARY = frozenset({"__pycache__", "dist-packages", "idle_test", "lib2to3", "site-packages", "test", "tests"})
"""Folders below the standard library's that hold installed packages or tests (some with broken sources)."""


@frozen
class TextFile:
    """A file to read. With `skip_undecodable`, one that is not UTF-8 holds no documents and is no error."""

    path: Path
    skip_undecodable: bool = False


def input_files(inputs: Sequence[str | Path], *, extensions: Sequence[str] = ()) -> tuple[TextFile, ...]:
    """The files to read: each of `inputs` that is a file, and the files in each that is a folder, by name.

    Folders are read to any depth, without hidden files; `extensions` such as ".txt" limits what is taken of
    them. Raises UserError for an input that does not exist and a folder that cannot be read.
    """
    endings = tuple(end if end.startswith(".") else f".{end}" for end in extensions)
    files: list[Path] = []
    for name in inputs:
        path = Path(name)
        if path.is_dir():
            files.extend(file for file in _walk(path) if not endings or file.name.endswith(endings))
        elif path.exists():
            files.append(path)
        else:
            raise UserError(f"input {name} does not exist: {path.absolute()} is neither a file nor a folder")
    if not files:
        kind = f"whose name ends in {' or '.join(endings)}" if endings else "that is not hidden"
        raise UserError(f"no text: {', '.join(map(str, inputs))} holds no file {kind}. Nothing was written")
    return tuple(TextFile(path) for path in files)


def python_stdlib_files() -> tuple[TextFile, ...]:
    """The .py files of the running Python's standard library, without its tests, by name."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files = [path for path in _walk(root, without=NOT_LIBRARY) if path.suffix == ".py"]
    if not files:
        raise UserError(f"no text: this Python has no source files of its standard library under {root}. Use --input")
    return tuple(TextFile(path, skip_undecodable=True) for path in files)


def read_documents(file: TextFile, *, jsonl_key: str = "text") -> Iterator[str]:
    """The documents of one file: each line's `jsonl_key` for a name that ends in .jsonl, else the whole text.

    Raises UserError for a file that cannot be read or is not UTF-8, naming the first wrong byte, and for a
    line that is not a JSON object with a text under that key, naming the line.
    """
    try:
        if file.path.suffix == ".jsonl":
            yield from _json_lines(file.path, jsonl_key)
        else:
            yield _decoded(file.path.read_bytes(), str(file.path))
    except UserError:
        if not file.skip_undecodable:
            raise
    except OSError as error:
        raise UserError(f"{file.path} cannot be read: {error.strerror}") from error


def _walk(root: Path, *, without: frozenset[str] = frozenset()) -> list[Path]:
    """Files below a folder by their path's parts; not hidden ones, nor those in folders called `without`."""

    def fail(error: OSError) -> None:
        raise UserError(f"folder {error.filename} cannot be read: {error.strerror}")

    files: list[Path] = []
    for folder, folders, names in os.walk(root, onerror=fail):
        folders[:] = [name for name in folders if not name.startswith(".") and name not in without]
        files.extend(Path(folder, name) for name in names if not name.startswith("."))
    return sorted(files, key=lambda path: path.parts)


def _json_lines(path: Path, key: str) -> Iterator[str]:
    read = 0
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            origin = f"{path}:{number}"
            text = _decoded(line, origin, before=read)
            read += len(line)
            if text.strip():
                yield _json_text(text, origin, key)


def _json_text(line: str, origin: str, key: str) -> str:
    try:
        value = json.loads(line)
    except json.JSONDecodeError as error:
        raise UserError(
            f"{origin}: not JSON at column {error.colno}: {error.msg}. Every line must be an object such as "
            f'{{"{key}": "…"}}'
        ) from error
    except (ValueError, RecursionError) as error:
        raise UserError(f"{origin}: JSON that cannot be read: {error}") from error
    if not isinstance(value, dict) or key not in value:
        found = f"keys {', '.join(value) or 'none'}" if isinstance(value, dict) else f"a {type(value).__name__}"
        raise UserError(f"{origin}: no key {key!r}, found {found}: name the key of the text with --jsonl-key")
    text = value[key]
    if not isinstance(text, str):
        raise UserError(f"{origin}: {key!r} must be a text and is a {type(text).__name__}")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise UserError(
            f"{origin}: {key!r} has half of a surrogate pair, {text[error.start]!a}, at character "
            f"{error.start}, which is no text: mend or remove the line"
        ) from error
    return text


def _decoded(data: bytes, origin: str, *, before: int = 0) -> str:
    """UTF-8 text without a byte order mark. `before`: bytes of the file that come before `data`."""
    if not before and data.startswith(codecs.BOM_UTF8):
        before = len(codecs.BOM_UTF8)
        data = data[before:]
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UserError(
            f"{origin} is not UTF-8 text: byte {before + error.start} is 0x{data[error.start]:02x}. "
            "Convert it to UTF-8, or leave it out (of a folder, with --extension)"
        ) from error
