"""Global batches without a token to learn from, between full ones, on several ranks: skipped, and nothing changes."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
from attrs import evolve
from cases import corpora
from device_mesh import Communicator
from evaluation_checks import PLANS
from parallel_config import loads
from parallel_trainer.batch import MicroBatch
from parallel_trainer.data.loader import BatchLoader
from parallel_trainer.job import prepare
from parallel_trainer.trainer import Trainer

EMPTY = (True, False, True, True, False)
"""By step whether its batch has no valid token: the first, so that the optimizer begins later, and two in a row."""


class Masked:
    """A loader whose micro-batches have a loss_mask of 0 in some of a run's steps."""

    def __init__(self, loader: BatchLoader, size: int, empty: tuple[bool, ...] = EMPTY) -> None:
        self._loader, self._size, self._empty = loader, size, empty

    def micro_batches(self, consumed: int) -> Iterator[MicroBatch]:
        for batch in self._loader.micro_batches(consumed):
            masked = evolve(batch, loss_mask=np.zeros(batch.input_ids.shape, np.float32))
            yield masked if self._empty[consumed // self._size] else batch


def empty_batches(communicator: Communicator) -> dict[str, dict[str, Any]]:
    """By plan: which model it has, and what its steps report.

    results: of the full steps losses and norm.
    updated, valid: of every step.
    skipped: steps in a row that were skipped, after each; a limit of 3 ends no run.
    optimizer: how many steps AdamW took.
    changed: the ranks on which an empty step changed a bit of weights, moments or biases, or left loads behind.
    weights: sum of squares of the final weights, each element once.
    """
    found = {}
    for case in PLANS[communicator.size]:
        config = loads(case.yaml(corpora()))
        limited = evolve(config.training, steps=len(EMPTY), max_consecutive_skipped_steps=3)
        trainer = Trainer(prepare(evolve(config, training=limited), communicator.size), communicator)
        trainer.loader = Masked(trainer.loader, trainer.job.plan.global_batch_size)  # type: ignore[assignment]
        results, skipped, changed = [], [], 0
        for empty in EMPTY:
            before = _state(trainer)
            results.append(trainer.train_step())
            skipped.append(trainer.skipped)
            same = np.array_equal(before, _state(trainer)) and trainer.loads is None
            changed += int(communicator.all_reduce(np.array([empty and not same]).astype(np.int64))[0])
        full = [result for result, empty in zip(results, EMPTY, strict=True) if not empty]
        names = [
            name for name in ("loss", "grad_norm", "mtp_loss", "balance_loss") if getattr(full[0], name) is not None
        ]
        nothing = [getattr(result, name) for result in results if not result.valid_tokens for name in names]
        found[case.name] = {
            "model": case.model.name,
            "results": [[getattr(result, name) for name in names] for result in full],
            "nothing": all(map(math.isnan, nothing)),
            "updated": [result.updated for result in results],
            "valid": [result.valid_tokens for result in results],
            "skipped": skipped,
            "optimizer": trainer.optimizer.steps,
            "changed": changed,
            "weights": sum(float(np.sum(value.astype(np.float64) ** 2)) for _, value in trainer.full_values()),
        }
    return found


def _state(trainer: Trainer) -> np.ndarray:
    """Everything that a step may change on this rank; router biases lie among the weights."""
    optimizer = trainer.optimizer
    return np.concatenate([trainer.weights.values, optimizer.first_moment, optimizer.second_moment, [optimizer.steps]])
