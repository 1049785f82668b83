"""Writing the files of a checkpoint, whatever its elements come from: block by block, with their checksums."""

from __future__ import annotations

import os
import shutil
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

import numpy as np
from attrs import frozen

from parallel_trainer.checkpoint import index
from parallel_trainer.checkpoint.index import INDEX, Piece, StoredTensor
from parallel_trainer.checkpoint.tensor_file import DTYPES, TensorFileWriter
from parallel_trainer.errors import UserError
from parallel_trainer.parallel.layout import Holding

PREFIX = "checkpoint"
DTYPE_NAMES = {np.dtype(np.float32): "F32", np.dtype(np.float64): "F64"}
_PACKAGES = ("parallel-trainer", "parallel-config", "mindspore", "numpy")

Kind = Literal["model", "opt"]
"""Weights, or what the optimizer keeps of them."""

Written = Mapping[str, Any]
"""What is known of a file that was written, as JSON has it: its bytes, and by tensor which piece of it it holds."""


@frozen(eq=False)
class Content:
    """What one file holds of one tensor.

    holding: which elements.
    dtype:   name of their type in the file.
    read:    gives elements `first` … `last` - 1 of them, flat.
    """

    holding: Holding
    dtype: str
    read: Callable[[int, int], np.ndarray]


def write_file(path: Path, contents: Mapping[str, Content]) -> Written:
    """Write a file of flat tensors, one block in memory at a time. Raises UserError where it cannot be written."""
    pieces = {}
    entries = [(name, content.dtype, (content.holding.size,)) for name, content in contents.items()]
    with TensorFileWriter(path, entries) as writer:
        for name, content in contents.items():
            dtype, size = DTYPES[content.dtype], content.holding.size
            step = index.BLOCK_BYTES // dtype.itemsize
            checksums = []
            for first in range(0, size, step):
                block = content.read(first, min(first + step, size)).astype(dtype, copy=False)
                checksums.append(zlib.crc32(block.data))
                writer.write(name, block)
            pieces[name] = _piece(content, checksums)
    return {"nbytes": path.stat().st_size, "tensors": pieces}


def _piece(content: Content, checksums: list[int]) -> dict[str, Any]:
    holding = content.holding
    return {
        "shape": holding.part.weight.shape,
        "dtype": content.dtype,
        "split_dim": holding.part.weight.split_dim,
        "ranges": holding.part.ranges,
        "start": holding.start,
        "stop": holding.start + holding.size,
        "checksums": checksums,
    }


def joined(files: Iterable[tuple[str, Written]]) -> tuple[dict[str, StoredTensor], dict[str, int]]:
    """Names of files with what `write_file` returned, as the index has it: whole tensors, and bytes of files."""
    sizes: dict[str, int] = {}
    found: dict[str, list[tuple[Piece, Mapping[str, Any]]]] = {}
    for file, written in files:
        sizes[file] = written["nbytes"]
        for name, values in written["tensors"].items():
            ranges = tuple((first, last) for first, last in values["ranges"])
            piece = Piece(file, ranges, values["start"], values["stop"], tuple(values["checksums"]))
            found.setdefault(name, []).append((piece, values))
    return {name: _stored(parts) for name, parts in found.items()}, sizes


def _stored(parts: Sequence[tuple[Piece, Mapping[str, Any]]]) -> StoredTensor:
    """A tensor of its pieces and what `write_file` said of each."""
    values = parts[0][1]
    pieces = tuple(piece for piece, _ in parts)
    return StoredTensor(tuple(values["shape"]), values["dtype"], values["split_dim"], pieces)


def file_name(kind: Kind, rank: int, ranks: int, *, prefix: str = PREFIX) -> str:
    """What a rank calls its file of weights or of moments."""
    return f"{prefix}-{kind}-{rank:07d}-{ranks:07d}.safetensors"


def versions() -> dict[str, str]:
    """Of the packages that write a checkpoint."""
    return {package: version(package) for package in _PACKAGES}


def partial_of(final: Path) -> Path:
    """Where a folder is written before it gets its name."""
    return final.with_name(f".{final.name}.writing")


def begin(final: Path) -> Path:
    """An empty folder in which to write `final`, of which rests of a checkpoint without its index are deleted.

    Raises UserError where `final` is something else.
    """
    folder = partial_of(final)
    shutil.rmtree(folder, ignore_errors=True)
    if final.is_dir() and all(path.suffix == ".safetensors" for path in final.iterdir()):
        shutil.rmtree(final)
    if final.exists():
        raise UserError(f"{final} exists, and a checkpoint is to be written there: move it away")
    folder.mkdir()
    return folder


def clear_partial(parent: Path) -> None:
    """Delete what runs that were killed left unfinished in a folder of checkpoints, in which nobody writes."""
    for folder in parent.glob(".iteration_*.writing"):
        shutil.rmtree(folder, ignore_errors=True)


def commit(final: Path) -> None:
    """Give a folder that is complete its name; on the disk when this returns."""
    _sync(partial_of(final))
    os.rename(partial_of(final), final)
    _sync(final.parent)


@contextmanager
def new_folder(final: Path) -> Iterator[Path]:
    """A folder that appears as `final` when the block ends well, and else leaves nothing.

    Raises UserError where `final` exists or cannot be made.
    """
    if final.exists():
        raise UserError(f"{final} exists: name a new folder, or delete it first")
    try:
        final.parent.mkdir(parents=True, exist_ok=True)
        folder = begin(final)
    except OSError as error:
        raise UserError(f"{final} cannot be made: {error.strerror}") from error
    try:
        yield folder
        commit(final)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def remove(folder: Path) -> None:
    """Delete a checkpoint as far as it is there and can be; what is left is not taken for a complete one.

    Raises OSError where not even its index can be deleted.
    """
    (folder / INDEX).unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
