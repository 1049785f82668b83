"""Reading a checkpoint into the ranks of any plan.

Each byte is read from disk once, by one rank: blocks are shared out evenly, their checksums verified, and what a block
holds is sent to the ranks that need it.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import lru_cache
from pathlib import Path

import numpy as np
from device_mesh import Communicator

from parallel_trainer.checkpoint.index import Block, Checkpoint
from parallel_trainer.checkpoint.tensor_file import DTYPES, TensorFile, from_bfloat16
from parallel_trainer.errors import UserError
from parallel_trainer.parallel.layout import Common, Runs

ROUND_BYTES = 16 << 20
"""How much a rank reads before it sends."""


class Reader:
    """Reads blocks of a checkpoint, each verified. `nbytes` counts what was read. Close it, or use it in a `with`."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.checkpoint = checkpoint
        self.nbytes = 0
        self._files: dict[str, TensorFile] = {}
        self._stack = ExitStack()

    def read(self, block: Block) -> np.ndarray:
        """The elements of a block, as they were written; BF16 in float32. Raises UserError where they are others."""
        file = self._file(block.piece.file)
        entry = file.entries.get(block.tensor)
        dtype = self.checkpoint.tensors[block.tensor].dtype
        if entry is None or entry.size != block.piece.size or entry.dtype != dtype:
            found = "not there" if entry is None else f"{entry.size} elements of type {entry.dtype}"
            raise UserError(
                f"{file.path} is damaged: {block.tensor} is {found}, and the index has it with {block.piece.size} "
                f"elements of type {dtype}. Copy the checkpoint again, or load another"
            )
        data = file.read_bytes(entry, block.first, block.last)
        self.nbytes += data.nbytes
        if zlib.crc32(data) != block.checksum:
            raise self.checkpoint.damaged(block)
        values = np.frombuffer(data, DTYPES[entry.dtype])
        return from_bfloat16(values) if entry.dtype == "BF16" else values

    def _file(self, name: str) -> TensorFile:
        if name not in self._files:
            self._files[name] = self._stack.enter_context(TensorFile.open(self.checkpoint.folder / name))
        return self._files[name]

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()


def load_arrays(
    checkpoint: Checkpoint,
    arrays: Mapping[str, np.ndarray],
    runs: Callable[[str, int], Runs | None],
    communicator: Communicator,
    names: Sequence[str],
    *,
    dtype: np.dtype,
) -> int:
    """Fill arrays with what the checkpoint holds. Collective.

    arrays: this rank's, flat, by name of the tensor; names that it does not hold may be missing.
    runs:   which elements of a tensor a rank holds, None for none; asked for all ranks.
    names:  the tensors that any rank wants, the same on all ranks.
    dtype:  of the arrays of all ranks.

    Returns the bytes that this rank read. Raises UserError, on the rank that finds it, for a damaged block; and before
    anything is read, on all ranks, for elements that are missing or there twice.
    """
    checkpoint.check_complete(names)
    blocks = checkpoint.blocks(names)
    shares = _shares(checkpoint, blocks, communicator.size)
    rounds = [list(_rounds(checkpoint, share)) for share in shares]
    cached = lru_cache(maxsize=4 * communicator.size)(runs)
    with Reader(checkpoint) as reader:
        for number in range(max(map(len, rounds))):
            of_round = [each[number] if number < len(each) else [] for each in rounds]
            _exchange(checkpoint, of_round, reader, arrays, cached, communicator, dtype)
        return reader.nbytes


def _exchange(
    checkpoint: Checkpoint,
    of_round: Sequence[Sequence[Block]],
    reader: Reader,
    arrays: Mapping[str, np.ndarray],
    runs: Callable[[str, int], Runs | None],
    communicator: Communicator,
    dtype: np.dtype,
) -> None:
    """Read this rank's blocks of a round and send to each rank what it holds of them."""

    def common(block: Block, rank: int) -> Common:
        """What a rank holds of a block: there where it lies in the block, here where the rank holds it."""
        return (runs(block.tensor, rank) or _NOTHING).common(contents[id(block)])

    contents = {id(block): checkpoint.content(block) for blocks in of_round for block in blocks}
    mine = [(block, reader.read(block)) for block in of_round[communicator.rank]]
    pieces = [[read[common(block, rank).there] for block, read in mine] for rank in range(communicator.size)]
    arriving = [[(block, common(block, communicator.rank)) for block in blocks] for blocks in of_round]
    received = communicator.all_to_all(
        np.concatenate([np.empty(0, dtype), *(piece.astype(dtype, copy=False) for some in pieces for piece in some)]),
        send_sizes=[sum(piece.size for piece in some) for some in pieces],
        receive_sizes=[sum(part.size for _, part in some) for some in arriving],
    )
    start = 0
    for block, part in (found for some in arriving for found in some):
        if part.size:
            arrays[block.tensor][part.here] = received[start : start + part.size]
            start += part.size


_NOTHING = Runs(np.empty(0, np.int64), np.empty(0, np.int64))


def _shares(checkpoint: Checkpoint, blocks: Sequence[Block], ranks: int) -> list[list[Block]]:
    """The blocks that each rank reads: neighbours in the files, and as equally many bytes as whole blocks allow."""
    sizes = [_nbytes(checkpoint, block) for block in blocks]
    total = sum(sizes)
    shares: list[list[Block]] = [[] for _ in range(ranks)]
    before = 0
    for block, size in zip(blocks, sizes, strict=True):
        shares[min((2 * before + size) * ranks // (2 * total), ranks - 1)].append(block)
        before += size
    return shares


def _rounds(checkpoint: Checkpoint, blocks: Sequence[Block]) -> Iterator[list[Block]]:
    found: list[Block] = []
    size = 0
    for block in blocks:
        found.append(block)
        size += _nbytes(checkpoint, block)
        if size >= ROUND_BYTES:
            yield found
            found, size = [], 0
    if found:
        yield found


def _nbytes(checkpoint: Checkpoint, block: Block) -> int:
    return (block.last - block.first) * checkpoint.tensors[block.tensor].itemsize


def check_model(checkpoint: Checkpoint, shapes: Mapping[str, tuple[int, ...]], *, what: str) -> None:
    """Raise UserError unless the checkpoint holds exactly these tensors, naming all that differ.

    what: "weights" or "moments", for the message.
    """
    others = checkpoint.weights if what == "weights" else {}
    found = {name: tensor.shape for name, tensor in checkpoint.tensors.items() if name in shapes or name in others}
    check_shapes(checkpoint.folder, found, shapes, what=what)


def check_shapes(
    folder: Path, stored: Mapping[str, tuple[int, ...]], shapes: Mapping[str, tuple[int, ...]], *, what: str = "weights"
) -> None:
    """Raise UserError unless what a folder holds are exactly these tensors, naming all that differ."""
    problems = []
    problems += [f"{name} {list(shape)} is not in it" for name, shape in shapes.items() if name not in stored]
    problems += [
        f"{name} is {list(stored[name])} in it, and {list(shape)} in the model"
        for name, shape in shapes.items()
        if name in stored and stored[name] != shape
    ]
    problems += [
        f"{name} {list(shape)} is in it, and not in the model" for name, shape in stored.items() if name not in shapes
    ]
    if problems:
        raise UserError(f"{folder} does not fit this model, by its {what}:", problems)
