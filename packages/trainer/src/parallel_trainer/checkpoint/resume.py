"""From a trainer to what a checkpoint holds, and back: under the same plan or another."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from attrs import asdict, frozen
from device_mesh import Communicator
from parallel_config.schema import Checkpoint as Section

from parallel_trainer.checkpoint.agree import all_or_none, gather
from parallel_trainer.checkpoint.index import (
    FIRST_MOMENT,
    INDEX,
    SECOND_MOMENT,
    Checkpoint,
    State,
    found_in,
    resolve,
)
from parallel_trainer.checkpoint.load import check_model, load_arrays
from parallel_trainer.checkpoint.save import Array, Snapshot, saves
from parallel_trainer.checkpoint.schedule_notes import saved_file, schedule_notes
from parallel_trainer.checkpoint.write import DTYPE_NAMES
from parallel_trainer.errors import UserError
from parallel_trainer.job import Job, degrees
from parallel_trainer.models.config import ModelConfig, model_config
from parallel_trainer.parallel.layout import Runs

if TYPE_CHECKING:
    from parallel_trainer.trainer import Trainer


def snapshot(trainer: Trainer, *, optimizer: bool) -> Snapshot:
    """The run as it is; the arrays are those that training goes on to change.

    optimizer: with the optimizer's moments.
    """
    job = trainer.job
    values = _values(trainer)
    stored = trainer.layout.stored(trainer.groups["world"].rank)

    def arrays(prefix: str) -> dict[str, Array]:
        names = {f"{prefix}{name}": holding for name, holding in stored.items()}
        return {name: Array(holding, values[name]) for name, holding in names.items() if name in values}

    return Snapshot(
        State(
            step=trainer.step,
            consumed_samples=trainer.consumed,
            global_batch_size=job.plan.global_batch_size,
            optimizer_steps=trainer.optimizer.steps,
            skipped=trainer.skipped,
        ),
        weights=arrays(""),
        moments={**arrays(FIRST_MOMENT), **arrays(SECOND_MOMENT)} if optimizer else {},
        config=job.config.source.text,
        plan=degrees(job.plan),
        data=data_of(job),
    )


@frozen
class Resumed:
    """What `restore` did.

    nbytes: read by this rank.
    notes:  what the user should know.
    """

    folder: Path
    step: int
    nbytes: int
    notes: tuple[str, ...]


def check_loadable(job: Job) -> None:
    """Raise UserError where the checkpoint that a file starts from cannot be loaded, as far as its index shows."""
    section = job.config.checkpoint
    if section.load_path and not begins_from_nothing(section):
        checkpoint = Checkpoint.open(resolve(Path(section.load_path)))
        if not section.no_load_optim:
            _check_optimizer(checkpoint)
            _position(checkpoint.state, job)


def begins_from_nothing(section: Section) -> bool:
    """Whether a run loads from the folder that it saves to, and nothing has been saved there: the first of several runs
    of one file."""
    load, save = Path(section.load_path), Path(section.save_path)
    same = saves(section) and load.absolute() == save.absolute()
    return same and not found_in(load) and not (load / INDEX).exists() and (load.is_dir() or not load.exists())


def goes_on_in_its_folder(section: Section) -> bool:
    """Whether a run goes on from the folder that it saves to, or from a checkpoint in it: as the same run."""
    if not (section.load_path and saves(section)):
        return False
    load, save = Path(section.load_path).absolute(), Path(section.save_path).absolute()
    return save in (load, load.parent)


def finished(job: Job) -> Path | None:
    """The checkpoint of its last step, for a run that goes on in its own folder and has no step left."""
    section = job.config.checkpoint
    if section.no_load_optim or not goes_on_in_its_folder(section) or begins_from_nothing(section):
        return None
    checkpoint = Checkpoint.open(resolve(Path(section.load_path)))
    return checkpoint.folder if _step_of(checkpoint.state, job) == job.config.training.steps else None


def restore(trainer: Trainer, path: Path, *, optimizer: bool) -> Resumed:
    """Go on from a checkpoint. Collective over the world.

    path:      a checkpoint, or a folder of them, of which the newest is taken.
    optimizer: with the optimizer's moments, the step and the position in the data; else a new run begins from the
        checkpoint's weights.

    Raises UserError for a checkpoint that is damaged or does not fit the model or the run. The trainer is then of no
    use.
    """
    checkpoint = opened(path, trainer.groups["world"])
    weights = {name: weight.shape for name, weight in trainer.layout.weights.items()}
    check_model(checkpoint, weights, what="weights")
    names = list(weights)
    if optimizer:
        _check_optimizer(checkpoint)
        trained = {name: weights[name] for name, weight in trainer.layout.weights.items() if weight.trainable}
        moments = {f"{prefix}{name}": shape for prefix in _MOMENTS for name, shape in trained.items()}
        check_model(checkpoint, moments, what="moments")
        names += moments
        step = _position(checkpoint.state, trainer.job)
    nbytes = load_arrays(
        checkpoint, _values(trainer), _runs(trainer), trainer.groups["world"], names, dtype=trainer.job.dtype
    )
    said = list(model_notes(checkpoint, trainer.job.model))
    if optimizer:
        state = checkpoint.state
        trainer.step, trainer.consumed, trainer.skipped = step, state.consumed_samples, state.skipped
        trainer.optimizer.steps = state.optimizer_steps
        said += notes(checkpoint, trainer.job, trainer.step)
        said += schedule_notes(saved_file(checkpoint), trainer.job.config, trainer.step)
    return Resumed(checkpoint.folder, trainer.step, nbytes, tuple(said))


_MOMENTS = (FIRST_MOMENT, SECOND_MOMENT)


def opened(path: Path, communicator: Communicator) -> Checkpoint:
    """The checkpoint that a path means to rank 0, on all ranks: the newest may become another while they look."""
    found = all_or_none(communicator, lambda: str(resolve(path)) if communicator.rank == 0 else "")
    folder = Path(gather(communicator, found)[0])
    return all_or_none(communicator, lambda: Checkpoint.open(folder))


def _values(trainer: Trainer) -> dict[str, np.ndarray]:
    """This rank's elements of every tensor of a checkpoint, by its name."""
    found = {sharded.weight.name: sharded.values for sharded in trainer.weights}
    moments = zip(_MOMENTS, (trainer.optimizer.first_moment, trainer.optimizer.second_moment), strict=True)
    for prefix, flat in moments:
        found |= {f"{prefix}{sharded.weight.name}": flat[sharded.slice] for sharded in trainer.weights.trainable}
    return found


