"""Which files of a Hugging Face folder are its weights, where it may hold several sets of them."""

from __future__ import annotations

from collections.abc import Collection
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from parallel_trainer.checkpoint.index import shortened
from parallel_trainer.checkpoint.tensor_file import TensorFile
from parallel_trainer.checkpoint.untrusted import is_file_name, read_object
from parallel_trainer.errors import UserError

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"

_WEIGHTS = ("*.safetensors", "pytorch_model*.bin", "consolidated*.pth")
"""Names that files of weights have."""


def read_json(path: Path) -> dict[str, Any]:
    """A JSON file of the folder. Raises UserError with a reason that does not name the file."""
    try:
        return read_object(path)
    except FileNotFoundError as error:
        raise UserError("there is no such file: a Hugging Face folder has one") from error


def open_files(path: Path, files: ExitStack) -> tuple[list[TensorFile], tuple[str, ...]]:
    """The folder's files of tensors, each name in one of them; and notes on files of weights that are not read.

    Raises UserError for a folder without weights, for one with two complete sets of them, and for an index that does
    not match its files.
    """
    if not (path / SINGLE).is_file():
        if not (path / INDEX).is_file():
            raise _no_weights(path)
        names = _weight_map(path)
        opened = {name: files.enter_context(TensorFile.open(path / name)) for name in sorted(set(names.values()))}
        _check_index(path, names, opened)
        return list(opened.values()), _not_read(path, [INDEX, *opened])
    if (path / INDEX).is_file():
        named = _named_files(path)
        if named and all((path / name).is_file() for name in named):
            raise UserError(
                f"{path} has two sets of weights: {SINGLE}, and {INDEX} with {', '.join(shortened(named))}. One of "
                f"them may be old or rounded (transformers reads {SINGLE}). Move the one that is not meant out of the "
                "folder"
            )
    return [files.enter_context(TensorFile.open(path / SINGLE))], _not_read(path, [SINGLE])


def _no_weights(path: Path) -> UserError:
    others = sorted(file.name for file in path.glob("*.bin"))
    found = f"It has {', '.join(others)}, which are pickles: save it as safetensors. " if others else ""
    return UserError(f"{path} has no {SINGLE} and no {INDEX}. {found}A Hugging Face folder has one of them")


def _weight_map(path: Path) -> dict[str, str]:
    """From the name of a tensor to that of its file."""
    try:
        names = read_json(path / INDEX).get("weight_map")
    except UserError as error:
        raise UserError(f"{path / INDEX}: {error}") from error
    if not isinstance(names, dict) or not all(map(is_file_name, names.values())):
        raise UserError(f"{path / INDEX} has no weight_map from tensors to files of the folder")
    return names


def _named_files(path: Path) -> list[str]:
    """The files that an index names which is not needed; none where it is broken."""
    try:
        return sorted(set(_weight_map(path).values()))
    except UserError:
        return []


def _check_index(path: Path, names: dict[str, str], opened: dict[str, TensorFile]) -> None:
    held = {(tensor, name) for name, file in opened.items() for tensor in file.entries}
    problems = [f"{tensor} should be in {name} and is not" for tensor, name in sorted(names.items() - held)]
    problems += [
        f"{tensor} is in {name}, of which the index says nothing" for tensor, name in sorted(held - names.items())
    ]
    if problems:
        raise UserError(f"{path / INDEX} and the files do not match:", shortened(problems))


def _not_read(path: Path, read: Collection[str]) -> tuple[str, ...]:
    """A note where the folder has further files of weights."""
    there = {file.name for pattern in (*_WEIGHTS, INDEX) for file in path.glob(pattern)}
    others = sorted(there - set(read))
    if not others:
        return ()
    which = f"{SINGLE} is" if SINGLE in read else f"{INDEX} and the files that it names ({len(read) - 1}) are"
    return (f"{which} read. The folder has more weights, which are not read: {', '.join(shortened(others))}.",)
