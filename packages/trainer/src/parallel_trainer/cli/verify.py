"""`parallel-train verify`: show that a plan trains exactly as one rank does."""

from __future__ import annotations

import argparse
import math
import os
import sys
import tempfile
from pathlib import Path

import numpy as np
from attrs import frozen
from device_mesh import launched
from parallel_config import load, path_argument

from parallel_trainer.engines.choice import check_native, choose
from parallel_trainer.errors import UserError
from parallel_trainer.job import Job, prepare
from parallel_trainer.launch.joining import left_over, starts_ranks
from parallel_trainer.launch.mpiexec import run_ranks
from parallel_trainer.trace import Trace, on_one_rank


@frozen
class Tolerance:
    """Largest relative differences that count as equal; None: shown, not judged."""

    loss: float
    grad_norm: float
    weights: float | None


# In float32 the weights are not judged: where a gradient is near zero AdamW divides it by its own size, and its
# rounding error becomes a step of up to the learning rate.
TOLERANCES = {
    "float64": Tolerance(loss=1e-9, grad_norm=1e-9, weights=1e-9),
    "float32": Tolerance(loss=1e-5, grad_norm=1e-4, weights=None),
}


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the subcommand."""
    parser = commands.add_parser(
        "verify",
        help="compare a file's plan on several ranks with one rank",
        description="Run the same training steps on one rank and on NPROC ranks with the file's plan, print both, and "
        "exit 1 if they differ beyond the tolerance.",
    )
    parser.add_argument("config", type=path_argument, help="the YAML file")
    parser.add_argument("--nproc", type=int, required=True, help="ranks of the plan")
    parser.add_argument("--steps", type=int, help="training steps to compare (default: 3, or all if there are fewer)")
    parser.add_argument(
        "--dtype",
        choices=sorted(TOLERANCES),
        default="float64",
        help="type to compute in; in float64, the default, a mistake cannot hide in rounding",
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Trace one rank, trace the plan, compare."""
    launch = launched()
    if launch is not None and not starts_ranks(launch, args.nproc):
        raise UserError(
            f"parallel-train verify starts its ranks itself: call it without mpiexec or msrun. {left_over(launch)}"
        )
    config = load(args.config)
    check_native(choose(None, os.environ, config), "verify")
    if args.steps is None:
        args.steps = min(3, config.training.steps)
    for name, least in (("nproc", 2), ("steps", 1)):
        if getattr(args, name) < least:
            raise UserError(f"--{name} {getattr(args, name)} must be at least {least} for a comparison with one rank.")
    job = prepare(config, args.nproc, dtype=args.dtype)
    prepare(on_one_rank(config, args.nproc), 1, dtype=args.dtype)
    if args.steps > config.training.steps:
        raise UserError(f"--steps {args.steps} is more than training.steps {config.training.steps}.")
    for note in [*job.notes, *_weights_at_rest(job, args.steps)]:
        print(f"Note: {note}", file=sys.stderr)
    with tempfile.TemporaryDirectory() as folder:
        traces: list[Trace] = []
        for world_size, options in ((1, ["--one-rank-of", str(args.nproc)]), (args.nproc, [])):
            code = _trace(args, world_size, Path(folder, str(len(traces))), *options)
            if code:
                return code
            traces.append(Trace.load(Path(folder, str(len(traces)))))
    alone, together = traces
    return 0 if _compare(alone, together, args.dtype) else 1


def _weights_at_rest(job: Job, steps: int) -> list[str]:
    """A note where no step compared has a learning rate: equal weights then show nothing."""
    if any(job.schedule(update) for update in range(steps)):
        return []
    total = job.config.training.steps
    moving = next((update + 1 for update in range(steps, total) if job.schedule(update)), None)
    instead = f"--steps {moving} compares an update too" if moving else "lr_scheduler decides when it rises"
    return [f"The learning rate is 0 in every step compared, {steps} of {total}, so no weight is trained: {instead}."]


