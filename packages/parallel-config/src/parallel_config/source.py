"""Reading a YAML text: plain values, the place of every key and value, and every trap of YAML reported."""

from __future__ import annotations

import re
from typing import Any

import yaml
from attrs import define, field

from parallel_config.document import Document, Spot
from parallel_config.paths import all_paths, join
from parallel_config.problems import NUMBER_WITHOUT_POINT, Edit, Fix, Problem

_Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)

MAX_DEPTH = 10
"""Levels of nesting a file may have; the reference refuses deeper files as well."""

MAX_VALUES = 20_000
"""Values a file may expand to: far above any real file, far below what hurts."""

_TAG = "tag:yaml.org,2002:"
_OCTAL = re.compile(r"[-+]?0[0-7_]+")
_UNREADABLE = re.compile("[^\\x09\\x0a\\x0d\\x20-\\x7e\\x85\\xa0-\\ud7ff\\ue000-\\ufffd\\U00010000-\\U0010ffff]")
_TRUE = frozenset({"yes", "true", "on"})
_INT64 = 2**63
_LONGEST_INTEGER = 66


def read(text: str, filename: str) -> Document:
    """Parse one YAML document. Never raises: what is wrong is in `.problems`."""
    unreadable = _UNREADABLE.search(text.removeprefix("\ufeff"))
    if unreadable:
        before = text.removeprefix("\ufeff")[: unreadable.start()]
        return _unreadable(
            text,
            Problem(
                "",
                repr(unreadable.group()),
                "is a control character, which YAML does not allow",
                "Remove it, and save the file as plain UTF-8 text.",
                filename,
                before.count("\n") + 1,
                len(before) - before.rfind("\n"),
            ),
        )
    try:
        node = yaml.compose(text, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        return _unreadable(text, _syntax_problem(error, text, filename))
    except (yaml.YAMLError, RecursionError, ValueError, OverflowError) as error:
        reason = "nests too deeply" if isinstance(error, RecursionError) else f"is not readable YAML ({error})"
        return _unreadable(
            text, Problem("", None, f"the file {reason}", "Write plain nested sections.", filename, 1, 1)
        )
    if not isinstance(node, yaml.MappingNode):
        found = "is empty" if node is None else "is not a mapping of sections"
        return _unreadable(
            text,
            Problem(
                "",
                None,
                f"the file {found}, and a configuration consists of sections",
                "Write at least a section, such as parallelism: {tensor_parallel: 1}.",
                filename,
                1,
                1,
            ),
        )
    builder = _Builder(filename)
    values = builder.mapping(node, "", 1)
    return Document(
        filename,
        text,
        values,
        spots=builder.spots,
        texts=builder.texts,
        written=frozenset(all_paths(values)),
        problems=tuple(builder.problems),
        broken=builder.stopped,
    )


def _unreadable(text: str, problem: Problem) -> Document:
    return Document(problem.file, text, problems=(problem,), broken=True)


def _syntax_problem(error: yaml.MarkedYAMLError, text: str, filename: str) -> Problem:
    mark = error.problem_mark or error.context_mark
    line, column = (mark.line, mark.column) if mark else (0, 0)
    lines = text.split("\n")
    content = lines[line] if line < len(lines) else ""
    what = (error.problem or "cannot be parsed").replace("\n", " ")
    rule, suggestion = (
        f"the line breaks YAML's syntax: {what}",
        "Check indentation, colons, quotes and brackets here.",
    )
    value: str | None = content.strip() or None
    if "\t" in content[: len(content) - len(content.lstrip())] or content[column : column + 1] == "\t":
        rule, suggestion = "is indented with a tab, which YAML does not allow", "Indent with spaces."
    elif "another document" in what:
        value, rule = None, "the file holds more than one YAML document, and exactly one is read"
        suggestion = "Remove the line '---' and what follows it, or put it into a file of its own."
    elif "undefined alias" in what:
        rule, suggestion = (
            "refers to an anchor that is not defined above",
            "Write the value itself, or quote it.",
        )
    elif "maximum nesting" in what:
        value, rule = None, f"the file nests deeper than {MAX_DEPTH} levels"
        suggestion = "Write plain nested sections."
    elif content[column : column + 1] in {"@", "`", "%"}:
        rule = f"starts a value with {content[column]}, which YAML reserves"
        suggestion = "Put the value in quotes."
    elif "mapping values are not allowed" in what:
        rule = "has a second ': ' where a value is expected, or is indented deeper than its neighbours"
        suggestion = "Align it with the other keys of its section, or quote the value."
    return Problem("", value, rule, suggestion, filename, line + 1, column + 1)


@define
class _Builder:
    """Turns the node graph into values, expanding aliases within limits."""

    filename: str
    spots: dict[str, Spot] = field(factory=dict)
    texts: dict[str, str] = field(factory=dict)
    problems: list[Problem] = field(factory=list)
    count: int = 0
    stopped: bool = False

    def report(
        self, node: yaml.Node, path: str, value: Any, rule: str, suggestion: str, fixes: tuple[Fix, ...] = ()
    ) -> None:
        mark = node.start_mark
        self.problems.append(
            Problem(path, value, rule, suggestion, self.filename, mark.line + 1, mark.column + 1, fixes)
        )

    def stop(self, node: yaml.Node, path: str, rule: str, suggestion: str) -> None:
        if not self.stopped:
            self.report(node, path, None, rule, suggestion)
        self.stopped = True

    def within_limits(self, node: yaml.Node, path: str, depth: int) -> bool:
        self.count += 1
        if self.count > MAX_VALUES:
            self.stop(
                node,
                path,
                f"the file expands to more than {MAX_VALUES} values through its anchors and aliases",
                "Write the values out instead of repeating aliases.",
            )
        elif depth > MAX_DEPTH:
            self.stop(
                node,
                path,
                f"nests {depth} levels deep, and a file may nest {MAX_DEPTH}",
                "No field needs more: flatten this part.",
            )
        return not self.stopped

    def value(self, node: yaml.Node, path: str, depth: int) -> Any:
        if not self.within_limits(node, path, depth):
            return None
        if isinstance(node, yaml.MappingNode):
            self.expect_tag(node, path, "map")
            return self.mapping(node, path, depth + 1)
        if isinstance(node, yaml.SequenceNode):
            self.expect_tag(node, path, "seq")
            return self.sequence(node, path, depth + 1)
        return self.scalar(node, path)

    def expect_tag(self, node: yaml.Node, path: str, kind: str) -> None:
        if node.tag != _TAG + kind:
            tag = node.tag.replace(_TAG, "!!")
            self.report(node, path, tag, "is a tag, and a configuration has plain values only", "Remove the tag.")

    def sequence(self, node: yaml.SequenceNode, path: str, depth: int) -> list[Any]:
        items = []
        for index, item in enumerate(node.value):
            inner = f"{path}[{index}]"
            self.spots.setdefault(inner, _spot(item, item))
            items.append(self.value(item, inner, depth))
        return items

    def mapping(self, node: yaml.MappingNode, path: str, depth: int) -> dict[str, Any]:
        values: dict[str, Any] = {}
        merged: list[yaml.Node] = []
        for key_node, value_node in node.value:
            if self.stopped:
                break
            if key_node.tag == _TAG + "merge":
                merged.append(value_node)
                continue
            key = self.key(key_node, path)
            if key is None:
                continue
            inner = join(path, key)
            if key in values:
                first = self.spots[inner]
                self.report(
                    key_node,
                    inner,
                    None,
                    f"is written twice, first on line {first.key_line}, and only one value can hold",
                    f"Remove line {first.key_line} or line {key_node.start_mark.line + 1}.",
                )
                continue
            self.spots.setdefault(inner, _spot(key_node, value_node))
            values[key] = self.value(value_node, inner, depth)
        for value_node in merged:
            self.merge(value_node, path, depth, values)
        return values

    def key(self, node: yaml.Node, path: str) -> str | None:
        if isinstance(node, yaml.ScalarNode) and node.tag == _TAG + "str":
            return str(node.value)
        shown = node.value if isinstance(node, yaml.ScalarNode) else "?"
        self.report(
            node,
            path,
            shown,
            "is a key that YAML does not read as text",
            f"Quote it ('{shown}': ...), if it belongs here at all.",
        )
        return None

    def merge(self, node: yaml.Node, path: str, depth: int, values: dict[str, Any]) -> None:
        parts = node.value if isinstance(node, yaml.SequenceNode) else [node]
        for part in parts:
            if not self.within_limits(part, path, depth):
                return
            if not isinstance(part, yaml.MappingNode):
                self.report(
                    part,
                    join(path, "<<"),
                    None,
                    "merges something that is not a mapping",
                    "Name a mapping's anchor.",
                )
                continue
            for key, value in self.mapping(part, path, depth + 1).items():
                values.setdefault(key, value)

    def scalar(self, node: Any, path: str) -> Any:
        text, tag = str(node.value), node.tag.removeprefix(_TAG)
        if tag == "str" and not node.style and NUMBER_WITHOUT_POINT.fullmatch(text):
            tag = "float"
        if tag in {"int", "float"}:
            self.texts.setdefault(path, text)
        try:
            if tag == "null":
                return None
            if tag == "bool" and text.lower() in _TRUE | {"no", "false", "off"}:
                return text.lower() in _TRUE
            if tag == "int":
                return self.integer(node, path, text)
            if tag == "float":
                return _float(text)
        except (ValueError, OverflowError):
            self.report(node, path, text, f"is tagged !!{tag} and is none", "Remove the tag.")
            return None
        if tag not in {"str", "timestamp", "value"}:
            self.report(
                node,
                path,
                f"!!{tag} {text}",
                "carries a tag that no field takes",
                "Remove the tag; quote the value if it is text.",
            )
            return None
        return text

    def integer(self, node: yaml.ScalarNode, path: str, text: str) -> int | None:
        plain = text.replace("_", "")
        if _OCTAL.fullmatch(text):
            octal = int(plain, 8)
            decimal = plain.lstrip("+-0") or "0"
            self.report(
                node,
                path,
                text,
                f"starts with 0, which YAML reads as an octal number: {octal}",
                f"Write {decimal}" + (f", or {octal} if octal was meant." if str(octal) != decimal else "."),
                tuple((Edit(path, number),) for number in dict.fromkeys((int(decimal), octal))),
            )
            return None
        if ":" in text:
            self.report(
                node,
                path,
                text,
                "holds a colon, which YAML reads as a number in base 60",
                "Write the number in decimal, or quote it if it is text.",
                ((Edit(path, _base_60(plain)),), (Edit(path, text),)),
            )
            return None
        number = int(plain, 0) if len(plain) <= _LONGEST_INTEGER else _INT64
        if abs(number) >= _INT64:
            self.report(node, path, text, "does not fit into 64 bits", "Write a smaller number.")
            return None
        return number


def _base_60(text: str) -> int:
    number = 0
    for digits in text.lstrip("+-").split(":"):
        number = number * 60 + int(digits)
    return -number if text.startswith("-") else number


def _float(text: str) -> float | str:
    """The number; the text itself where the number is too large for one."""
    plain = text.replace("_", "").lower()
    special = {"nan": "nan", "inf": "inf"}.get(plain.lstrip("+-").removeprefix("."))
    if special:
        return float(("-" if plain.startswith("-") else "") + special)
    number = float(plain)
    return number if abs(number) < float("inf") else text


def _spot(key: yaml.Node, value: yaml.Node) -> Spot:
    start, name = value.start_mark, key.start_mark
    return Spot(name.line + 1, name.column + 1, start.line + 1, start.column + 1)
