"""`parallel-train run`: train what a file says."""

from __future__ import annotations

import argparse
import os
import time
import warnings
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from device_mesh import Communicator, launched
from parallel_config import load, path_argument

from parallel_trainer.checkpoint.agree import all_or_none, gather
from parallel_trainer.checkpoint.resume import begins_from_nothing, check_loadable, finished, restore, snapshot
from parallel_trainer.checkpoint.save import Saver, saves
from parallel_trainer.cli.evaluate import evaluation_record
from parallel_trainer.cli.ranks import HOW_ON_ASCEND, in_launch, world_size_of
from parallel_trainer.engines.choice import add_option, check_trains, choose
from parallel_trainer.errors import UserError
from parallel_trainer.job import Job, prepare
from parallel_trainer.launch.joining import starts_ranks
from parallel_trainer.launch.mpiexec import run_ranks
from parallel_trainer.launch.stopping import StopRequest
from parallel_trainer.report.console import TERMINAL_VARIABLE, Console, watched
from parallel_trainer.report.lines import METRICS, last_step
from parallel_trainer.report.output import check_output
from parallel_trainer.report.record import StepRecord

if TYPE_CHECKING:
    from parallel_trainer.engines.interface import EngineTrainer
    from parallel_trainer.report.experts import ExpertFiles
    from parallel_trainer.report.files import RunFiles
    from parallel_trainer.trainer import Trainer


_COMPLETE = "{folder} is of the last of {steps} steps: this run is complete, and nothing is left to train."


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the subcommand."""
    parser = commands.add_parser(
        "run",
        help="train the model of a YAML file",
        description="Train the model of a YAML file: on ranks started here, or on those mpiexec started it in. "
        "MindSpore's msrun takes: python -m parallel_trainer.run_mindformer --config FILE --mode 1.",
    )
    parser.add_argument("config", type=path_argument, help="the YAML file")
    parser.add_argument("--nproc", type=int, help="ranks to start on this machine (default: 1)")
    parser.add_argument(
        "--device",
        choices=("cpu", "ascend"),
        default="cpu",
        help="what ranks compute on; nothing has run on ascend yet",
    )
    parser.add_argument(
        "--output",
        type=path_argument,
        help="folder for metrics and plots (default: output/NAME OF THE FILE, date and time)",
    )
    add_option(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Start the ranks, or be one of them."""
    launch = launched()
    output = args.output or Path("output") / f"{args.config.stem}-{time.strftime('%Y%m%d-%H%M%S')}"
    if launch is not None and not starts_ranks(launch, args.nproc):
        return in_launch(launch, args, _arguments(args, output, args.engine), partial(_on_rank, args, output))
    if args.device == "ascend":
        raise UserError(f"--device ascend: {HOW_ON_ASCEND}")
    world_size = world_size_of(args)
    with warnings.catch_warnings(action="ignore"):  # rank 0 shows them
        config = load(args.config)
        check_output(output, config.checkpoint)
        choice = choose(args.engine, os.environ, config)
        check_trains(choice, args.device)
        job = prepare(config, world_size)  # whatever is wrong is said here, before any rank starts
        if (last := finished(job)) is not None:
            print(_COMPLETE.format(folder=last, steps=config.training.steps))
            return 0
        check_loadable(job)
    if watched():
        os.environ[TERMINAL_VARIABLE] = "1"
    code = run_ranks(
        world_size,
        ["-m", "parallel_trainer", *_arguments(args, output, choice.engine)],
        stop_on_sigterm=saves(config.checkpoint),
    )
    if code and (output / METRICS).exists():
        from parallel_trainer.report.files import draw_curve_of

        draw_curve_of(output)  # the ranks were in no state to
    return code


def _arguments(args: argparse.Namespace, output: Path, engine: str | None) -> list[str]:
    """Those of a rank."""
    chosen = ["--engine", engine] if engine else []
    return ["run", str(args.config), "--output", str(output), "--device", args.device, *chosen]


def _on_rank(args: argparse.Namespace, output: Path, communicator: Communicator) -> None:
    config = load(args.config)
    choice = choose(args.engine, os.environ, config)
    check_trains(choice, args.device)
    job = prepare(config, communicator.size, device=args.device, engine=choice.engine)
    last = all_or_none(communicator, lambda: str(finished(job) or "") if communicator.rank == 0 else "")
    if last := gather(communicator, last)[0]:
        if communicator.rank == 0:
            print(_COMPLETE.format(folder=last, steps=config.training.steps))
        return
    _train(job, communicator, output, choice.engine)


def _trainer(job: Job, communicator: Communicator, engine: str) -> EngineTrainer:
    if engine == "hyperparallel":
        from parallel_trainer.engines.hyperparallel.trainer import HyperParallelTrainer

        return HyperParallelTrainer(job, communicator)
    from parallel_trainer.trainer import Trainer

    return Trainer(job, communicator)


