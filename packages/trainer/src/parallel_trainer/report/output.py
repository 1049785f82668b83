"""The folder of a run's reports: that it is a new one, or that of the run that goes on."""

from __future__ import annotations

import os
from pathlib import Path

from parallel_config.schema import Checkpoint as Section

from parallel_trainer.checkpoint.resume import goes_on_in_its_folder
from parallel_trainer.checkpoint.run_mark import mark_of
from parallel_trainer.errors import UserError
from parallel_trainer.report.lines import METRICS


def check_output(output: Path, section: Section | None = None) -> None:
    """Raise UserError for an output folder that cannot be written to, or that holds what another run wrote.

    section: what the run goes on from and saves; a run that goes on from its own checkpoints goes on in its own output.
    """
    if (output / METRICS).exists() and not (section and _is_of(output, section)):
        go_on = ""
        if section and section.save_path and _same_run(output, section):
            go_on = f" It is that of {section.save_path}: checkpoint.load_path: {section.save_path} goes on with it."
        raise UserError(
            f"--output {output} holds the metrics of another run; give a new folder, or delete it first.{go_on}"
        )
    existing = next(path for path in (output, *output.absolute().parents) if path.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK):
        raise UserError(f"--output {output} cannot be made: {existing} is not a folder that can be written to.")


def _is_of(output: Path, section: Section) -> bool:
    """Whether an output is of the run that goes on."""
    return goes_on_in_its_folder(section) and _same_run(output, section)


def _same_run(output: Path, section: Section) -> bool:
    mark = mark_of(output)
    return mark is not None and mark == mark_of(Path(section.save_path))
