"""`parallel-train verify`: show that a plan trains exactly as one rank does."""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import numpy as np
from attrs import frozen
from parallel_config import load

from parallel_trainer.errors import UserError
from parallel_trainer.job import prepare
from parallel_trainer.launch.mpiexec import run_ranks, started_ranks
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
    parser.add_argument("config", type=Path, help="the YAML file")
    parser.add_argument("--nproc", type=int, required=True, help="ranks of the plan")
    parser.add_argument("--steps", type=int, default=3, help="training steps to compare (default: 3)")
    parser.add_argument(
        "--dtype",
        choices=sorted(TOLERANCES),
        default="float64",
        help="type to compute in; in float64, the default, a mistake cannot hide in rounding",
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Trace one rank, trace the plan, compare."""
    if started_ranks() is not None:
        raise UserError("parallel-train verify starts its ranks itself: call it without mpiexec.")
    for name in ("nproc", "steps"):
        if getattr(args, name) < 1:
            raise UserError(f"--{name} {getattr(args, name)} must be at least 1.")
    config = load(args.config)
    job = prepare(config, args.nproc, dtype=args.dtype)
    prepare(on_one_rank(config), 1, dtype=args.dtype)
    if args.steps > config.training.steps:
        raise UserError(f"--steps {args.steps} is more than training.steps {config.training.steps}.")
    with tempfile.TemporaryDirectory() as folder:
        alone = _traced(args, 1, Path(folder, "alone"), "--one-rank")
        together = alone if alone is None else _traced(args, args.nproc, Path(folder, "together"))
    if alone is None or together is None:
        return 1
    plan = job.plan
    title = f"{args.nproc} ranks (dp_replicate {plan.dp_replicate} x dp_shard {plan.dp_shard})"
    return 0 if _compare(alone, together, title, args.dtype) else 1


def _traced(args: argparse.Namespace, world_size: int, folder: Path, *options: str) -> Trace | None:
    """The trace of one launch; None where it failed, having said why."""
    folder.mkdir()
    command = ["-m", "parallel_trainer.trace", str(args.config), str(folder)]
    command += ["--steps", str(args.steps), "--dtype", args.dtype, *options]
    return Trace.load(folder) if run_ranks(world_size, command) == 0 else None


def _compare(alone: Trace, together: Trace, title: str, dtype: str) -> bool:
    """Print both traces side by side and whether they agree."""
    tolerance = TOLERANCES[dtype]
    print(f"One rank against {title}, {dtype}\n")
    print(f"{'step':>4}  {'loss, 1 rank':>19}  {'loss, plan':>19}  {'rel. diff':>9}  ", end="")
    print(f"{'grad norm, 1 rank':>19}  {'grad norm, plan':>19}  {'rel. diff':>9}")
    losses, norms = [], []
    rows = zip(alone.losses, together.losses, alone.grad_norms, together.grad_norms, strict=True)
    for step, (loss, loss_plan, norm, norm_plan) in enumerate(rows, start=1):
        losses.append(_relative(loss, loss_plan))
        norms.append(_relative(norm, norm_plan))
        print(f"{step:4d}  {loss:19.15f}  {loss_plan:19.15f}  {losses[-1]:9.1e}  ", end="")
        print(f"{norm:19.15f}  {norm_plan:19.15f}  {norms[-1]:9.1e}")
    name, difference, relative = largest_weight_difference(alone.weights, together.weights)
    print(f"\nLargest weight difference after step {len(losses)}: {difference:.1e} ({relative:.1e} relative) in {name}")
    judged = [
        ("loss", float(np.max(losses)), tolerance.loss),
        ("grad norm", float(np.max(norms)), tolerance.grad_norm),
        ("weights", relative, tolerance.weights),
    ]
    failed = [
        f"{what} differs by {found:.1e}, more than {allowed:g}"
        for what, found, allowed in judged
        if allowed is not None and not found <= allowed
    ]
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
        if not relative <= worst[2]:
            worst = (name, difference, relative)
    return worst


def _relative(a: float, b: float) -> float:
    return abs(a - b) / abs(a) if a else abs(b)
