"""The command `parallel-config migrate`: a new file, and on stderr what has no counterpart in it."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from contextlib import suppress
from pathlib import Path

from parallel_config.document import Document
from parallel_config.home import expand_home, path_argument
from parallel_config.loading import read_file
from parallel_config.migrate.conversion import Migration, migrate
from parallel_config.migrate.draft import Kind
from parallel_config.migrate.model import HuggingFace
from parallel_config.migrate.render import left_lines
from parallel_config.problems import Problem
from parallel_config.render import problem_text

OK, INVALID = 0, 2


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what the command takes."""
    parser.add_argument("file", type=path_argument, help="YAML file of MindFormers' graph mode")
    parser.add_argument(
        "--output", type=path_argument, metavar="NEW", help="file to write, which must not exist (default: stdout)"
    )
    parser.add_argument("--world-size", type=int, metavar="N", help="ranks, where the old file leaves them open")
    parser.add_argument("--steps", type=int, metavar="N", help="steps, where the old file leaves them open")
    parser.add_argument(
        "--hf-config",
        type=path_argument,
        metavar="PATH",
        help="config.json of the model, or its folder (default: that in pretrained_model_dir, if it is there)",
    )


def run(arguments: argparse.Namespace) -> int:
    """Convert a file; returns 0 for a new file that passes `check`, else 2."""
    document = read_file(arguments.file)
    problems = _wrong_arguments(arguments)
    completing, unreadable = _config_json(arguments.hf_config, document)
    problems += [unreadable] if unreadable else []
    if problems:
        return _refuse(document, problems)
    made = migrate(document, world_size=arguments.world_size, steps=arguments.steps, completing=completing)
    if made.refused:
        return _refuse(document, list(made.refused))
    if arguments.output is None:
        print(made.text, end="")
    else:
        try:
            with open(arguments.output, "x", encoding="utf-8") as file:
                file.write(made.text)
        except OSError as error:
            reason = error.strerror or str(error)
            rule, hint = f"cannot be written: {reason}", "Name a new file in a folder that exists."
            return _refuse(document, [Problem("--output", str(arguments.output), rule, hint)])
    for line in _report(made, arguments.output):
        print(line, file=sys.stderr)
    return INVALID if made.unfit else OK


def _wrong_arguments(arguments: argparse.Namespace) -> list[Problem]:
    given = {"--world-size": arguments.world_size, "--steps": arguments.steps}
    return [
        Problem(name, value, "must be ≥ 1", "Leave it out if the old file says it.")
        for name, value in given.items()
        if value is not None and value < 1
    ]


def _config_json(named: Path | None, document: Document) -> tuple[HuggingFace | None, Problem | None]:
    """The model's config.json: the one that is named, else that in pretrained_model_dir if it is there."""
    folder = document.values.get("pretrained_model_dir")
    with suppress(ValueError):  # a folder that cannot be meant is not there, and is refused for that
        folder = expand_home(folder) if isinstance(folder, str) else folder
    if named is None and not (isinstance(folder, str) and folder and Path(folder, "config.json").is_file()):
        return None, None
    path = named or Path(str(folder))
    path = path / "config.json" if path.is_dir() else path
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        reason = (error.strerror or str(error)) if isinstance(error, OSError) else f"is not JSON ({error})"
        return None, Problem("--hf-config", str(path), f"cannot be read: {reason}", "Name the model's config.json.")
    if not isinstance(values, dict):
        return None, Problem("--hf-config", str(path), "is not a mapping of fields", "Name the model's config.json.")
    return HuggingFace(values, path.name), None


def _refuse(document: Document, problems: list[Problem]) -> int:
    for problem in problems:
        print(problem_text(problem, document), file=sys.stderr)
    return INVALID


def _report(made: Migration, output: Path | None) -> list[str]:
    name, ranks = str(output or "NEW.yaml"), made.degrees.world_size
    lines = [f"{made.document.filename}: {len(made.carried)} fields in the new file, for --world-size {ranks}."]
    if made.left:
        listed = [item for item in made.left if item.kind is not Kind.NOTHING]
        lines += [
            "",
            *left_lines(listed),
            f"{Kind.NOTHING.value}: {len(made.left) - len(listed)} values, which comments",
        ]
        lines[-1] += " at the end of the new file list."
    if made.unfit:
        lines += ["", "The new file does not pass the check yet:", *(f"  {problem}" for problem in made.unfit)]
    return [*lines, "", f"Next: parallel-config check {shlex.quote(name)} --world-size {ranks} --explain"]
