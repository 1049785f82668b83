"""The `parallel-train` command: one module per subcommand."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import warnings
from collections.abc import Callable, Sequence
from importlib.metadata import version
from typing import TextIO

from device_mesh import launched
from parallel_config import ConfigError, ConfigWarning, show_anywhere

from parallel_trainer.cli import checkpoint, data, evaluate, plan, run, verify
from parallel_trainer.errors import UserError
from parallel_trainer.launch.joining import let_log_be_shown


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    if argv is None and hasattr(signal, "SIGPIPE"):
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # end quietly where the output goes to a closed pipe
    show_anywhere()
    parser = argparse.ArgumentParser(
        prog="parallel-train",
        description="Train a model over many devices from one YAML file, exactly as one device would.",
    )
    parser.add_argument("--version", action="version", version=f"parallel-train {version('parallel-trainer')}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for module in (run, evaluate, verify, plan, data, checkpoint):
        module.add_parser(commands)
    args = parser.parse_args(argv)
    os.environ.setdefault("GLOG_v", "3")  # of what MindSpore logs where a command imports it: errors only
    return say_errors(lambda: args.run(args))


def say_errors(command: Callable[[], int]) -> int:
    """The exit code of a command; what a user can mend is one message on stderr and exit code 2."""
    with warnings.catch_warnings():
        warnings.showwarning = _show_warning
        try:
            return int(command())
        except (UserError, ConfigError) as error:
            print(error, file=sys.stderr)
            first = error.problems[0] if isinstance(error, ConfigError) else None
            if first is not None and first.line is not None and first.mendable and launched() is None:
                file = first.file
                print(f"For edits that would help: parallel-config check {file} --world-size RANKS", file=sys.stderr)
            let_log_be_shown(launched())
            return 2
        except KeyboardInterrupt:
            print("Interrupted.", file=sys.stderr)
            return 130


def _show_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    """The configuration's warnings are for the user; any other keeps its place in the code."""
    note = f"Note: {message}\n" if issubclass(category, ConfigWarning) else None
    sys.stderr.write(note or warnings.formatwarning(message, category, filename, lineno, line))