def _runs(trainer: Trainer) -> Any:
    def runs(tensor: str, rank: int) -> Runs | None:
        name = tensor.removeprefix(FIRST_MOMENT).removeprefix(SECOND_MOMENT)
        held = trainer.layout.holding(name, rank)
        return None if held is None else held.runs

    return runs


def _check_optimizer(checkpoint: Checkpoint) -> None:
    if not checkpoint.has_optimizer:
        raise UserError(
            f"{checkpoint.folder} holds weights and no moments of the optimizer (checkpoint.no_save_optim, or weights "
            "from elsewhere): training cannot go on as if nothing had happened. To begin a new run from these weights, "
            "with step 0 of the learning rate and of the data, write checkpoint.no_load_optim: true"
        )


def _position(state: State, job: Job) -> int:
    """The step at which a run goes on. Raises UserError where nothing is left of it."""
    step = _step_of(state, job)
    if step >= job.config.training.steps:
        raise UserError(
            f"The checkpoint is of step {step} and training.steps is {job.config.training.steps}: there is nothing "
            "left to train. Raise training.steps, or load an earlier checkpoint"
        )
    return step


def _step_of(state: State, job: Job) -> int:
    """The steps that a state stands for, in steps of this run's size."""
    size = job.plan.global_batch_size
    return state.step if size == state.global_batch_size else state.consumed_samples // size


def data_of(job: Job) -> dict[str, Any]:
    """What the numbers of samples depend on: another value of one of these, and they are other samples."""
    dataloader = job.config.train_dataset.dataloader
    return {
        "samples": len(job.dataset),
        "data_path": [str(part) for part in dataloader.config.data_path or dataloader.config.train_data_path or ()],
        "split": dataloader.config.split,
        "seq_length": job.seq_length,
        "seed": dataloader.config.seed,
        "shuffle": dataloader.shuffle,
    }


_OF_TRAINING = {
    "initializer_range",
    "moe_aux_loss_coeff",
    "moe_router_bias_update_rate",
    "moe_router_load_balancing_type",
    "mtp_loss_scaling_factor",
}
"""Fields of a model that say how it is trained, and not what its weights compute."""


def model_notes(checkpoint: Checkpoint, model: ModelConfig) -> Iterator[str]:
    """What a model computes differently from the one that was saved, with weights of the same shapes."""
    file = saved_file(checkpoint)
    try:
        before = model_config(file.model) if file else None
    except UserError:  # as another version wrote it
        return
    if before is None:
        return
    yield from model_differences(before, model)


def model_differences(before: ModelConfig, model: ModelConfig) -> Iterator[str]:
    """What a model computes differently from another with weights of the same shapes, in a sentence."""
    now = asdict(model, recurse=False)
    other = [
        f"{name} was {value}, is {now[name]}"
        for name, value in asdict(before, recurse=False).items()
        if name in now.keys() - _OF_TRAINING and now[name] != value
    ]
    if other:
        yield f"The model computes something else with the checkpoint's weights: {'; '.join(other)}."


def notes(checkpoint: Checkpoint, job: Job, step: int) -> Iterator[str]:
    """What differs between the run that saved and this one, which goes on at `step`, in sentences."""
    state, size = checkpoint.state, job.plan.global_batch_size
    if size != state.global_batch_size:
        yield (
            f"The global batch was {state.global_batch_size} samples and is {size}: of the {state.consumed_samples} "
            f"samples read this makes step {step}, which is where the learning rate goes on."
        )
    types = {tensor.dtype for tensor in checkpoint.tensors.values()}
    if types != {DTYPE_NAMES[job.dtype]}:
        stored = " and ".join(sorted(types))
        yield f"The checkpoint has {stored}, and this run keeps weights and moments in {job.dtype}."
    now = data_of(job)
    other = [
        f"{name} was {value}, is {now.get(name)}" for name, value in checkpoint.data.items() if now.get(name) != value
    ]
    if other:
        yield (
            f"The data is not what the checkpoint was trained on ({'; '.join(other)}): samples may come again, "
            "or never."
        )
