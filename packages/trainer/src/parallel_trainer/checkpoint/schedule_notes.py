"""What a file that changed since a checkpoint was saved makes of the learning rate."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

from parallel_config import ConfigError, TrainConfig, loads, written_fields

from parallel_trainer.checkpoint.index import Checkpoint
from parallel_trainer.errors import UserError
from parallel_trainer.job import schedule_of

_COMPARED = 200


def saved_file(checkpoint: Checkpoint) -> TrainConfig | None:
    """The file that a checkpoint's run was started with; None for one that this version cannot read."""
    try:
        with warnings.catch_warnings(action="ignore"):
            return loads(checkpoint.config)
    except ConfigError:  # as another version wrote it
        return None


def schedule_notes(before: TrainConfig | None, now: TrainConfig, step: int) -> Iterator[str]:
    """What becomes of the learning rate where a run that goes on after `step` steps has another number of steps, or
    another schedule, than the one that saved."""
    if before is None or not {"training", "lr_scheduler"} <= written_fields(before):
        return
    try:
        was, is_now = schedule_of(before), schedule_of(now)
    except UserError:
        return
    old, new = before.training.steps, now.training.steps
    what = f"training.steps was {old} and is {new}" if old != new else "lr_scheduler is not as it was"
    last = min(old, new)
    compared = {step, *range(step, last, max((last - step) // _COMPARED, 1)), last - 1}
    changed = next((at for at in sorted(compared) if step <= at < new and was(at) != is_now(at)), None)
    if changed is not None:
        yield (
            f"{what}: the learning rate of step {changed + 1} is {is_now(changed):.4g}, and was to be "
            f"{was(changed):.4g}; that of the last step, {new}, is {is_now(new - 1):.4g}."
        )
    elif old != new:
        yield f"{what}: the learning rate of the steps that both have is the same."
