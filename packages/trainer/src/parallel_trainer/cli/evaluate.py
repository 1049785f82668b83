"""`parallel-train evaluate`: the loss of held-out samples with the weights of a checkpoint, without training."""

from __future__ import annotations

import argparse
import os
import time
import warnings
from functools import partial
from typing import TYPE_CHECKING

from device_mesh import Communicator, launched
from parallel_config import load, path_argument

from parallel_trainer.checkpoint.weights_only import load_weights, where_weights_are
from parallel_trainer.cli.ranks import in_launch, world_size_of
from parallel_trainer.engines.choice import add_option, check_native, choose
from parallel_trainer.errors import UserError
from parallel_trainer.job import Job, degrees, prepare
from parallel_trainer.launch.joining import starts_ranks
from parallel_trainer.launch.mpiexec import run_ranks
from parallel_trainer.report.output import check_output
from parallel_trainer.report.record import EvaluationRecord

if TYPE_CHECKING:
    from parallel_trainer.report.files import RunFiles
    from parallel_trainer.trainer import Trainer


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the subcommand."""
    parser = commands.add_parser(
        "evaluate",
        help="measure the loss of eval_dataset with saved weights",
        description="Measure the loss and perplexity of a file's eval_dataset with the weights of a checkpoint, or of "
        "a Hugging Face folder, under the file's plan. Trains no step.",
    )
    parser.add_argument("config", type=path_argument, help="the YAML file, with the model and eval_dataset")
    parser.add_argument(
        "--checkpoint",
        type=path_argument,
        help="a checkpoint, a folder of them, of which the newest is taken, or a Hugging Face folder (default: "
        "checkpoint.load_path of the file, or else the newest in checkpoint.save_path)",
    )
    parser.add_argument("--nproc", type=int, help="ranks to start on this machine (default: 1)")
    parser.add_argument("--output", type=path_argument, help="folder for metrics.jsonl (default: none is written)")
    add_option(parser)
    parser.set_defaults(run=run, device="cpu")


def run(args: argparse.Namespace) -> int:
    """Start the ranks, or be one of them."""
    launch = launched()
    if launch is not None and not starts_ranks(launch, args.nproc):
        return in_launch(launch, args, _arguments(args), partial(_on_rank, args))
    world_size = world_size_of(args)
    with warnings.catch_warnings(action="ignore"):  # rank 0 shows them
        job = _prepared(args, world_size)
        where_weights_are(args.checkpoint, job.config.checkpoint)
    return run_ranks(world_size, ["-m", "parallel_trainer", *_arguments(args)])


def evaluation_record(trainer: Trainer, step: int) -> EvaluationRecord:
    """Evaluate, and write down what was found after which step. Collective over the world."""
    start = time.perf_counter()
    result, held_out = trainer.evaluate(), trainer.job.held_out
    return EvaluationRecord(
        step=step,
        eval_loss=result.loss,
        eval_perplexity=result.perplexity,
        eval_samples=held_out.size if held_out else 0,
        eval_valid_tokens=result.valid_tokens,
        eval_seconds=time.perf_counter() - start,
        eval_mtp_loss=result.mtp_loss,
    )


def _arguments(args: argparse.Namespace) -> list[str]:
    """Those of a rank."""
    options = {"--checkpoint": args.checkpoint, "--output": args.output, "--engine": args.engine}
    given = [part for name, value in options.items() if value is not None for part in (name, str(value))]
    return ["evaluate", str(args.config), *given]


def _prepared(args: argparse.Namespace, world_size: int) -> Job:
    """The file made ready. Raises UserError for one that has nothing to evaluate, or another engine."""
    config = load(args.config)
    choice = choose(args.engine, os.environ, config)
    check_native(choice, "evaluate")
    job = prepare(config, world_size)
    if job.held_out is None:
        raise UserError(
            "The file has no eval_dataset, so there is nothing to evaluate: write, for example, eval_dataset: "
            "{interval: 100, samples: 32}, and hold out text for it by the second number of split."
        )
    if args.output is not None:
        check_output(args.output)
    return job


def _on_rank(args: argparse.Namespace, communicator: Communicator) -> None:
    from parallel_trainer.report.files import RunFiles
    from parallel_trainer.trainer import Trainer

    job = _prepared(args, communicator.size)
    trainer = Trainer(job, communicator)
    loaded = load_weights(trainer, where_weights_are(args.checkpoint, job.config.checkpoint))
    record = evaluation_record(trainer, loaded.step)
    if communicator.rank:
        return
    for note in (*job.notes, *loaded.notes):
        print(f"Note: {note}")
    print(f"weights: {loaded.folder}{f', saved after step {loaded.step}' if loaded.step else ''}")
    print(f"ranks: {communicator.size} = {degrees(job.plan)}")
    print(_line(record), flush=True)
    if args.output is not None:
        _write(RunFiles(args.output), record)


def _line(record: EvaluationRecord) -> str:
    line = (
        f"eval  loss {record.eval_loss:.6f}  perplexity {record.eval_perplexity:.4f}  {record.eval_samples:,} samples  "
        f"{record.eval_valid_tokens:,} tokens  {record.eval_seconds:.3f} s"
    )
    return line if record.eval_mtp_loss is None else f"{line}  mtp {record.eval_mtp_loss:.6f}"


def _write(files: RunFiles, record: EvaluationRecord) -> None:
    files.evaluation(record)
    files.close()
    print(f"Metrics are in {files.folder}")
