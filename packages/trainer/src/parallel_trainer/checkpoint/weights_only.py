"""Weights without a run: from a checkpoint, or straight from a Hugging Face folder, into the ranks of any plan."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from attrs import frozen
from parallel_config.schema import Checkpoint as Section

from parallel_trainer.checkpoint.agree import all_or_none, gather
from parallel_trainer.checkpoint.index import Checkpoint, resolve
from parallel_trainer.checkpoint.load import check_shapes
from parallel_trainer.checkpoint.resume import model_differences, restore
from parallel_trainer.checkpoint.save import saves
from parallel_trainer.errors import UserError
from parallel_trainer.parallel.layout import Runs

if TYPE_CHECKING:
    from parallel_trainer.checkpoint.hugging_face import HuggingFaceFolder
    from parallel_trainer.trainer import Trainer

_PIECE = 1 << 20


@frozen
class Loaded:
    """What was loaded.

    step:  after which it was saved, 0 for a Hugging Face folder.
    notes: what the user should know.
    """

    folder: Path
    step: int
    notes: tuple[str, ...]


def where_weights_are(given: Path | None, section: Section) -> Path:
    """The path to load from: what the user gives, else `checkpoint.load_path`, else the folder that runs save to.

    Raises UserError where none of them is given, and where nothing is there, as far as can be seen without reading it.
    """
    if given is None and not section.load_path and not saves(section):
        raise UserError(
            "There is no checkpoint to evaluate: the file has neither checkpoint.load_path nor checkpoint.save_path. "
            "Give --checkpoint PATH, of a checkpoint or of a Hugging Face folder"
        )
    path = given or Path(section.load_path or section.save_path)
    if not _is_hugging_face(path):
        Checkpoint.open(resolve(path))
    return path


def load_weights(trainer: Trainer, path: Path) -> Loaded:
    """Load a model's weights. Collective over the world. Raises UserError for what is not this model."""
    world = trainer.groups["world"]
    if not gather(world, _is_hugging_face(path))[0]:
        resumed = restore(trainer, path, optimizer=False)
        return Loaded(resumed.folder, Checkpoint.open(resumed.folder).state.step, resumed.notes)
    from parallel_trainer.checkpoint.hugging_face import HuggingFaceFolder

    with all_or_none(world, lambda: HuggingFaceFolder.open(path)) as folder:
        all_or_none(world, partial(_fill, trainer, folder))
        notes = (*folder.config.notes, *model_differences(folder.config.model, trainer.job.model))
        return Loaded(path, 0, notes)


def _is_hugging_face(path: Path) -> bool:
    return (path / "config.json").is_file()


def _fill(trainer: Trainer, folder: HuggingFaceFolder) -> None:
    """Read this rank's elements of every weight, a piece at a time."""
    stored = {name: weight.shape for name, weight in folder.weights.items()}
    check_shapes(folder.path, stored, {name: weight.shape for name, weight in trainer.layout.weights.items()})
    for sharded in trainer.weights:
        name = sharded.weight.name
        holding = trainer.layout.holding(name, trainer.groups["world"].rank)
        if holding is None or not holding.size:
            continue
        wanted = holding.runs
        begin, end = int(wanted.starts[0]), int(wanted.stops[-1])
        for first in range(begin, end, _PIECE):
            last = min(first + _PIECE, end)
            common = wanted.common(Runs(np.array([first]), np.array([last - first])))
            if common.size:
                sharded.values[common.here] = folder.read(name, first, last)[common.there]
