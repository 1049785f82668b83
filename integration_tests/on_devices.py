"""Plans on ranks of msrun, which compute on NPUs or on CPUs, against one rank on the CPU in float32.

    python on_devices.py --device {cpu,ascend} --world-size N [--engine ENGINE] [--dtype DTYPE]
                         [--cases REGEX] [--scenarios]

Trains one plan of the parity matrix for every kind of plan that N ranks can have, or all whose name has REGEX in it;
with --scenarios also the specification's, complete files for eight ranks. With --engine hyperparallel, those that this
engine takes, against one rank of the native one. Every plan is a launch of its own, by the reference's start-up line.
Prints the largest relative differences of each; exit code 1 where one is too large or a launch fails. Nothing has run
on ascend yet.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import chdir
from pathlib import Path
from random import Random

from attrs import evolve
from cases import CASES, SCENARIO_STEPS, SCENARIOS, WORLDS, Case
from corpora import write_corpora
from device_mesh import connect
from msrun import MODULE, msrun
from parallel_config import load, loads
from parallel_trainer.cli.verify import TOLERANCES, Tolerance
from parallel_trainer.errors import UserError
from parallel_trainer.job import prepare
from parallel_trainer.trace import on_one_rank

TARGETS = {"cpu": "CPU", "ascend": "Ascend"}
ALLOWED = {"cpu": TOLERANCES["float32"], "ascend": Tolerance(loss=2e-3, grad_norm=2e-2, weights=None)}
"""Largest relative differences by device. On NPUs attention rounds to bfloat16, which alone may need half of this room
(`test_on_devices.py`)."""
ROUNDED = Tolerance(loss=1e-2, grad_norm=1e-1, weights=None)
"""The same where ranks compute in bfloat16; `test_bfloat16.py` has limits for operators that round so on CPUs."""

LOSSES = ("loss", "mtp_loss", "balance_loss")
LAUNCH_SECONDS = 900.0
ROUNDS_ON_NPUS = "--dtype bfloat16 is for NPUs: a CPU computes it in float32. Use --device ascend, or --dtype float32."
ON_NPUS = "--engine hyperparallel trains on NPUs alone. Use --device ascend, or --engine native."

Steps = Sequence[Mapping[str, float | None]]
"""By step the numbers of `StepRecord` by name; None where one is not finite or the model has none."""


class LaunchFailed(Exception):
    """The ranks did not come to the end of the run."""


def drawn(
    world: int,
    pattern: str | None,
    wanted: Callable[[Case], bool] = lambda case: True,
    dtype: str = "float32",
) -> list[Case]:
    """Plans for `world` ranks in `dtype`: those with `pattern` in their name; without one, one plan of each kind."""
    narrow = (evolve(case, model=evolve(case.model, dtype=dtype)) for case in CASES if case.world == world)
    cases = list(dict.fromkeys(narrow))
    if pattern is not None:
        return [case for case in cases if re.search(pattern, case.name) and wanted(case)]
    kinds = {case.dimensions: case for case in Random(world).sample(cases, len(cases)) if wanted(case)}
    return list(kinds.values())


def files(
    world: int,
    pattern: str | None,
    scenarios: bool,
    texts: Mapping[str, str],
    engine: str = "native",
    dtype: str = "float32",
) -> dict[str, str]:
    """What the YAML files of the plans say that the engine takes, by name of the plan."""
    found = {
        case.name: case.yaml(texts)
        for case in drawn(world, pattern, lambda case: takes(engine, case.yaml(texts), world), dtype)
    }
    for path in (path for path in SCENARIOS if scenarios and re.search(pattern or "", path.stem)):
        text, count = re.subn(r"(?m)^  steps: \d+$", f"  steps: {SCENARIO_STEPS}", path.read_text(encoding="utf-8"))
        assert count == 1, f"{path} must have one line for training.steps"
        text, count = re.subn(r"(?m)^  compute_dtype: float32$", f"  compute_dtype: {dtype}", text)
        assert count == 1, f"{path} must have one line for model.compute_dtype"
        if takes(engine, text, world):
            found[path.stem] = text
    return found


def takes(engine: str, text: str, world: int) -> bool:
    """Whether an engine trains what a file says."""
    if engine == "native":
        return True
    from parallel_trainer.engines.hyperparallel.program import check_run

    with warnings.catch_warnings(action="ignore"):
        config = loads(text)
    try:
        check_run(config, world)
    except UserError:
        return False
    return True


def alone(file: Path, world: int) -> Steps:
    """The steps on one rank of a file for `world` ranks, on the CPU, in this process."""
    from parallel_trainer.trainer import Trainer

    with warnings.catch_warnings(action="ignore"):
        trainer = Trainer(prepare(on_one_rank(load(file), world), 1, dtype="float32"), connect("single"))
    results = [trainer.train_step() for _ in range(trainer.job.config.training.steps)]
    return [{name: getattr(result, name) for name in (*LOSSES, "grad_norm")} for result in results]


def together(file: Path, world: int, device: str, engine: str) -> Steps:
    """The steps of a file as its run on `world` ranks of msrun wrote them down. Raises LaunchFailed."""
    output = file.parent / f"{file.stem}-runs"
    program = [*MODULE, "--config", str(file), "--mode", "1", "--device_target", TARGETS[device], "--engine", engine]
    try:
        done = msrun(file.parent, world, *program, "--output_dir", str(output), seconds=LAUNCH_SECONDS)
    except subprocess.TimeoutExpired:
        raise LaunchFailed(f"msrun did not end within {LAUNCH_SECONDS:g} s and was ended") from None
    if done.returncode:
        raise LaunchFailed(f"msrun ended with {done.returncode}:\n{done.stdout}\n{done.stderr}")
    (run,) = output.iterdir()
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]


def difference(one: Steps, many: Steps, names: Sequence[str]) -> float:
    """Largest relative difference of `many` from `one` in these numbers; NaN where one has a number of the other's not.

    Raises ValueError for different numbers of steps.
    """
    found = [
        _relative(step.get(name), other.get(name)) for step, other in zip(one, many, strict=True) for name in names
    ]
    return math.nan if any(map(math.isnan, found)) else max(found)


def _relative(value: float | None, other: float | None) -> float:
    if value is None and other is None:
        return 0.0
    if value is None or other is None:
        return math.nan
    return abs(other - value) / abs(value) if value else abs(other)


def compare(name: str, file: Path, world: int, device: str, engine: str, allowed: Tolerance) -> bool:
    """Train a file both ways, print a line of the table, and return whether the two are equal within the tolerance."""
    try:
        one, many = alone(file, world), together(file, world, device, engine)
        loss, grad_norm = difference(one, many, LOSSES), difference(one, many, ("grad_norm",))
    except (LaunchFailed, UserError) as error:
        print(f"{'':9}  {'':9}  FAILED     {name}\n{error}", flush=True)
        return False
    equal = loss <= allowed.loss and grad_norm <= allowed.grad_norm
    print(f"{loss:9.1e}  {grad_norm:9.1e}  {'equal' if equal else 'DIFFERENT':9}  {name}", flush=True)
    return equal


def main(argv: Sequence[str] | None = None) -> int:
    """Compare the chosen plans and return the exit code."""
    args = _parse(argv)
    if args.engine == "hyperparallel" and args.device != "ascend":
        print(ON_NPUS, file=sys.stderr)
        return 2
    if args.dtype == "bfloat16" and args.device != "ascend":
        print(ROUNDS_ON_NPUS, file=sys.stderr)
        return 2
    allowed = ROUNDED if args.dtype == "bfloat16" else ALLOWED[args.device]
    with tempfile.TemporaryDirectory() as temporary, chdir(temporary):  # the scenarios' corpus is in ./output
        folder = Path(temporary)
        plans = files(args.world_size, args.cases, args.scenarios, write_corpora(folder), args.engine, args.dtype)
        print(
            f"{len(plans)} plans on {args.world_size} ranks of msrun, {args.device}, engine {args.engine}, in "
            f"{args.dtype}, against one rank on the CPU in float32: all steps.\n"
            f"Largest relative differences; equal: losses within {allowed.loss:g}, gradient norms within "
            f"{allowed.grad_norm:g}.\n\n"
            f"{'loss':>9}  {'grad norm':>9}  {'':9}  plan",
            flush=True,
        )
        equal = []
        for number, (name, text) in enumerate(plans.items()):
            file = folder / f"plan-{number}.yaml"
            file.write_text(text, encoding="utf-8")
            equal.append(compare(name, file, args.world_size, args.device, args.engine, allowed))
    print(f"\n{sum(equal)} of {len(equal)} plans are equal to one rank.")
    return 0 if equal and all(equal) else 1


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="on_devices.py", description="Plans under msrun against one rank on the CPU.")
    parser.add_argument("--device", choices=tuple(TARGETS), required=True, help="what the ranks of msrun compute on")
    parser.add_argument("--world-size", type=int, choices=WORLDS, required=True, help="ranks of msrun")
    parser.add_argument("--cases", metavar="REGEX", help="train the plans with this in their name (default: a draw)")
    parser.add_argument("--scenarios", action="store_true", help="also the specification's scenarios, on 8 ranks")
    parser.add_argument("--engine", choices=("native", "hyperparallel"), default="native", help="what trains")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="what ranks compute in")
    args = parser.parse_args(argv)
    if args.scenarios and args.world_size != 8:
        parser.error(f"--scenarios: the files are for 8 ranks, not --world-size {args.world_size}.")
    return args


if __name__ == "__main__":
    os.environ.setdefault("GLOG_v", "3")  # MindSpore says errors alone, as in the ranks
    sys.exit(main())
