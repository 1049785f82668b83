"""`parallel-train checkpoint`: look at checkpoints, check them, and rewrite them."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

from parallel_config import load, path_argument, plan

from parallel_trainer.checkpoint.check import damages
from parallel_trainer.checkpoint.index import FIRST_MOMENT, SECOND_MOMENT, Checkpoint, resolve
from parallel_trainer.cli import checkpoint_hf
from parallel_trainer.errors import UserError
from parallel_trainer.job import degrees

_PATH = "a checkpoint, or a folder of checkpoints, of which the newest is taken"


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the subcommand."""
    parser = commands.add_parser(
        "checkpoint",
        help="show, verify or rewrite a checkpoint",
        description="Look at a checkpoint that a run saved, verify it, or rewrite it for another plan.",
    )
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    show = actions.add_parser("show", help="what is in it, and where the run stood")
    show.add_argument("checkpoint", type=path_argument, help=_PATH)
    show.set_defaults(run=_show)
    verify = actions.add_parser(
        "verify",
        help="read all of it and compare checksums",
        description="Read all of a checkpoint: every block must have the checksum it was written with, and the files "
        "must hold every element of every tensor exactly once. Exit 1 if not.",
    )
    verify.add_argument("checkpoint", type=path_argument, help=_PATH)
    verify.set_defaults(run=_verify)
    reshard = actions.add_parser(
        "reshard",
        help="rewrite it as another plan would have written it",
        description="Rewrite a checkpoint for the plan of a file on a number of ranks. Training does not need this: it "
        "loads any checkpoint under any plan. Memory holds some blocks of 1 MiB at a time.",
    )
    reshard.add_argument("checkpoint", type=path_argument, help=_PATH)
    reshard.add_argument("destination", type=path_argument, help="the new checkpoint, a folder that does not exist yet")
    reshard.add_argument(
        "--config", type=path_argument, required=True, help="the YAML file with the plan and the same model"
    )
    reshard.add_argument("--world-size", type=int, required=True, help="ranks of the plan")
    reshard.set_defaults(run=_reshard)
    checkpoint_hf.add_actions(actions, path=_PATH)


def _show(args: argparse.Namespace) -> int:
    print("\n".join(_lines(Checkpoint.open(resolve(args.checkpoint)))))
    return 0


def _lines(checkpoint: Checkpoint) -> Iterator[str]:
    state = checkpoint.state
    yield f"{checkpoint.folder}"
    yield f"after step {state.step}: {state.consumed_samples:,} samples read, global batch {state.global_batch_size}"
    yield f"written by {checkpoint.world_size} ranks ({checkpoint.plan})"
    yield "with " + ", ".join(f"{name} {number}" for name, number in checkpoint.versions.items())
    yield ""
    yield f"{'weight':56}  {'shape':>20}  {'type':>4}  {'files':>5}  {'bytes':>16}  moments"
    total = 0
    for name, tensor in checkpoint.weights.items():
        moments = [prefix for prefix in (FIRST_MOMENT, SECOND_MOMENT) if f"{prefix}{name}" in checkpoint.tensors]
        shape = " x ".join(map(str, tensor.shape)) or "1 number"
        nbytes = tensor.size * tensor.itemsize
        total += nbytes
        yield f"{name:56}  {shape:>20}  {tensor.dtype:>4}  {len(tensor.pieces):5}  {nbytes:16,}  {len(moments) or '-'}"
    yield f"{'total of weights':56}  {'':20}  {'':4}  {'':5}  {total:16,}"
    yield f"{'all files':56}  {'':20}  {'':4}  {len(checkpoint.files):5}  {sum(checkpoint.files.values()):16,}"


def _verify(args: argparse.Namespace) -> int:
    checkpoint = Checkpoint.open(resolve(args.checkpoint))
    found = list(damages(checkpoint))
    for text in found:
        print(text)
    if found:
        print(f"DAMAGED: {checkpoint.folder}, {len(found)} fault{'s' * (len(found) > 1)}")
        return 1
    elements = sum(tensor.size for tensor in checkpoint.tensors.values())
    print(
        f"{checkpoint.folder} is whole: {len(checkpoint.tensors)} tensors with {elements:,} elements, each exactly "
        f"once; {sum(checkpoint.files.values()):,} bytes in {len(checkpoint.files)} files have their checksums"
    )
    return 0


def _reshard(args: argparse.Namespace) -> int:
    if args.world_size < 1:
        raise UserError(f"--world-size {args.world_size} must be at least 1.")
    config = load(args.config)
    of_ranks = plan(config, args.world_size)
    checkpoint = Checkpoint.open(resolve(args.checkpoint))
    from parallel_trainer.checkpoint.reshard import reshard
    from parallel_trainer.kernels import kernels
    from parallel_trainer.models import build_model  # needs MindSpore
    from parallel_trainer.parallel.pipeline import model_layout

    layout = model_layout(build_model(config.model, kernels("cpu")), of_ranks)
    new = reshard(checkpoint, args.destination, layout, plan=degrees(of_ranks), config=config.source.text)
    size = f"{sum(new.files.values()):,} bytes in {len(new.files)} files"
    print(f"{new.folder}: {new.world_size} ranks ({new.plan}), {size}")
    return 0
