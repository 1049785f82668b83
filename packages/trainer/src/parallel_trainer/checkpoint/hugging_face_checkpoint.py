"""From a Hugging Face folder to a checkpoint that training starts from, and from any checkpoint to such a folder."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
from parallel_config import ConfigError, loads, written_fields

from parallel_trainer.checkpoint import index
from parallel_trainer.checkpoint.hugging_face import HuggingFaceFolder, declared, write_folder
from parallel_trainer.checkpoint.index import Checkpoint, State
from parallel_trainer.checkpoint.load import Reader, check_model
from parallel_trainer.checkpoint.reshard import Source
from parallel_trainer.checkpoint.write import Content, file_name, joined, new_folder, versions, write_file
from parallel_trainer.errors import UserError
from parallel_trainer.models.config import model_config
from parallel_trainer.parallel.layout import Holding, weight_part
from parallel_trainer.parallel.weights import Weight

_PIECE = 1 << 20


def import_folder(folder: HuggingFaceFolder, destination: Path) -> Checkpoint:
    """Write a folder's weights as a checkpoint of step 0, without moments of an optimizer. Returns it.

    Its file, `Checkpoint.config`, is the `model` section. Memory holds a block of 1 MiB at a time.
    Raises UserError for a destination that exists or cannot be written.
    """
    with new_folder(destination) as partial_folder:
        name = file_name("model", 0, 1)
        contents = {
            weight.name: Content(_whole(weight), folder.dtype(weight.name), partial(folder.read, weight.name))
            for weight in folder.weights.values()
        }
        tensors, files = joined([(name, write_file(partial_folder / name, contents))])
        checkpoint = Checkpoint(
            partial_folder,
            tensors,
            files,
            State(step=0, consumed_samples=0, global_batch_size=1, optimizer_steps=0),
            folder.config.yaml,
            f"imported from {folder.path.absolute()}",
            1,
            {},
            versions(),
            index.BLOCK_BYTES,
        )
        checkpoint.write()
    return Checkpoint.open(destination)


def export_folder(checkpoint: Checkpoint, folder: Path, *, dtype: str = "float32") -> None:
    """Write a checkpoint's weights as a folder that transformers loads, whatever plan wrote it.

    dtype: as for `write_folder`, which also says what is raised; UserError too for a damaged checkpoint.
    """
    try:
        with warnings.catch_warnings(action="ignore"):  # the run that wrote it has shown them
            file = loads(checkpoint.config)
    except ConfigError as error:
        raise UserError(
            f"{checkpoint.folder / index.INDEX} holds a configuration that this version cannot read. Export it with "
            f"the parallel-trainer that wrote it, {checkpoint.versions.get('parallel-trainer', 'which is not named')}",
            [str(problem) for problem in error.problems],
        ) from error
    config = model_config(file.model)
    weights = declared(config)
    check_model(checkpoint, {name: weight.shape for name, weight in weights.items()}, what="weights")
    checkpoint.check_complete(weights)
    given = {"max_position_embeddings", "pad_token_id"} & {name.removeprefix("model.") for name in written_fields(file)}
    others = {name: getattr(file.model, name) for name in given} | file.model.extra
    with Reader(checkpoint) as reader:
        source = Source(checkpoint, reader)
        values = ((name, _pieces(source.content(name, _whole(weight)))) for name, weight in weights.items())
        write_folder(folder, config, values, dtype=dtype, others=others)


def _whole(weight: Weight) -> Holding:
    """All of a weight, as one rank holds it."""
    return Holding(weight_part(weight, 1, 0), (weight.size,), 0, True)


def _pieces(content: Content) -> Iterator[np.ndarray]:
    size = content.holding.size
    for first in range(0, size, _PIECE):
        yield content.read(first, min(first + _PIECE, size))
