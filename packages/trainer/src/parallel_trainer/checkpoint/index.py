"""What a checkpoint holds: one index of whole tensors, which any plan can read.

A checkpoint is a folder that was complete when it got its name (iteration_00000010). Files in the safetensors format
hold what each rank wrote, flat arrays; `metadata.json` says which elements of which whole tensor they are, by the same
description that shards the model (`parallel/layout.py`), and holds a checksum of every block of them.
"""

from __future__ import annotations

import json
import math
import os
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from attrs import asdict, frozen

from parallel_trainer.checkpoint.index_check import CONVERTER, faults, first_fault
from parallel_trainer.checkpoint.tensor_file import DTYPES
from parallel_trainer.checkpoint.untrusted import parse_object
from parallel_trainer.errors import UserError
from parallel_trainer.parallel.layout import Range, Runs, runs_of

FORMAT = "parallel-trainer checkpoint"
VERSION = 1
INDEX = "metadata.json"
BLOCK_BYTES = 1 << 20
"""Bytes that one checksum covers, in checkpoints written from now on."""

_LISTED = 8

FIRST_MOMENT, SECOND_MOMENT = "exp_avg.", "exp_avg_sq."
"""Before the name of a weight, the name of what AdamW keeps of it."""


@frozen
class State:
    """Where a run stood.

    step:              steps trained.
    consumed_samples:  samples that they read.
    global_batch_size: of the last step.
    optimizer_steps:   steps that changed the weights.
    skipped:           steps in a row, the last ones, that did not because something was not finite.
    """

    step: int
    consumed_samples: int
    global_batch_size: int
    optimizer_steps: int
    skipped: int = 0


@frozen
class Piece:
    """Elements of a tensor that lie flat in one file: of the indices `ranges` of the split dimension, number `start` …
    `stop` - 1.

    checksums: CRC-32 of each block of its bytes, the last one shorter.
    """

    file: str
    ranges: tuple[Range, ...]
    start: int
    stop: int
    checksums: tuple[int, ...]

    @property
    def size(self) -> int:
        """Elements."""
        return self.stop - self.start


@frozen
class StoredTensor:
    """A whole tensor and the pieces it was written in.

    dtype:     name of an element type in the safetensors format.
    split_dim: the dimension of the pieces' ranges; None where each piece is cut from the whole tensor.
    """

    shape: tuple[int, ...]
    dtype: str
    split_dim: int | None
    pieces: tuple[Piece, ...]

    @property
    def size(self) -> int:
        """Elements."""
        return math.prod(self.shape)

    @property
    def itemsize(self) -> int:
        """Bytes of an element in the files."""
        return DTYPES[self.dtype].itemsize

    def runs(self, piece: Piece) -> Runs:
        """The piece's elements of the flattened tensor."""
        return runs_of(self.shape, self.split_dim, piece.ranges).cut(piece.start, piece.stop)

    def gaps(self) -> str | None:
        """What is wrong where the pieces do not hold each element exactly once; None where they do."""
        runs = [self.runs(piece) for piece in self.pieces]
        starts = np.concatenate([each.starts for each in runs] or [np.empty(0, np.int64)])
        stops = np.concatenate([each.stops for each in runs] or [np.empty(0, np.int64)])
        order = np.argsort(starts, kind="stable")
        begins, ends = np.append(starts[order], self.size), np.concatenate([[0], stops[order]])
        wrong = np.flatnonzero(begins != ends)
        if not wrong.size:
            return None
        begin, end = int(begins[wrong[0]]), int(ends[wrong[0]])
        if begin > end:
            return f"elements {end} to {begin - 1} of {self.size} are in none of its files"
        return f"elements {begin} to {end - 1} of {self.size} are there twice"


@frozen
class Block:
    """A part of a piece that has a checksum: its elements `first` … `last` - 1, counted within the piece."""

    tensor: str
    piece: Piece
    first: int
    last: int
    checksum: int