def _trace(args: argparse.Namespace, world_size: int, folder: Path, *options: str) -> int:
    """Leave the trace of one launch in a new folder; the launch's exit code, not 0 where it failed and said why."""
    folder.mkdir()
    command = ["-m", "parallel_trainer.trace", str(args.config), str(folder)]
    command += ["--steps", str(args.steps), "--dtype", args.dtype, *options]
    return run_ranks(world_size, command)


def _compare(alone: Trace, together: Trace, dtype: str) -> bool:
    """Print both traces side by side and whether they agree."""
    tolerance = TOLERANCES[dtype]
    print(f"{alone.plan} against {together.plan}, {dtype}\n")
    print(f"{'step':>4}  {'loss, 1 rank':>19}  {'loss, plan':>19}  {'rel. diff':>9}  ", end="")
    print(f"{'grad norm, 1 rank':>19}  {'grad norm, plan':>19}  {'rel. diff':>9}")
    losses, norms = [], []
    rows = zip(alone.losses, together.losses, alone.grad_norms, together.grad_norms, strict=True)
    for step, (loss, loss_plan, norm, norm_plan) in enumerate(rows, start=1):
        losses.append(_relative(loss, loss_plan))
        norms.append(_relative(norm, norm_plan))
        print(f"{step:4d}  {loss:19.15f}  {loss_plan:19.15f}  {losses[-1]:9.1e}  ", end="")
        print(f"{norm:19.15f}  {norm_plan:19.15f}  {norms[-1]:9.1e}")
    for name, values in alone.other_losses.items():
        found = [_relative(one, plan) for one, plan in zip(values, together.other_losses[name], strict=True)]
        losses += found
        print(f"\n{name} of each step, 1 rank: {', '.join(f'{value:.12f}' for value in values)}")
        print(f"largest relative difference of the plan: {max(found):.1e}")
    elsewhere = int(np.abs(alone.tokens_per_expert - together.tokens_per_expert).sum()) // 2
    if alone.tokens_per_expert.size:
        routed = int(alone.tokens_per_expert.sum())
        print(f"\nOf {routed} choices of experts, the plan made {elsewhere} differently, counted by layer and expert")
    name, difference, relative = largest_weight_difference(alone.weights, together.weights)
    print(f"\nLargest weight difference after step {len(norms)}: {difference:.1e} ({relative:.1e} relative) in {name}")
    judged = [
        ("loss", float(np.max(losses)), tolerance.loss),
        ("grad norm", float(np.max(norms)), tolerance.grad_norm),
        ("weights", relative, tolerance.weights),
    ]
    failed = [
        f"{what} by {found:.1e}, more than {allowed:g}"
        for what, found, allowed in judged
        if allowed is not None and not found <= allowed
    ]
    failed += [f"loads of experts by {elsewhere} choices"] if elsewhere else []
    limits = ", ".join(f"{what} {allowed:g}" for what, _, allowed in judged if allowed is not None)
    print(f"DIFFERENT: {'; '.join(failed)}" if failed else f"Equal within {limits}")
    return not failed


def largest_weight_difference(
    alone: dict[str, np.ndarray], together: dict[str, np.ndarray]
) -> tuple[str, float, float]:
    """Name of the weight that differs most, its largest difference, and that relative to its largest element."""
    worst = ("no weight", 0.0, 0.0)
    for name, values in alone.items():
        difference = float(np.abs(values - together[name]).max(initial=0.0))
        largest = float(np.abs(values).max(initial=0.0))
        relative = difference / largest if largest else difference
        if math.isnan(relative):
            return name, difference, relative
        if relative > worst[2]:
            worst = (name, difference, relative)
    return worst


def _relative(a: float, b: float) -> float:
    if math.isnan(a) and math.isnan(b):  # both skipped the step
        return 0.0
    return abs(a - b) / abs(a) if a else abs(b)
