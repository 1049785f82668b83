"""Rewriting a checkpoint as another plan would have written it, one block at a time."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
from attrs import evolve, frozen

from parallel_trainer.checkpoint import index
from parallel_trainer.checkpoint.index import FIRST_MOMENT, SECOND_MOMENT, Block, Checkpoint
from parallel_trainer.checkpoint.load import Reader, check_model
from parallel_trainer.checkpoint.tensor_file import DTYPES
from parallel_trainer.checkpoint.write import Content, Kind, file_name, joined, new_folder, versions, write_file
from parallel_trainer.parallel.layout import Holding, ModelLayout, Runs

_BLOCKS_KEPT = 64


def reshard(checkpoint: Checkpoint, destination: Path, layout: ModelLayout, *, plan: str, config: str) -> Checkpoint:
    """Write what `checkpoint` holds as the ranks of `layout` would. Returns the new checkpoint.

    Memory holds some blocks of 1 MiB at a time. Raises UserError for a damaged checkpoint, another model, and a
    destination that exists or cannot be written.
    """
    check_model(checkpoint, {name: weight.shape for name, weight in layout.weights.items()}, what="weights")
    checkpoint.check_complete(checkpoint.tensors)
    ranks = layout.mesh.world_size
    with new_folder(destination) as folder, Reader(checkpoint) as reader:
        source = Source(checkpoint, reader)
        files = {}
        for rank in range(ranks):
            for kind, contents in _contents(layout.stored(rank), source).items():
                if contents:
                    name = file_name(kind, rank, ranks)
                    files[name] = write_file(folder / name, contents)
        tensors, sizes = joined(files.items())
        new = evolve(
            checkpoint,
            folder=folder,
            tensors=tensors,
            files=sizes,
            plan=plan,
            config=config,
            world_size=ranks,
            versions=versions(),
            block_bytes=index.BLOCK_BYTES,
        )
        new.write()
    return evolve(new, folder=destination)


def _contents(stored: Mapping[str, Holding], source: Source) -> dict[Kind, dict[str, Content]]:
    """What a rank writes of weights and of moments."""

    def contents(*prefixes: str) -> dict[str, Content]:
        names = {f"{prefix}{name}": holding for prefix in prefixes for name, holding in stored.items()}
        return {name: source.content(name, holding) for name, holding in names.items() if source.has(name)}

    return {"model": contents(""), "opt": contents(FIRST_MOMENT, SECOND_MOMENT)}


class Source:
    """A checkpoint's elements by their place in whole tensors. The last blocks read stay in memory."""

    def __init__(self, checkpoint: Checkpoint, reader: Reader) -> None:
        self.checkpoint = checkpoint
        self._reader = reader
        self._tensor: _Tensor | None = None
        self._kept: OrderedDict[tuple[str, str, int], np.ndarray] = OrderedDict()

    def has(self, tensor: str) -> bool:
        """Whether the checkpoint holds it; moments may be missing, and frozen weights have none."""
        return tensor in self.checkpoint.tensors

    def content(self, tensor: str, holding: Holding) -> Content:
        """What a rank will hold of a tensor, for `write_file`."""
        runs = holding.runs
        dtype = self.checkpoint.tensors[tensor].dtype
        return Content(holding, dtype, lambda first, last: self._values(tensor, runs.cut(first, last)))

    def _values(self, tensor: str, wanted: Runs) -> np.ndarray:
        """These elements of a tensor, in their order."""
        found = np.empty(wanted.size, DTYPES[self.checkpoint.tensors[tensor].dtype])
        if not wanted.size:
            return found
        if self._tensor is None or self._tensor.name != tensor:
            self._tensor = _Tensor.of(self.checkpoint, tensor)
        for block, content in self._tensor.overlapping(wanted.starts[0], wanted.stops[-1]):
            common = wanted.common(content)
            if common.size:
                found[common.here] = self._read(block)[common.there]
        return found

    def _read(self, block: Block) -> np.ndarray:
        key = (block.tensor, block.piece.file, block.first)
        if key not in self._kept:
            self._kept[key] = self._reader.read(block)
            if len(self._kept) > _BLOCKS_KEPT:
                self._kept.popitem(last=False)
        self._kept.move_to_end(key)
        return self._kept[key]


@frozen(eq=False)
class _Tensor:
    """The blocks of one tensor, and which elements of it each holds, the first and the last of them once more."""

    name: str
    blocks: Sequence[tuple[Block, Runs]]
    starts: np.ndarray
    stops: np.ndarray

    @classmethod
    def of(cls, checkpoint: Checkpoint, name: str) -> _Tensor:
        blocks = [(block, checkpoint.content(block)) for block in checkpoint.blocks([name])]
        starts = np.array([content.starts[0] for _, content in blocks])
        return cls(name, blocks, starts, np.array([content.stops[-1] for _, content in blocks]))

    def overlapping(self, start: int, stop: int) -> Iterator[tuple[Block, Runs]]:
        """Those that may hold elements `start` … `stop` - 1."""
        for number in np.flatnonzero((self.starts < stop) & (start < self.stops)).tolist():
            yield self.blocks[number]
