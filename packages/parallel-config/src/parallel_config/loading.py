"""From a file to a checked configuration, with every problem of the file at once."""

from __future__ import annotations

import os
import warnings
from pathlib import Path

from attrs import frozen

from parallel_config.document import Document
from parallel_config.formats import foreign
from parallel_config.notices import notices
from parallel_config.problems import ConfigWarning, Problem, config_error, in_order
from parallel_config.rules import Facts, broken_rules
from parallel_config.schema import TrainConfig
from parallel_config.source import read
from parallel_config.structure import structure


@frozen
class Examination:
    """What a document holds: a configuration (with defaults where fields failed) and all its problems."""

    config: TrainConfig
    problems: tuple[Problem, ...]


def examine(document: Document, world_size: int | None) -> Examination:
    """Check a document completely; the rules that need a world size run only when one is given."""
    if document.broken:
        return Examination(TrainConfig(source=document), document.problems)
    other = foreign(document)
    if other is not None:
        return Examination(TrainConfig(source=document), (other,))
    structured = structure(document)
    problems = (
        *document.problems,
        *structured.problems,
        *broken_rules(Facts(structured.config, world_size), structured.failed),
    )
    return Examination(structured.config, in_order(problems))


def loads(text: str, filename: str = "<string>") -> TrainConfig:
    """The configuration that a YAML text describes.

    Everything that does not depend on the world size is checked. Raises `ConfigError` with all problems;
    warns with `ConfigWarning` about what has no effect.
    """
    return _checked(read(text, filename))


def load(path: str | os.PathLike[str]) -> TrainConfig:
    """The configuration in a file (UTF-8). Raises `ConfigError`, also where the file cannot be read."""
    return _checked(read_file(path))


def read_file(path: str | os.PathLike[str]) -> Document:
    """The parsed file; that it cannot be read is a problem of the document."""
    name = os.fspath(path)
    try:
        content = Path(name).read_bytes()
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        problem = Problem("", "the file", f"cannot be read: {reason}", "Name an existing, readable YAML file.", name)
        return Document(name, problems=(problem,), broken=True)
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        before = content[: error.start]
        line, column = before.count(b"\n") + 1, error.start - before.rfind(b"\n")
        byte = f"byte 0x{content[error.start]:02x}"
        problem = Problem(
            "",
            None,
            f"{byte} is not UTF-8, and files are read as UTF-8",
            "Save the file as UTF-8.",
            name,
            line,
            column,
        )
        return Document(name, problems=(problem,), broken=True)
    return read(text, name)


def _checked(document: Document) -> TrainConfig:
    examination = examine(document, None)
    if examination.problems:
        raise config_error(examination.problems)
    for notice in notices(examination.config):
        warnings.warn(notice, ConfigWarning, stacklevel=3)
    return examination.config
