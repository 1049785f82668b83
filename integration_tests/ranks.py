"""What the ranks of one world size do: every case of that world, one after the other, in one launch.

    mpiexec -n WORLD python ranks.py FOLDER

FOLDER/corpora.json names the corpus of each text. Rank 0 writes FOLDER/world-N.json: by case name, and by name of the
specification's scenarios in docs/, the largest relative differences from the run on one rank, and by check name what
the checks of `checks.py` found. World 1 runs first and leaves the baselines in FOLDER, which must be the working
directory: the scenarios read their corpus from output/.
"""

from __future__ import annotations

import json
import sys
import warnings
from collections import Counter
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
from attrs import asdict
from cases import BASELINES, CASES, SCENARIO_STEPS, SCENARIOS, STEPS, Case, corpora
from checks import CHECKS
from device_mesh import Communicator, Traffic, abort_on_error, connect
from device_mesh.debug import CheckedCommunicator
from launching import Tasks, tasks_of
from parallel_config import load, loads
from parallel_trainer.cli.verify import largest_weight_difference
from parallel_trainer.estimate import Estimate
from parallel_trainer.job import prepare
from parallel_trainer.step import StepResult
from parallel_trainer.trace import Trace, on_one_rank
from parallel_trainer.trainer import Trainer


def trace(case: Case, texts: Mapping[str, str], communicator: Communicator) -> tuple[Trace, dict[str, Any]]:
    """Train a case; also what is found on the way, the same on all ranks.

    uneven: whether the ranks ever had different numbers of valid tokens in a step.
    costs:  what a rank received in the first step and holds is what was planned, on all of them; if not, both as this
        rank has them. Tokens on their way to experts are left out: how many there are depends on the data.
    """
    traffic, first_step = Traffic(), Counter[str]()
    trainer = Trainer(prepare(loads(case.yaml(texts)), communicator.size), communicator, traffic=traffic)
    step = trainer.train_step
    traffic.calls.clear()

    def counted_step() -> StepResult:
        result = step()
        if trainer.step == 1:
            first_step.update(traffic.received_bytes())
        return result

    trainer.train_step = counted_step  # type: ignore[method-assign]
    trained = Trace.record(trainer, STEPS)
    estimate = Estimate.of(trainer.job, communicator.rank)
    measured = {"parameters": trainer.weights.values.size, **_without_experts(first_step)}
    planned = {"parameters": sum(estimate.parameters().values()), **_without_experts(estimate.communication())}
    same = communicator.all_reduce(np.array([measured == planned]).astype(np.int64), "min")[0]
    size = trainer.job.plan.global_batch_size
    own = [sum(batch.valid_tokens() for batch in trainer.micro_batches(step * size)) for step in range(STEPS)]
    lowest, highest = (communicator.all_reduce(np.array(own), op) for op in ("min", "max"))
    return trained, {
        "uneven": bool((lowest < highest).any()),
        "costs": "planned" if same else {"measured": measured, "planned": planned},
    }


def _without_experts(received: Mapping[str, int]) -> dict[str, int]:
    return {axis: count for axis, count in received.items() if count and axis.partition(" ")[0] != "ep"}


def differences(alone: Trace, together: Trace) -> dict[str, float]:
    """Largest relative differences over all steps and all weights."""
    found = {}
    for name in ("losses", "grad_norms"):
        one, many = np.array(getattr(alone, name)), np.array(getattr(together, name))
        found[name] = float(np.max(np.abs(many - one) / np.abs(one)))
    for name, values in alone.other_losses.items():
        one, many = np.array(values), np.array(together.other_losses[name])
        found["losses"] = max(found["losses"], float(np.max(np.abs(many - one) / np.maximum(np.abs(one), 1e-300))))
    found["loads"] = float(np.abs(alone.tokens_per_expert - together.tokens_per_expert).max(initial=0))
    found["weights"] = largest_weight_difference(alone.weights, together.weights)[2]
    return found


def scenarios(folder: Path, communicator: Communicator, tasks: Tasks) -> dict[str, dict[str, float]]:
    """Train each scenario in float64: leave its baseline if this is one rank, else compare with that."""
    found = {}
    for path in SCENARIOS:
        config = load(path)
        alone = on_one_rank(config, 8)
        settings = asdict(alone, filter=lambda attribute, _: attribute.name != "source")
        baseline = folder / f"scenario-{sha256(repr(settings).encode()).hexdigest()}"
        if communicator.size > 1:
            together = Trace.record(Trainer(prepare(config, 8, dtype="float64"), communicator), SCENARIO_STEPS)
            found[path.stem] = differences(Trace.load(baseline), together)
        elif not baseline.exists():  # several differ in parallelism alone
            baseline.mkdir()
            Trace.record(Trainer(prepare(alone, 1, dtype="float64"), communicator), SCENARIO_STEPS).save(baseline)
        tasks.done(path.stem)
    return found


CHECKED_EVERY = {1: 1, 2: 1, 4: 4, 8: 8}
"""By world size, of how many plans one is trained by ranks that compare every call: where they share two cores, that
takes twice as long."""

CALL_SECONDS = 300.0


def main(folder: Path) -> None:
    texts = corpora()
    communicator = connect()
    warnings.filterwarnings("ignore", "Extensions of this project")
    with abort_on_error(communicator):
        first, world = communicator.rank == 0, communicator.size
        cases = [case for case in CASES if case.world == world]
        to_check = [check for check in CHECKS if world in CHECKS[check]]
        compared = SCENARIOS if world in (1, 8) else []
        baselines = BASELINES if world == 1 else ()
        total = len(baselines) + len(cases) + len(compared) + len(to_check)
        tasks = Tasks(tasks_of(folder, world), total, writes=first)
        for model in baselines:
            (folder / model.name).mkdir()
            trace(Case(model=model), texts, communicator)[0].save(folder / model.name)
            tasks.done(f"baseline {model.name}")
        found: dict[str, dict[str, Any]] = {}
        checked = CheckedCommunicator.over(communicator, CALL_SECONDS)
        for number, case in enumerate(cases):
            compares_calls = number % CHECKED_EVERY[world] == 0
            together, others = trace(case, texts, checked if compares_calls else communicator)
            if first:
                alone = Trace.load(folder / case.model.name)
                found[case.name] = differences(alone, together) | others
            tasks.done(case.name)
        trained = scenarios(folder, communicator, tasks) if compared else {}
        checks = {}
        for check in to_check:
            checks[check.__name__] = check(communicator)
            tasks.done(check.__name__)
        if first:
            report = {"cases": found, "checks": checks, "scenarios": trained}
            (folder / f"world-{communicator.size}.json").write_text(json.dumps(report), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