def _train(job: Job, communicator: Communicator, output: Path, engine: str = "native") -> None:
    # MindSpore, matplotlib and TensorBoard, which the process that starts the ranks does without
    from parallel_trainer.report.experts import ExpertFiles
    from parallel_trainer.report.files import RunFiles, draw_curve_of

    trainer = _trainer(job, communicator, engine)
    notes = _resume(trainer, communicator)
    saver = _saver(trainer, communicator)
    stop = StopRequest(communicator) if saver else None
    reports: list[Console | RunFiles] = []
    experts: ExpertFiles | None = None
    if communicator.rank == 0:
        check_output(output, job.config.checkpoint)
        _introduce(trainer, [*notes, *_of_output(output, trainer.step)])
        files = RunFiles(output, run=saver.run if saver else None, after=trainer.step)
        reports = [Console(job.config.training.steps), files]
        interval = job.config.monitor.moe_monitor.save_tokens_per_expert_interval
        if job.watched and interval:
            experts = ExpertFiles(output, job.watched, interval, after=trainer.step)
    with saver or nullcontext():
        try:
            while trainer.step < job.config.training.steps:
                record = _step(trainer)
                for report in reports:
                    report.step(record)
                if experts and trainer.loads:
                    experts.step(trainer.step, trainer.loads)
                if saver:
                    saver.after_step(trainer.step)
                if stop and stop.requested():
                    break
                if job.evaluates_after(trainer.step):
                    evaluated = evaluation_record(_native(trainer), trainer.step)
                    for report in reports:
                        report.evaluation(evaluated)
            if saver:
                saver.finish(trainer.step)
        finally:
            for report in reports:
                report.close()
    if experts:
        experts.close()
    if reports:
        draw_curve_of(output)
        if trainer.step < job.config.training.steps:
            print(f"Stopped by SIGTERM after step {trainer.step} of {job.config.training.steps}.")
        print(f"Metrics, TensorBoard events and the loss curve are in {output}")
        if saver:
            print(f"Checkpoints are in {saver.folder}; to go on from the newest: checkpoint.load_path: {saver.folder}")


def _of_output(output: Path, step: int) -> Iterator[str]:
    """A line for an output that a run which stands after `step` goes on with."""
    if last := last_step(output):
        again = f"; what it has of steps {step + 1} to {last} is replaced by these steps trained again"
        yield f"{output} goes on after step {min(step, last)}{again if last > step else ''}."


def _native(trainer: EngineTrainer) -> Trainer:
    """A trainer that loads, saves and evaluates: the other engine refuses files that ask for that."""
    from parallel_trainer.trainer import Trainer

    assert isinstance(trainer, Trainer)
    return trainer


def _resume(trainer: EngineTrainer, communicator: Communicator) -> list[str]:
    """Load what the file starts from, and say so in lines for the user. Collective."""
    section = trainer.job.config.checkpoint
    notes = [f"Note: {note}" for note in trainer.job.notes]
    if not section.load_path:
        return notes
    if gather(communicator, begins_from_nothing(section))[0]:
        return [*notes, f"Nothing is saved in {section.load_path} yet: the run begins anew, and saves there."]
    resumed = restore(_native(trainer), Path(section.load_path), optimizer=not section.no_load_optim)
    what = f"Going on after step {resumed.step}, from" if resumed.step else "Starting from the weights of"
    return [f"{what} {resumed.folder}", *notes, *(f"Note: {note}" for note in resumed.notes)]


def _saver(trainer: EngineTrainer, communicator: Communicator) -> Saver | None:
    """What saves the run, if its file asks for that. Collective."""
    section = trainer.job.config.checkpoint
    if not saves(section):
        return None
    take = partial(snapshot, _native(trainer), optimizer=not section.no_save_optim)
    return Saver(section, communicator, take, step=trainer.step)


def _step(trainer: EngineTrainer) -> StepRecord:
    lr, start = trainer.lr, time.perf_counter()
    result = trainer.train_step()
    seconds = time.perf_counter() - start
    return StepRecord(
        step=trainer.step,
        loss=result.loss,
        lr=lr,
        grad_norm=result.grad_norm,
        tokens_per_second=trainer.job.plan.global_batch_size * trainer.job.seq_length / seconds,
        seconds=seconds,
        valid_tokens=result.valid_tokens,
        consumed_samples=trainer.consumed,
        updated=result.updated,
        mtp_loss=result.mtp_loss,
        balance_loss=result.balance_loss,
    )


def _introduce(trainer: EngineTrainer, notes: Iterable[str]) -> None:
    job = trainer.job
    count = sum(weight.size for weight in trainer.model.weights)
    print(
        f"{job.config.model.model_type}: {count:,} parameters in {job.dtype}, of which this rank holds "
        f"{trainer.held:,}\n{job.summary}",
        *notes,
        sep="\n",
        flush=True,
    )
