"""`parallel-train plan`: what a file's plan means, before anything is trained."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator, Mapping, Sequence

from parallel_config import TrainConfig, load, path_argument
from parallel_config import plan as plan_of

from parallel_trainer.balance import ORDERS, attention_work
from parallel_trainer.engines.choice import add_option, choose
from parallel_trainer.errors import UserError
from parallel_trainer.job import Job, decay_rules, degrees, prepare
from parallel_trainer.models.config import model_config


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the subcommand."""
    parser = commands.add_parser(
        "plan",
        help="show what a file's plan means for a number of ranks",
        description="Check a YAML file and its data for a number of ranks, and show the plan: what a rank holds and "
        "what it receives in a step; with context parallelism, how evenly the ranks share the work of attention in the "
        "first steps. With --engine hyperparallel, the calls of that library instead. Starts no ranks.",
    )
    parser.add_argument("config", type=path_argument, help="the YAML file")
    parser.add_argument("--world-size", type=int, required=True, help="ranks to plan for")
    parser.add_argument("--steps", type=int, default=4, help="training steps whose samples are looked at (default: 4)")
    parser.add_argument(
        "--rank", type=int, help="the rank to show (default: one that needs the most memory, and why it does)"
    )
    add_option(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the plan."""
    if args.steps < 1:
        raise UserError(f"--steps {args.steps} must be at least 1.")
    config = load(args.config)
    if choose(args.engine, os.environ, config).engine == "hyperparallel":
        print("\n".join(_calls(config, args.world_size, args.rank)))
        return 0
    job = prepare(config, args.world_size)
    _check_rank(args.rank, args.world_size)
    for note in job.notes:
        print(f"Note: {note}", file=sys.stderr)
    print(job.summary)
    print("\n".join(["", *_costs(job, args.rank)]))
    if job.plan.cp > 1:
        print("\n".join(["", *_attention(job, min(args.steps, job.config.training.steps))]))
    return 0


def _check_rank(rank: int | None, world_size: int) -> None:
    if rank is not None and not 0 <= rank < world_size:
        raise UserError(f"--rank {rank} must be 0 … {world_size - 1}, a rank of the world.")


def _calls(config: TrainConfig, world_size: int, rank: int | None) -> Iterator[str]:
    """What HyperParallel would be called with on a rank, and which other ranks call the same."""
    from parallel_trainer.engines.hyperparallel.program import program  # builds the model, which needs MindSpore
    from parallel_trainer.engines.hyperparallel.render import lines

    plan = plan_of(config, world_size)
    _check_rank(rank, world_size)
    made, alike = program(config, world_size, rank or 0), world_size // plan.pp
    notes = decay_rules(config, model_config(config.model), "cpu")
    first = (rank or 0) // alike * alike
    yield f"# ranks: {world_size} = {degrees(plan)}"
    if plan.pp == 1:
        yield f"# All {world_size} ranks call HyperParallel 1.0 like this."
    else:
        others = ", ".join(str(each) for each in range(0, world_size, alike) if each != first)
        these = f"Ranks {first}-{first + alike - 1} call" if alike > 1 else f"Rank {first} calls"
        yield f"# {these} HyperParallel 1.0 like this; others: --rank {others}."
    yield from (f"# {note}" for note in notes)
    yield from lines(made)


def _costs(job: Job, rank: int | None) -> Iterator[str]:
    """Tables of what a rank holds and receives; without one, of a rank that needs the most memory."""
    from parallel_trainer.estimate import Estimate  # builds the model, which needs MindSpore

    if rank is None:
        estimate = Estimate.largest(job)
        rank = estimate.rank
        why = _why_most(job, tuple(estimate.costs), estimate.losses)
        yield f"Rank {rank} needs the most memory: {why}. --rank shows another."
    else:
        estimate = Estimate.of(job, rank)
    yield from _table(f"Parameters of rank {rank}, of {estimate.model_size:,} in all", estimate.parameters())
    even = "; activations for even routing" if job.plan.ep > 1 else ""
    yield from _table(f"Memory of rank {rank}, bytes, each when it is most{even}", estimate.memory())
    yield from _table(f"Received by rank {rank} in a step, bytes by mesh axis", estimate.communication())


def _why_most(job: Job, stages: Sequence[int], losses: int) -> str:
    """What a rank with these virtual stages of a model with so many losses has that others have not."""
    plan = job.plan
    if plan.pp == 1:
        return "ranks are alike, or the first has the larger parts of what does not divide"
    ranges = (plan.stage_layers[stage] for stage in stages)
    layers = [f"{first}-{last}" if first < last else f"{first}" for first, last in ranges]
    has = [f"layers {', '.join(layers)}"]
    has += ["the embedding"] if 0 in stages else []
    if len(plan.stage_layers) - 1 in stages:
        has += ["the further prediction"] if losses > 1 else []
        has += ["the output layer"]
    return f"its stage of the pipeline, {stages[0] + 1} of {plan.pp}, has {', '.join(has)}"


def _table(title: str, numbers: Mapping[str, int]) -> Iterator[str]:
    yield title
    for name, number in (*numbers.items(), ("total", sum(numbers.values()))):
        yield f"  {name:34}{number:18,}"


def _attention(job: Job, steps: int) -> Iterator[str]:
    """A line for each step's attention."""
    chosen = job.plan.context_parallel_order
    yield "Attention: pairs of a query and a key that it sees, their share of plain causal attention, and the work of"
    yield f"the slowest context-parallel rank over the mean, by context_parallel_order (this file: {chosen})"
    yield f"{'step':>6}  {'pairs':>15}  {'share':>6}  " + "  ".join(f"{order:>10}" for order in ORDERS)
    for step in range(steps):
        work = attention_work(job, step)
        ratios = [work.slowest_to_mean.get(order) for order in ORDERS]
        shown = "  ".join("         -" if ratio is None else f"{ratio:10.2f}" for ratio in ratios)
        yield f"{step + 1:6d}  {work.pairs:15,}  {work.pairs / work.causal_pairs:6.1%}  {shown}"
