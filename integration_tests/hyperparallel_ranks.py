"""What ranks do with the double of HyperParallel: 8 train scenarios, 4 plans that were drawn for four and for two.

    mpiexec -n WORLD python hyperparallel_ranks.py FOLDER [SCENARIO ...]

FOLDER/corpora.json names the corpus of each text, and its folder is the working directory. Rank 0 writes
FOLDER/hyperparallel-N.json: by the name of a plan or of a scenario in docs/, the largest relative differences from one
rank of the native engine in float64, which runs first: HyperParallel's `backward` takes MindSpore over for good.
"""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import mindspore as ms
import numpy as np
from cases import SCENARIO_STEPS, SCENARIOS, STEPS, corpora
from device_mesh import Communicator, abort_on_error, connect
from device_mesh.single import SingleCommunicator
from empty_batch_checks import Masked
from hyperparallel_cases import drawn
from hyperparallel_checks import CHECKS
from hyperparallel_stand_in import install
from launching import Tasks, tasks_of
from parallel_config import TrainConfig, load
from parallel_trainer.engines.hyperparallel.trainer import HyperParallelTrainer
from parallel_trainer.job import prepare
from parallel_trainer.step import StepResult
from parallel_trainer.trace import on_one_rank
from parallel_trainer.trainer import Trainer

LOSSES = ("loss", "mtp_loss", "balance_loss")
_COMPUTED = ("model", "training", "optimizer", "lr_scheduler", "train_dataset", "extensions")
Numbers = dict[str, list[float]]


def numbers(trainer: Any) -> Numbers:
    """Losses and gradient norms of a few steps, by name; learning rates that begin at 0 are seen in the third.

    After the first comes a step without a valid token, which may change nothing in those after it.
    """
    steps = STEPS if trainer.job.schedule(0) else SCENARIO_STEPS
    results: list[StepResult] = [trainer.train_step()]
    _skip(trainer)
    results += [trainer.train_step() for _ in range(steps - 1)]
    names = [*(name for name in LOSSES if getattr(results[0], name) is not None), "grad_norm", "valid_tokens"]
    return {name: [getattr(result, name) for result in results] for name in names}


def _skip(trainer: Any) -> None:
    name = "loader" if isinstance(trainer, Trainer) else "_loader"
    loader = getattr(trainer, name)
    setattr(trainer, name, Masked(loader, trainer.job.plan.global_batch_size, (True, True)))
    result = trainer.train_step()
    assert (result.updated, result.valid_tokens, trainer.skipped, trainer.loads) == (False, 0, 1, None)
    setattr(trainer, name, loader)


def baselines(one_rank: Mapping[str, TrainConfig], communicator: Communicator) -> dict[str, Numbers]:
    """What each of these files trains on one rank; files that are alike share it, and ranks the work."""
    alone = {name: repr(_computed(config)) for name, config in one_rank.items()}
    own = {}
    for number, settings in enumerate(dict.fromkeys(alone.values())):
        if number % communicator.size == communicator.rank:
            name = next(name for name, other in alone.items() if other == settings)
            trainer = Trainer(prepare(one_rank[name], 1, dtype="float64"), SingleCommunicator())
            own[settings] = numbers(trainer)
    found = {settings: of for rank in of_all_ranks(communicator, own) for settings, of in rank.items()}
    return {name: found[settings] for name, settings in alone.items()}


def _alone(files: Mapping[str, TrainConfig], world: int) -> dict[str, TrainConfig]:
    return {name: on_one_rank(config, world) for name, config in files.items()}


def _computed(config: TrainConfig) -> list[Any]:
    return [
        getattr(config, name)
        for name in ("model", "training", "optimizer", "lr_scheduler", "train_dataset", "extensions")
    ]


def differences(alone: Numbers, together: Numbers) -> dict[str, float]:
    """The largest of a few steps, relative to one rank; of a loss without tokens, which is 0, absolute."""
    found = {}
    for name, values in alone.items():
        one, many = np.array(values), np.array(together[name])
        found[name] = float(np.max(np.abs(many - one) / np.where(one, np.abs(one), 1)))
    return found


def of_all_ranks(communicator: Communicator, found: Any) -> list[Any]:
    """What each rank found, by rank."""
    own = np.frombuffer(json.dumps(found).encode(), np.uint8)
    sizes = communicator.all_gather(np.array([len(own)])).tolist()
    text = communicator.all_gather(own, sizes=sizes).tobytes()
    ends = np.cumsum(sizes)
    return [json.loads(text[end - size : end]) for end, size in zip(ends, sizes, strict=True)]


def trained(
    communicator: Communicator, files: Mapping[str, TrainConfig], alone: Mapping[str, Numbers], tasks: Tasks
) -> Any:
    """By name how far each file's training by these ranks is from one rank."""
    forget = install(communicator)
    found = {}
    for name, config in files.items():
        trainer = HyperParallelTrainer(prepare(config, communicator.size, engine="hyperparallel"), communicator)
        found[name] = differences(alone[name], numbers(trainer))
        forget()
        tasks.done(name)
    return found


def checked(communicator: Communicator, tasks: Tasks) -> list[Any]:
    """What each rank found in the double, by rank."""
    forget = install(communicator)
    import_module("hyper_parallel.platform.mindspore.autograd_compat").enable_mindspore_backward_compat()
    found = {}
    for check in CHECKS:
        found[check.__name__] = check(communicator)
        forget()
        tasks.done(check.__name__)
    return of_all_ranks(communicator, found)


def main(folder: Path, scenarios: Sequence[str]) -> None:
    ms.set_device("CPU")
    ms.runtime.launch_blocking()  # handing each operator to another thread takes many times as long as the operator
    communicator = connect()
    warnings.filterwarnings("ignore", "Extensions of this project")
    with abort_on_error(communicator):
        report: dict[str, Any] = {}
        noted, first = tasks_of(folder, communicator.size), communicator.rank == 0
        if communicator.size == 8:
            files = {path.stem: load(path) for path in SCENARIOS if path.stem in scenarios or not scenarios}
            tasks = Tasks(noted, 1 + len(files), writes=first)
            alone = baselines(_alone(files, 8), communicator)
            tasks.done("one rank")
            report["trained"] = trained(communicator, files, alone, tasks)
        else:
            texts, half = corpora(), communicator.split(communicator.rank // 2)
            files = drawn(4, texts)
            of_pairs = list(drawn(2, texts).items())
            own_pairs = dict(of_pairs[communicator.rank // 2 :: 2])
            tasks = Tasks(noted, 1 + len(files) + len(own_pairs) + len(CHECKS), writes=first)
            alone = baselines(_alone(files, 4) | _alone(dict(of_pairs), 2), communicator)
            tasks.done("one rank")
            report["trained"] = trained(communicator, files, alone, tasks)
            own = trained(half, own_pairs, alone, tasks)
            for found in of_all_ranks(communicator, own):
                report["trained"] |= found
            report["checks"] = checked(communicator, tasks)
        if first:
            (folder / f"hyperparallel-{communicator.size}.json").write_text(json.dumps(report), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