@frozen(eq=False)
class Checkpoint:
    """A complete checkpoint.

    tensors:    weights by name, and moments by `FIRST_MOMENT` or `SECOND_MOMENT` and that name.
    files:      bytes of each file.
    state:      where the run stood.
    config:     the file that the run was started with.
    plan:       in words.
    world_size: ranks that wrote it.
    data:       what the numbers of samples depend on.
    versions:   of the packages that wrote it.
    block_bytes: how many bytes one checksum covers.
    """

    folder: Path
    tensors: Mapping[str, StoredTensor]
    files: Mapping[str, int]
    state: State
    config: str
    plan: str
    world_size: int
    data: Mapping[str, Any]
    versions: Mapping[str, str]
    block_bytes: int

    @property
    def weights(self) -> dict[str, StoredTensor]:
        """The model's weights."""
        return {name: tensor for name, tensor in self.tensors.items() if not is_moment(name)}

    @property
    def has_optimizer(self) -> bool:
        """Whether moments were saved."""
        return any(map(is_moment, self.tensors))

    def blocks(self, names: Sequence[str]) -> list[Block]:
        """The blocks of some tensors, in the order in which files hold them."""
        found = [
            Block(name, piece, first, min(first + step, piece.size), checksum)
            for name in names
            for piece in self.tensors[name].pieces
            for step in [self.block_bytes // self.tensors[name].itemsize]
            for first, checksum in zip(range(0, piece.size, step), piece.checksums, strict=True)
        ]
        return sorted(found, key=lambda block: block.piece.file)

    def content(self, block: Block) -> Runs:
        """A block's elements of the flattened tensor."""
        return self.tensors[block.tensor].runs(block.piece).cut(block.first, block.last)

    @classmethod
    def open(cls, folder: Path) -> Checkpoint:
        """Read the index of a checkpoint, and check that its files are there in full size.

        Raises UserError for a folder that is no checkpoint, a damaged or newer index, one that no checkpoint can have,
        and for files that are missing, lie elsewhere or are shorter or longer than they were.
        """
        values = _read_index(folder / INDEX)
        try:
            checkpoint: Checkpoint = CONVERTER.structure(values | {"folder": folder}, cls)
        except Exception as error:
            raise UserError(f"{folder / INDEX} is damaged: {first_fault(error)}. {_elsewhere(folder)}") from error
        wrong = shortened(list(faults(checkpoint)))
        if wrong:
            raise UserError(f"{folder / INDEX} is not the index of a checkpoint. {_elsewhere(folder)}", wrong)
        problems = list(checkpoint._problems_of_files())
        if problems:
            raise UserError(f"{folder} is not the whole checkpoint any more. {_elsewhere(folder)}", problems)
        return checkpoint

    def _problems_of_files(self) -> Iterator[str]:
        for name, nbytes in self.files.items():
            path = self.folder / name
            if path.is_symlink() and path.resolve().parent != self.folder.resolve():
                yield f"{name} is a link to {path.resolve()}, out of the folder: put the file itself there"
            elif not path.is_file():
                yield f"{name} is missing"
            elif (found := path.stat().st_size) != nbytes:
                yield f"{name} has {found:,} bytes, and had {nbytes:,} when it was written"

    def damaged(self, block: Block) -> UserError:
        """The error for a block whose checksum is not that of its bytes."""
        return UserError(
            f"{self.folder / block.piece.file} is damaged: {block.tensor} has other values in elements "
            f"{block.first} to {block.last - 1} of what this file holds of it than when it was written (checksum "
            f"{block.checksum:08x}). "
            f"{_elsewhere(self.folder)}"
        )

    def check_complete(self, names: Iterable[str]) -> None:
        """Raise UserError unless the files hold each element of these tensors exactly once."""
        wrong = [f"{name}: {gaps}" for name in names if (gaps := self.tensors[name].gaps())]
        if wrong:
            raise UserError(
                f"{self.folder} does not hold each element exactly once: `parallel-train checkpoint verify "
                f"{self.folder}` names all tensors. Load another checkpoint",
                shortened(wrong),
            )

    def write(self) -> None:
        """Write the index into the folder, which makes it a checkpoint."""
        values = asdict(self, recurse=True)
        del values["folder"]
        body = {"format": FORMAT, "version": VERSION, **values}
        text = json.dumps({**body, "checksum": _checksum(body)}, separators=(",", ":"))
        with (self.folder / INDEX).open("w", encoding="ascii") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())


def is_moment(name: str) -> bool:
    """Whether a tensor of a checkpoint is a moment of the optimizer."""
    return name.startswith((FIRST_MOMENT, SECOND_MOMENT))


def found_in(folder: Path) -> list[Path]:
    """The complete checkpoints in a folder, oldest first."""
    return sorted(path.parent for path in folder.glob(f"iteration_*/{INDEX}"))


def resolve(path: Path) -> Path:
    """The checkpoint that a path means: itself, or the newest of a folder of checkpoints.

    Raises UserError where there is none.
    """
    if (path / INDEX).is_file():
        return path
    found = found_in(path) if path.is_dir() else []
    if found:
        return found[-1]
    where = "" if path.is_absolute() else f" in {Path.cwd()}"
    what = "is a file" if path.is_file() else "holds no complete checkpoint"
    what = what if path.exists() else f"does not exist{where}"
    raise UserError(
        f"{path} {what}: a checkpoint is a folder with {INDEX}, as training writes it to checkpoint.save_path. Name "
        "such a folder, or one that holds them, of which the newest is taken"
    )


def _read_index(path: Path) -> dict[str, Any]:
    try:
        values = parse_object(path.read_bytes())
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise UserError(f"{path} is damaged: {error}. {_elsewhere(path.parent)}") from error
    if values.pop("format", None) != FORMAT:
        raise UserError(f"{path} is no index of a checkpoint: its format must be {FORMAT!r}")
    version, versions = values.get("version"), values.get("versions")
    if version != VERSION:
        writer = versions.get("parallel-trainer") if isinstance(versions, dict) else None
        raise UserError(
            f"{path} has version {version}, and this parallel-trainer reads version {VERSION}: use the "
            f"parallel-trainer that wrote it, {writer or 'which is not named'}, or a newer one"
        )
    checksum = values.pop("checksum", None)
    if checksum != _checksum({"format": FORMAT, **values}):
        raise UserError(f"{path} is damaged: it does not have the checksum that it names. {_elsewhere(path.parent)}")
    del values["version"]
    return values


def _checksum(body: Mapping[str, Any]) -> int:
    return zlib.crc32(json.dumps(body, ensure_ascii=False, sort_keys=True).encode(errors="surrogatepass"))


def shortened(found: list[str]) -> list[str]:
    """The first of a list of problems, and how many more there are."""
    return found if len(found) <= _LISTED else [*found[: _LISTED - 1], f"and {len(found) - _LISTED + 1} more"]


def _elsewhere(folder: Path) -> str:
    """What to load instead."""
    others = [path for path in found_in(folder.parent) if path != folder]
    if not others:
        return "Copy it again from where it was saved"
    return f"Copy it again, or load another: checkpoint.load_path: {others[-1]}"
