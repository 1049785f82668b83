"""The reference of all fields: a page of Markdown, and an answer in the terminal."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby

from parallel_config.effects import Field, all_fields
from parallel_config.likeness import most_alike
from parallel_config.schema.model import MODEL_EXTRAS

_INTRODUCTION = """# Every field of a file

`parallel-config fields --markdown` writes this page from the declarations of the fields. In a terminal,
`parallel-config fields parallelism.tensor_parallel` shows one field, `parallel-config fields parallelism` a section.

"Acted on by" says which engine does what the field asks for, or refuses the file where it cannot:

| word | meaning |
|---|---|
| both engines | `native`, which is this project itself, and `hyperparallel` |
| native, hyperparallel | this engine alone; with the other one a run prints a note that the field has no effect |
| nothing | the field is accepted, because files of MindFormers have it, and a run prints a note that it has no effect |
| reserved | MindFormers documents the field, and nothing reads it there either |

Names of models after the engine are the model types that have the field. "Of the model" as a default means that the
model type decides. `callbacks[]` stands for each item of a list."""


def markdown() -> str:
    """All fields as a page, a table for each section."""
    lines = [_INTRODUCTION]
    for (section, about), found in groupby(all_fields().values(), key=lambda field: (_section(field), field.section)):
        lines += ["", *([f"## {section}", "", about, ""] if section else ["## At the top of the file", ""])]
        lines += ["| field | type | default | values | acted on by | meaning |", "|---|---|---|---|---|---|"]
        lines += [_row(field) for field in found]
    lines += ["", "## Further keys of model", "", "| model type | keys that it acts on |", "|---|---|"]
    lines += [f"| {model} | {', '.join(f'`{key}`' for key in sorted(keys))} |" for model, keys in MODEL_EXTRAS.items()]
    return "\n".join(lines) + "\n"


def _section(field: Field) -> str:
    return field.path.rpartition(".")[0]


def _row(field: Field) -> str:
    name = field.path.rpartition(".")[2]
    cells = [f"`{name}`", field.type, f"`{field.default}`", field.allowed, field.acts, field.effect.about]
    return f"| {' | '.join(cells)} |"


def described(path: str) -> str | None:
    """What a person is told of a field, or of each field of a section; None where there is neither."""
    inside = (f"{path}.", f"{path}[].")
    found = [field for field in all_fields().values() if field.path == path or field.path.startswith(inside)]
    return "\n\n".join(map(_paragraph, found)) or None


def _paragraph(field: Field) -> str:
    values = f", {field.allowed}" if field.allowed else ""
    return (
        f"{field.path}\n  {field.effect.about}\n  {field.type}{values}; default {field.default}"
        f"\n  acted on by: {field.acts}"
    )


def nearest(path: str) -> str | None:
    """The field whose path, or whose own name, is most like this one."""
    known: Iterable[str] = all_fields()
    by_name = {name.rpartition(".")[2]: name for name in known}
    alike = most_alike(path.rpartition(".")[2], by_name, at_least=0.6)
    return most_alike(path, known, at_least=0.8) or (by_name[alike] if alike else None)
