"""Which engine trains: what the command line says, else the environment, else the file, else this project itself."""

from __future__ import annotations

from argparse import ArgumentParser
from collections.abc import Mapping
from importlib.util import find_spec

from attrs import fields, frozen
from parallel_config import TrainConfig
from parallel_config.schema import Extensions
from parallel_config.schema.setting import limit_of

from parallel_trainer.errors import UserError

VARIABLE = "PARALLEL_TRAIN_ENGINE"

INSTALL = (
    "hyper_parallel has to be installed, and PyPI does not have it. On a machine with Ascend NPUs and MindSpore 2.10: "
    "git clone --branch r1.0.0 https://gitcode.com/mindspore/hyper-parallel.git, in it ./build.sh --multicore off "
    "--shmem off --custom-ops off, then pip install the wheel that it names."
)


@frozen
class Choice:
    """An engine, native or hyperparallel, and where it was chosen, as the start of a sentence."""

    engine: str
    where: str


def add_option(parser: ArgumentParser) -> None:
    """Declare `--engine`."""
    parser.add_argument(
        "--engine",
        metavar="{native,hyperparallel}",
        help=f"what trains (default: {VARIABLE}, or extensions.engine of the file, or native)",
    )


def choose(option: str | None, environment: Mapping[str, str], config: TrainConfig) -> Choice:
    """The engine of `--engine`, PARALLEL_TRAIN_ENGINE, or the file's `extensions.engine`: the first that is given.

    An empty variable counts as none. Raises UserError for an engine that does not exist.
    """
    limit = limit_of(fields(Extensions).engine)
    assert limit is not None
    for value, says in ((option, "--engine "), (environment.get(VARIABLE) or None, f"{VARIABLE}=")):
        if value is None:
            continue
        if not limit.allows(value):
            raise UserError(f"{says}{value} {limit.rule()}. {limit.suggestion(value)}")
        return Choice(value, f"{says}{value}")
    return Choice(config.extensions.engine, f"extensions.engine {config.extensions.engine}")


def check_trains(choice: Choice, device: str) -> None:
    """Raise UserError where the engine cannot train on `device`, with all that it needs."""
    if choice.engine == "native":
        return
    problems = [] if find_spec("hyper_parallel") else [INSTALL]
    if device != "ascend":
        raise UserError(
            f"{choice.where} trains on NPUs alone, by run_mindformer --device_target Ascend under msrun "
            "(docs/ascend.md): HyperParallel 1.0 shards no parameters on a CPU. Its calls can be shown here "
            "(parallel-train plan FILE --engine hyperparallel --world-size RANKS). --engine native trains here.",
            problems,
        )
    if problems:
        raise UserError(f"{choice.where} cannot train yet:", problems)


def check_native(choice: Choice, what: str) -> None:
    """Raise UserError where `what` is asked of another engine than this project itself."""
    if choice.engine != "native":
        raise UserError(f"{choice.where}: {what} trains with the native engine alone. Use --engine native.")
