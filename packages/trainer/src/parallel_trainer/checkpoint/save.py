"""Saving a run while it trains: each rank writes its elements, then one of them the index, then the folder its name."""

from __future__ import annotations

import errno
import fcntl
import shutil
import warnings
from collections.abc import Callable, Mapping
from io import TextIOBase
from pathlib import Path
from threading import Thread
from typing import Any, Self

import numpy as np
from attrs import evolve, frozen
from device_mesh import Communicator
from parallel_config import ConfigWarning
from parallel_config.schema import Checkpoint as Section

from parallel_trainer.checkpoint import index
from parallel_trainer.checkpoint.agree import all_or_none, attempt, gather
from parallel_trainer.checkpoint.index import INDEX, Checkpoint, State, found_in
from parallel_trainer.checkpoint.run_mark import mark
from parallel_trainer.checkpoint.write import (
    DTYPE_NAMES,
    PREFIX,
    Content,
    Kind,
    begin,
    clear_partial,
    commit,
    file_name,
    joined,
    partial_of,
    remove,
    versions,
    write_file,
)
from parallel_trainer.errors import UserError
from parallel_trainer.parallel.layout import Holding

_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
"""What a file system that knows no locks answers (Lustre without the option flock, NFS without its lock service)."""


@frozen(eq=False)
class Array:
    """What a rank writes of one tensor: its elements, flat, and which ones they are."""

    holding: Holding
    values: np.ndarray

    @property
    def content(self) -> Content:
        """As files take it."""
        return Content(self.holding, DTYPE_NAMES[self.values.dtype], lambda first, last: self.values[first:last])


@frozen(eq=False)
class Snapshot:
    """A run at a step: what this rank writes, and what is true for all of them.

    weights, moments: by name of the tensor, those that this rank is the one to write.
    """

    state: State
    weights: Mapping[str, Array]
    moments: Mapping[str, Array]
    config: str
    plan: str
    data: Mapping[str, Any]

    def copy(self) -> Snapshot:
        """With arrays of its own."""
        weights, moments = (
            {name: Array(array.holding, array.values.copy()) for name, array in arrays.items()}
            for arrays in (self.weights, self.moments)
        )
        return evolve(self, weights=weights, moments=moments)


def saves(section: Section) -> bool:
    """Whether a run with this section saves checkpoints."""
    return section.enable_save and bool(section.save_path)


