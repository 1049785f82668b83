"""Whether a checkpoint is still what was written, byte for byte, and holds every element exactly once."""

from __future__ import annotations

from collections.abc import Iterator

from parallel_trainer.checkpoint.index import Checkpoint
from parallel_trainer.checkpoint.load import Reader
from parallel_trainer.errors import UserError


def damages(checkpoint: Checkpoint) -> Iterator[str]:
    """What is wrong with a checkpoint, in sentences. Reads all of it."""
    for name, tensor in checkpoint.tensors.items():
        gaps = tensor.gaps()
        if gaps:
            yield f"{name}: {gaps}"
    said = set()
    with Reader(checkpoint) as reader:
        for block in checkpoint.blocks(list(checkpoint.tensors)):
            try:
                reader.read(block)
            except UserError as error:  # of a file that cannot be opened, the same for each of its blocks
                if str(error) not in said:
                    said.add(str(error))
                    yield str(error)
