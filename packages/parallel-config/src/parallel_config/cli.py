"""The command `parallel-config`: check a file, say what fields mean, convert files of MindFormers' graph mode."""

from __future__ import annotations

import argparse
import json
import signal
import sys
from collections.abc import Iterator, Sequence

from parallel_config.document import Document
from parallel_config.effects import all_fields, fields_without_effect
from parallel_config.explain import explain
from parallel_config.home import path_argument
from parallel_config.loading import examine, read_file
from parallel_config.migrate import command
from parallel_config.notices import notices
from parallel_config.plan import plan, world_size_problems
from parallel_config.problems import Problem
from parallel_config.reference import described, markdown, nearest
from parallel_config.render import plan_table, plan_values, problem_text, problem_values, repairs_text
from parallel_config.repair import Repair, repairs
from parallel_config.schema import TrainConfig
from parallel_config.schema.setting import ENGINES
from parallel_config.terminal import show_anywhere

OK, INVALID = 0, 2


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit status: 0 for a valid file or a known field, 2 for any problem."""
    if argv is None and hasattr(signal, "SIGPIPE"):
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # end quietly where the output goes to a closed pipe
    show_anywhere()
    arguments = _parser().parse_args(argv)
    status: int = arguments.run(arguments)
    return status


def _check(arguments: argparse.Namespace) -> int:
    world_size: int = arguments.world_size
    wrong_size = world_size_problems(world_size)
    document = read_file(arguments.file)
    examination = examine(document, None if wrong_size else world_size)
    problems = (*wrong_size, *examination.problems)
    if problems:
        found = () if wrong_size else repairs(document, world_size)
        _show_problems(document, problems, found, as_json=arguments.json, explained=arguments.explain)
        return INVALID
    for notice in (*notices(examination.config), *_without_effect(examination.config, arguments.engine)):
        print(f"warning: {notice}", file=sys.stderr)
    _show_plan(examination.config, world_size, as_json=arguments.json, explained=arguments.explain)
    return OK


def _without_effect(config: TrainConfig, engine: str | None) -> Iterator[str]:
    ignored = fields_without_effect(config, engine)
    if ignored:
        with_engine = engine or config.extensions.engine
        yield f"The file sets fields that have no effect with engine {with_engine}: {', '.join(ignored)}."


def _fields(arguments: argparse.Namespace) -> int:
    if arguments.markdown:
        print(markdown(), end="")
        return OK
    if arguments.path is None:
        print("\n".join(all_fields()))
        return OK
    text = described(arguments.path)
    if text is None:
        meant = nearest(arguments.path)
        instead = f"Did you mean {meant}?" if meant else "parallel-config fields lists all of them."
        print(f"{arguments.path} is neither a field nor a section. {instead}", file=sys.stderr)
        return INVALID
    print(text)
    return OK


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="parallel-config", description="Check how a configuration splits a training run over ranks."
    )
    commands = parser.add_subparsers(dest="command", required=True)
    check = commands.add_parser("check", help="show the plan of a file, or everything that is wrong with it")
    check.add_argument("file", type=path_argument, help="YAML configuration file")
    check.add_argument("--world-size", type=int, required=True, metavar="N", help="number of ranks")
    check.add_argument("--json", action="store_true", help="print JSON")
    check.add_argument(
        "--explain",
        action="store_true",
        help="say where each value comes from (with --json: add repairs, too)",
    )
    check.add_argument("--engine", choices=ENGINES, help="what is to train; default: as the file says, or native")
    check.set_defaults(run=_check)
    listed = commands.add_parser("fields", help="say what a field means, what it takes and what acts on it")
    listed.add_argument("path", nargs="?", help="a field or section, such as parallelism.tensor_parallel; default: all")
    listed.add_argument("--markdown", action="store_true", help="print the reference of all fields as a page")
    listed.set_defaults(run=_fields)
    migrated = commands.add_parser("migrate", help="convert a file of MindFormers' graph mode")
    command.add_arguments(migrated)
    migrated.set_defaults(run=command.run)
    return parser


def _show_problems(
    document: Document,
    problems: Sequence[Problem],
    found: Sequence[Repair],
    *,
    as_json: bool,
    explained: bool,
) -> None:
    if as_json:
        report: dict[str, object] = {"problems": [problem_values(problem) for problem in problems]}
        if explained:
            report["repairs"] = [[str(edit) for edit in repair.edits] for repair in found]
        print(json.dumps(report, indent=2))
        return
    for problem in problems:
        print(problem_text(problem, document), file=sys.stderr)
    if found:
        print(repairs_text(found), file=sys.stderr)


def _show_plan(config: TrainConfig, world_size: int, *, as_json: bool, explained: bool) -> None:
    inferred = plan(config, world_size)
    explanations = explain(config, world_size) if explained else ()
    if as_json:
        report = plan_values(inferred)
        if explained:
            report["explanations"] = [str(explanation) for explanation in explanations]
        print(json.dumps(report, indent=2))
        return
    print(plan_table(inferred))
    if explanations:
        print()
        print("\n".join(map(str, explanations)))


if __name__ == "__main__":
    sys.exit(main())