class Saver:
    """Saves a run by the section `checkpoint` of its file. Every method is collective.

    Checkpoints are folders iteration_STEP in `save_path`. Each is written under another name beside it and renamed when
    complete, so that a folder of that name is a whole checkpoint whatever happened on the way.

    `run` is the mark of the run that the folder belongs to, on rank 0; None on others.
    """

    def __init__(
        self, section: Section, communicator: Communicator, take: Callable[[], Snapshot], *, step: int
    ) -> None:
        """Claim `save_path` for this run, which stands at `step`.

        take: the run as it is, when a checkpoint is due.
        Raises UserError where `save_path` cannot be written, is used by another run, or holds checkpoints of later
        steps.
        """
        self.section = section
        self.folder = Path(section.save_path)
        self._communicator = communicator
        self._take = take
        self._last_saved = step
        self.run: str | None = None
        self._written: list[Path] = []
        self._writing: _Writing | None = None
        self._lock: TextIOBase | None = None
        self._on_first_rank(lambda: self._claim(step))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Let go of `save_path`. What is still being written stays unfinished; see `finish`."""
        if self._lock is not None:
            self._lock.close()

    def after_step(self, step: int) -> None:
        """Save if it is time. Raises UserError for what cannot be written, also by a save under way."""
        if self._writing is not None:
            done = np.array([not self._writing.thread.is_alive()], np.int64)
            if self._communicator.all_reduce(done, "min")[0]:
                self._complete()
        if step % self.section.save_interleaved_steps == 0:
            self.save(step)

    def finish(self, step: int) -> None:
        """Save the last step, unless it was saved, and wait until all is written."""
        if step > self._last_saved:
            self.save(step)
        self._complete()

    def save(self, step: int) -> None:
        """Write a checkpoint; with `async_save` begin to, with a copy of the arrays."""
        self._complete()
        final = self.folder / f"iteration_{step:08d}"
        self._on_first_rank(lambda: begin(final))
        snapshot = self._take()
        if self.section.async_save:
            snapshot = snapshot.copy()
        self._writing = _Writing(snapshot, final, self.section.prefix or PREFIX, self._communicator)
        self._last_saved = step
        if not self.section.async_save:
            self._complete()

    def _complete(self) -> None:
        """Wait for a save under way, and give it its name when all ranks have written their part."""
        if self._writing is None:
            return
        writing, self._writing = self._writing, None
        files, error = writing.result()
        said = gather(self._communicator, {"error": error, "files": files})
        errors = [f"rank {rank}: {part['error']}" for rank, part in enumerate(said) if part["error"] is not None]
        if errors:
            if self._communicator.rank == 0:
                shutil.rmtree(partial_of(writing.final), ignore_errors=True)
            raise UserError(self._failure(writing.final, errors))

        def finish() -> None:
            writing.write_index([item for part in said for item in part["files"].items()])
            commit(writing.final)
            self._written.append(writing.final)
            while len(self._written) > self.section.save_max:
                remove(self._written.pop(0))

        self._on_first_rank(finish)

    def _on_first_rank(self, action: Callable[[], object]) -> None:
        all_or_none(self._communicator, lambda: action() if self._communicator.rank == 0 else None)

    def _failure(self, final: Path, errors: list[str]) -> str:
        complete = found_in(self.folder)
        kept = "There is no complete one yet. Make room or choose another checkpoint.save_path"
        if complete:
            kept = (
                f"The newest complete one is {complete[-1]}. Make room or choose another checkpoint.save_path, and go "
                f"on with checkpoint.load_path: {complete[-1]}"
            )
        more = f" ({len(errors) - 1} more ranks failed)" if len(errors) > 1 else ""
        return f"Checkpoint {final} could not be saved. {errors[0]}{more}. {kept}"

    def _claim(self, step: int) -> None:
        if (self.folder / INDEX).is_file():
            raise UserError(
                f"checkpoint.save_path {self.folder} is a checkpoint: others would lie inside it, where nothing finds "
                f"them. Name a folder of checkpoints, {self.folder.absolute().parent} or a new one"
            )
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._lock = (self.folder / ".lock").open("w")
        except OSError as error:
            raise UserError(f"checkpoint.save_path {self.folder} cannot be written to: {error.strerror}") from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            self._lock.close()
            raise UserError(
                f"checkpoint.save_path {self.folder} is used by another run that is still going: each run needs a "
                "folder of its own"
            ) from error
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
            warnings.warn(
                f"checkpoint.save_path {self.folder} is on a file system without locks ({error.strerror}): nothing "
                "keeps another run from saving there at the same time.",
                ConfigWarning,
                stacklevel=2,
            )
        later = [path for path in found_in(self.folder) if _step(path) > step]
        if later:
            self._lock.close()
            loads = self.section.load_path and Path(self.section.load_path).absolute() == self.folder.absolute()
            go_on = "" if loads else f"go on from there with checkpoint.load_path: {self.folder}, "
            raise UserError(
                f"checkpoint.save_path {self.folder} holds {later[-1].name}, and this run starts at step {step}: its "
                f"checkpoints would lie among those of another. What works: {go_on}choose another save_path, or move "
                "the later checkpoints away"
            )
        clear_partial(self.folder)
        self.run = mark(self.folder)


def _step(folder: Path) -> int:
    digits = folder.name.removeprefix("iteration_")
    return int(digits) if digits.isdecimal() else 0


class _Writing:
    """A save under way: this rank's part, in a thread that speaks to no other rank."""

    def __init__(self, snapshot: Snapshot, final: Path, prefix: str, communicator: Communicator) -> None:
        self.snapshot, self.final, self.world_size = snapshot, final, communicator.size
        kinds: dict[Kind, Mapping[str, Array]] = {"model": snapshot.weights, "opt": snapshot.moments}
        self._files = {
            file_name(kind, communicator.rank, communicator.size, prefix=prefix): arrays
            for kind, arrays in kinds.items()
            if arrays
        }
        self._outcome: tuple[tuple[dict[str, Any]] | None, str | None] = None, "it was not written"
        self.thread = Thread(target=self._run, name="checkpoint", daemon=True)
        self.thread.start()

    def result(self) -> tuple[dict[str, Any] | None, str | None]:
        """What this rank wrote, by file; or what went wrong."""
        self.thread.join()
        found, error = self._outcome
        return found[0] if found else None, error

    def write_index(self, files: list[tuple[str, Any]]) -> None:
        """Make the folder a checkpoint of what all ranks wrote."""
        tensors, sizes = joined(files)
        state = self.snapshot
        Checkpoint(
            partial_of(self.final),
            tensors,
            sizes,
            state.state,
            state.config,
            state.plan,
            self.world_size,
            dict(state.data),
            versions(),
            index.BLOCK_BYTES,
        ).write()

    def _run(self) -> None:
        folder = partial_of(self.final)
        contents = {
            file: {name: array.content for name, array in arrays.items()} for file, arrays in self._files.items()
        }
        self._outcome = attempt(
            lambda: {file: write_file(folder / file, of_file) for file, of_file in contents.items()}
        )
