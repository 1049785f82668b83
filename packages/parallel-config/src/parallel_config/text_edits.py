"""Edits of single lines that mend what is wrong with a file as YAML."""

from __future__ import annotations

import re
from collections.abc import Iterator

from attrs import frozen

from parallel_config.document import Document
from parallel_config.problems import Problem

_NO_SPACE = re.compile(r"(\s*(?:- )?[\w-]+):(\S.*)")
_KEY_VALUE = re.compile(r"(\s*(?:- )?[\w-]+:\s+)(.*?)\s*")
_TAG = re.compile(r"![^\s,\]}]*\s*")
_CONTROL = re.compile(r"[^\t\x20-\x7e\x85\xa0-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


@frozen
class LineEdit:
    """One line (counted from 1) with a new content; None removes it."""

    line: int
    content: str | None

    def __str__(self) -> str:
        return f"remove line {self.line}" if self.content is None else f"line {self.line}: {self.content!r}"


LineGroup = tuple[LineEdit, ...]
"""Edits that are made together."""


def apply_lines(text: str, edits: LineGroup) -> str:
    """The text with these edits made; all line numbers are those of `text`."""
    contents = {edit.line: edit.content for edit in edits}
    kept = (contents.get(number, line) for number, line in enumerate(text.split("\n"), 1))
    return "\n".join(line for line in kept if line is not None)


def line_edits(document: Document, problem: Problem) -> Iterator[tuple[LineGroup, ...]]:
    """What may mend a problem of the YAML itself, the likeliest first; each step has equally good alternatives."""
    lines = document.text.split("\n")
    if problem.line is None or problem.line > len(lines):
        return
    spot = document.spots.get(problem.path)
    if spot is not None and spot.key_line != problem.line:
        yield _block(lines, problem.line), _block(lines, spot.key_line)
    for group in _rewritings(lines, problem.line):
        yield (group,)
    yield from _closed(lines, problem.line)
    yield (_block(lines, problem.line),)


def _rewritings(lines: list[str], number: int) -> Iterator[LineGroup]:
    yield from _tabs(lines)
    if "---" in lines[number - 1]:
        yield tuple(LineEdit(later, None) for later in range(number, len(lines) + 1))
    for near in (number, number - 1):
        for content in _rewritten(lines, near) if near else ():
            if content != lines[near - 1]:
                yield (LineEdit(near, content),)


def _tabs(lines: list[str]) -> Iterator[LineGroup]:
    for width in (2, 4, 8):
        edits = []
        for number, line in enumerate(lines, 1):
            indent = line[: len(line) - len(line.lstrip())]
            if "\t" in indent:
                edits.append(LineEdit(number, indent.replace("\t", " " * width) + line.lstrip()))
        if edits:
            yield tuple(edits)


def _rewritten(lines: list[str], number: int) -> Iterator[str]:
    line = lines[number - 1]
    yield _CONTROL.sub("", line)
    yield line.replace("\t", " ")
    tag = _TAG.search(line)
    if tag:
        yield line[: tag.start()] + line[tag.end() :]
    no_space = _NO_SPACE.fullmatch(line)
    if no_space:
        yield f"{no_space[1]}: {no_space[2]}"
    for other in (number - 2, number):
        if 0 <= other < len(lines) and lines[other].strip():
            near = lines[other]
            yield near[: len(near) - len(near.lstrip())] + line.lstrip()
    value = _KEY_VALUE.fullmatch(line)
    if value:
        yield f"{value[1]}'" + value[2].replace("'", "''") + "'"


def _closed(lines: list[str], number: int) -> Iterator[tuple[LineGroup, ...]]:
    """The nearest line above that opens a bracket or quote and does not close it: closed, or without it."""
    for above in range(min(number, len(lines)), 0, -1):
        line = lines[above - 1]
        for opening, closing in ("[]", "{}"):
            if line.count(opening) > line.count(closing):
                closed = line + closing * (line.count(opening) - line.count(closing))
                yield (LineEdit(above, closed),), (LineEdit(above, line.replace(opening, "", 1)),)
        for quote in "\"'":
            if line.count(quote) % 2:
                yield ((LineEdit(above, line + quote),),)


def _block(lines: list[str], number: int) -> LineGroup:
    """Removing a line with everything that is indented below it."""
    line = lines[number - 1]
    indent = len(line) - len(line.lstrip())
    end = number
    while end < len(lines) and lines[end].strip() and len(lines[end]) - len(lines[end].lstrip()) > indent:
        end += 1
    return tuple(LineEdit(each, None) for each in range(number, end + 1))
