"""The command `pipeline-schedule show`: a schedule's Gantt chart, idle time and memory, in several forms."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
from collections.abc import Callable, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any, NoReturn

from pipeline_schedule.draw.png import save_png
from pipeline_schedule.draw.svg import as_svg
from pipeline_schedule.draw.text import as_report
from pipeline_schedule.draw.trace import as_trace
from pipeline_schedule.generate import SCHEDULE_NAMES, generate
from pipeline_schedule.overlap import overlap_b_f, overlap_p2p, post_together
from pipeline_schedule.replay import Time
from pipeline_schedule.serial import schedule_to_dict
from pipeline_schedule.simulate import Costs, Timeline, simulate
from pipeline_schedule.terminal import show_anywhere

_PROGRAM = "pipeline-schedule"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit code: 0, or 2 when an argument is wrong or a file cannot be written."""
    if argv is None and hasattr(signal, "SIGPIPE"):
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # end quietly where the output goes to a closed pipe
    show_anywhere()
    arguments = _parser().parse_args(argv)
    try:
        timeline = _timeline(arguments)
        text = json.dumps(_as_dict(timeline)) if arguments.json else as_report(timeline, width=arguments.width)
        _draw(timeline, arguments)
    except (ValueError, OSError, ImportError) as error:
        print(f"{_PROGRAM}: {error}", file=sys.stderr)
        return 2
    print(text)
    return 0


class _Parser(argparse.ArgumentParser):
    """A parser that says in one line what is wrong."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message} (see {self.prog} --help)\n")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog=_PROGRAM, description="Pipeline-parallel schedules as checked data.")
    show = parser.add_subparsers(required=True, metavar="COMMAND").add_parser(
        "show", help="print a schedule's Gantt chart, idle time and peak activations"
    )
    names = ", ".join(SCHEDULE_NAMES)
    show.add_argument("--stages", type=int, required=True, metavar="P", help="pipeline stages, one on each rank")
    show.add_argument("--microbatches", type=int, required=True, metavar="M", help="micro-batches of a step")
    show.add_argument("--chunks", type=int, metavar="V", help="model chunks on each rank")
    show.add_argument("--schedule", metavar="NAME", help=f"{names}; by default interleaved for several chunks, or 1f1b")
    show.add_argument("--overlap-p2p", action="store_true", help="let transfers go on beside computations")
    show.add_argument("--together", action="store_true", help="post transfers between two computations as a group")
    show.add_argument("--overlap-b-f", action="store_true", help="let a backward run beside the next forward")
    show.add_argument("--forward", type=_time, default=1, metavar="T", help="time of a forward (default 1)")
    show.add_argument("--backward-input", type=_time, default=1, metavar="T", help="of a backward's input half (1)")
    show.add_argument("--backward-weight", type=_time, default=1, metavar="T", help="of its weight half (1)")
    show.add_argument("--communication", type=_time, default=0, metavar="T", help="of a transfer (0)")
    show.add_argument("--width", type=int, default=110, metavar="COLUMNS", help="width of the chart (default 110)")
    show.add_argument("--json", action="store_true", help="print the schedule and its times as JSON")
    show.add_argument("--svg", type=_path, metavar="OUT.svg", help="also draw the chart into this file")
    show.add_argument("--png", type=_path, metavar="OUT.png", help="the same as PNG; needs the extra plot")
    show.add_argument("--trace", type=_path, metavar="OUT.json", help="also write a trace for ui.perfetto.dev")
    return parser


def _path(text: str) -> Path:
    """A path with a home folder in place of a leading `~` or `~user`, as a shell would."""
    try:
        return Path(text).expanduser()
    except RuntimeError:
        raise argparse.ArgumentTypeError(f"{text!r} has no home folder for {text.partition('/')[0]}") from None


def _time(text: str) -> Time:
    """An exact number: `2`, `0.25` or `1/3`."""
    try:
        value = Fraction(text)
    except (ValueError, ZeroDivisionError):
        raise argparse.ArgumentTypeError(f"{text!r} is no time: write it as 2, 0.25 or 1/3") from None
    return value.numerator if value.denominator == 1 else value


def _timeline(arguments: argparse.Namespace) -> Timeline:
    schedule = generate(arguments.schedule, arguments.stages, arguments.microbatches, arguments.chunks)
    if arguments.overlap_b_f:
        schedule = overlap_b_f(schedule)
    if arguments.overlap_p2p:
        schedule = overlap_p2p(schedule)
    if arguments.together:
        schedule = post_together(schedule)
    costs = Costs(
        forward=arguments.forward,
        backward_input=arguments.backward_input,
        backward_weight=arguments.backward_weight,
        communication=arguments.communication,
    )
    return simulate(schedule, costs)


def _as_dict(timeline: Timeline) -> dict[str, Any]:
    return {
        "schedule": schedule_to_dict(timeline.schedule),
        "makespan": _plain(timeline.makespan),
        "idle": [float(share) for share in timeline.idle],
        "peak_activations": list(timeline.peak_activations),
    }


def _plain(time: Time) -> int | float:
    return time if isinstance(time, int) else float(time)


def _draw(timeline: Timeline, arguments: argparse.Namespace) -> None:
    if arguments.svg is not None:
        _write(arguments.svg, lambda path: path.write_text(as_svg(timeline), encoding="utf-8"))
    if arguments.png is not None:
        _write(arguments.png, lambda path: save_png(timeline, path))
    if arguments.trace is not None:
        _write(arguments.trace, lambda path: path.write_text(json.dumps(as_trace(timeline)), encoding="utf-8"))


def _write(path: Path, write: Callable[[Path], object]) -> None:
    """Write the whole file or, on an error, none of it."""
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    try:
        write(partial)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
