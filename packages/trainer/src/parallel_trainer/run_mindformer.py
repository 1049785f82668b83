"""`parallel-train run` as the reference's start-up line has it: `run_mindformer.py --config FILE --mode 1` under msrun.

msrun --worker_num=8 --local_worker_num=8 --master_port=8118 --join=True \\
    python -m parallel_trainer.run_mindformer --config FILE --mode 1
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from typing import NoReturn

from device_mesh import launched
from parallel_config import path_argument, show_anywhere

from parallel_trainer.cli import run, say_errors
from parallel_trainer.engines.choice import add_option
from parallel_trainer.errors import UserError
from parallel_trainer.job import Device
from parallel_trainer.launch.joining import refuse

# By option of the reference the one value that can be right here, and why.
_ONLY = {
    "mode": (
        "1",
        "models run operator by operator, in MindSpore's dynamic graph (PyNative), and there is no static graph",
    ),
    "run_mode": ("train", "this program trains, and does nothing else"),
}
_DEVICES: Mapping[str, Device] = {"CPU": "cpu", "Ascend": "ascend"}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code; under msrun as what this process was started."""
    show_anywhere()
    return say_errors(lambda: _run(argv))


def _run(argv: Sequence[str] | None) -> int:
    launch = launched()
    silent = launch is not None and not launch.speaks
    try:
        with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere if silent else sys.stdout):
            args = _parse(argv)
    except UserError as error:
        if launch is None:
            raise
        refuse(launch, str(error))
    output = None
    if args.output_dir is not None:
        output = args.output_dir / f"{args.config.stem}-{time.strftime('%Y%m%d-%H%M%S')}"
    device = _DEVICES[args.device_target]
    return run.run(argparse.Namespace(config=args.config, output=output, nproc=None, engine=args.engine, device=device))


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The arguments. Raises UserError for what is unknown, or known and not possible here."""
    args = _parser().parse_args(argv)
    for name, (value, reason) in _ONLY.items():
        if (given := getattr(args, name)) != value:
            raise UserError(f"--{name} {given} cannot be run: {reason}. Use --{name} {value}.")
    if args.device_target not in _DEVICES:
        raise UserError(f"--device_target {args.device_target} is not one of {', '.join(_DEVICES)}.")
    return args


class _Parser(argparse.ArgumentParser):
    """Raises UserError, which one of the ranks shows, where argparse would have each of them exit with a message."""

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{self.format_usage()}{self.prog}: {message}")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="run_mindformer.py",
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description="Train the model of a YAML file on the ranks that MindSpore's msrun starts:\n\n"
        "  msrun --worker_num=8 --local_worker_num=8 --master_port=8118 --join=True \\\n"
        "      python -m parallel_trainer.run_mindformer --config FILE --mode 1\n\n"
        "Rank 0 reports in its own log, worker_0.log. Without msrun it trains on one rank.",
    )
    parser.add_argument("--config", type=path_argument, required=True, metavar="FILE", help="the YAML file")
    for name, (value, _) in _ONLY.items():
        parser.add_argument(f"--{name}", default=value, metavar=value, help=f"{value}, the only one there is")
    parser.add_argument(
        "--device_target",
        default="CPU",
        metavar="DEVICE",
        help="CPU (default), or Ascend, which connects the ranks by HCCL; nothing has run on Ascend yet",
    )
    parser.add_argument(
        "--output_dir",
        type=path_argument,
        metavar="DIR",
        help="folder in which the run makes its own (default: output)",
    )
    add_option(parser)
    return parser


if __name__ == "__main__":
    sys.exit(main())
