"""Training that goes on from checkpoints: under other plans, on other numbers of ranks, and under the same plan."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
from cases import CASES, STEPS, Case, corpora
from device_mesh import Communicator
from parallel_config import loads
from parallel_config.schema import Checkpoint as Section
from parallel_trainer.checkpoint import index
from parallel_trainer.checkpoint.check import damages
from parallel_trainer.checkpoint.index import Checkpoint
from parallel_trainer.checkpoint.resume import restore, snapshot
from parallel_trainer.checkpoint.save import Saver
from parallel_trainer.cli.verify import largest_weight_difference
from parallel_trainer.job import prepare
from parallel_trainer.trace import Trace
from parallel_trainer.trainer import Trainer

RELAYS = {2: 6, 4: 8, 8: 6}
"""By world size how many relays are run."""

_BLOCK_BYTES = 512
"""The models are small: with blocks of 1 MiB each tensor would be one, and one rank would read it."""


def relay(communicator: Communicator) -> dict[str, Any]:
    """Runs of which each step is trained under another plan, drawn from the matrix, on all ranks or some of them.

    Each goes on from the checkpoint of the one before. Their losses, and the weights after the last step, must be those
    of one rank. Of each checkpoint that is read: whether it is whole, and how evenly the ranks read it.
    """
    found: dict[str, Any] = {}
    for number, legs in enumerate(_drawn(communicator.size)):
        model, folder = legs[0].model, Path(sys.argv[1], f"relay-{communicator.size}-{number}")
        baseline = Trace.load(Path(sys.argv[1], model.name))
        losses, reading, weights = [], [], {}
        for step, case in enumerate(legs):
            group = communicator.split(int(communicator.rank >= case.world))
            if communicator.rank < case.world:
                trainer = _trainer(case, group)
                if step:
                    reading.append(_restored(trainer, folder, group))
                losses.append(trainer.train_step().loss)
                _save(trainer, folder, group)
                weights = dict(trainer.full_values()) if step == len(legs) - 1 else {}
            communicator.barrier()
        if communicator.rank == 0:
            checkpoints = [Checkpoint.open(path) for path in index.found_in(folder)]
            found[f"{number}: {' | '.join(case.name for case in legs)}"] = {
                "loss": float(np.max(np.abs(np.array(losses) / baseline.losses - 1))),
                "weights": largest_weight_difference(baseline.weights, weights)[2],
                "damages": [text for checkpoint in checkpoints for text in damages(checkpoint)],
                "most read by a rank, of its share": max(reading),
            }
    return found


def same_plan(communicator: Communicator) -> dict[str, Any]:
    """A run that is stopped after its first step and goes on, beside one that is not: numbers that must be the same."""
    found = {}
    random = Random(5)
    cases = [case for case in CASES if case.world == communicator.size]
    for architecture in sorted({case.model.architecture for case in cases}):
        case = random.choice([case for case in cases if case.model.architecture == architecture])
        folder = Path(sys.argv[1], f"same-plan-{communicator.size}-{architecture}")
        through = _trainer(case, communicator)
        first = through.train_step()
        _save(through, folder, communicator)
        expected = [first, *(through.train_step() for _ in range(STEPS - 1))]
        again = _trainer(case, communicator)
        restore(again, folder, optimizer=True)
        results = [first, *(again.train_step() for _ in range(STEPS - 1))]
        values = np.array([np.array_equal(through.weights.values, again.weights.values)], np.int64)
        found[case.name] = {
            "steps": results == expected,
            "weights": bool(communicator.all_reduce(values, "min")[0]),
            "moments": bool(np.array_equal(through.optimizer.second_moment, again.optimizer.second_moment)),
            "samples": [again.consumed, through.consumed],
        }
    return found


def _trainer(case: Case, communicator: Communicator) -> Trainer:
    return Trainer(prepare(loads(case.yaml(corpora())), communicator.size), communicator)


def _save(trainer: Trainer, folder: Path, communicator: Communicator) -> None:
    index.BLOCK_BYTES = _BLOCK_BYTES
    section = Section(save_path=str(folder), async_save=trainer.step % 2 == 0)
    with Saver(section, communicator, lambda: snapshot(trainer, optimizer=True), step=trainer.step - 1) as saver:
        saver.finish(trainer.step)


def _restored(trainer: Trainer, folder: Path, communicator: Communicator) -> float:
    """Bytes that a rank read at most, of an equal share; all together read each byte once."""
    nbytes = restore(trainer, folder, optimizer=True).nbytes
    every = communicator.all_gather(np.array([nbytes]))
    checkpoint = Checkpoint.open(index.resolve(folder))
    assert every.sum() == sum(tensor.size * tensor.itemsize for tensor in checkpoint.tensors.values())
    return float(every.max() / every.mean())


def _drawn(world: int) -> Iterator[Sequence[Case]]:
    """As many plans as a run has steps, of one model; one of them at least takes all ranks."""
    random = Random(world)
    fitting = [case for case in CASES if case.world <= world and case.model.dtype == "float64"]
    for number in range(RELAYS[world]):
        architecture = ("qwen3", "deepseek_v3", "qwen3_moe")[number % 3]
        plans = Counter(case.model for case in fitting if case.model.architecture == architecture)
        most = [
            case for case in fitting if case.world == world and plans[case.model] >= min(STEPS, max(plans.values()))
        ]
        first = random.choice(most)
        others = [case for case in fitting if case.model == first.model and case != first]
        legs = [first, *random.sample(others, min(STEPS - 1, len(others)))]
        legs += [first] * (STEPS - len(legs))
        random.shuffle(legs)
        yield legs
