"""What kind of file a document is, and whether the model it names exists: asked before any of its fields is judged.

MindFormers has two formats. This project reads the one of its dynamic-graph (PyNative) mode. The older one, of the
graph mode, has other sections; its fields would each be refused, and edits that make such a file valid would take its
parallelism and its model away. So a file of that format is one problem without edits, and so is a model that does not
exist here: rules of another model would only mislead.
"""

from __future__ import annotations

import functools
import re
import shlex
from typing import Any

from attrs import evolve, fields, frozen, has

from parallel_config.document import Document
from parallel_config.likeness import most_alike
from parallel_config.paths import as_keys, get
from parallel_config.problems import Problem, show
from parallel_config.schema import TrainConfig
from parallel_config.schema.model import MODEL_DEFAULTS
from parallel_config.value_types import known_keys

MODELS = tuple(MODEL_DEFAULTS)
"""The model types that exist here."""

_ONLY_GRAPH_MODE = (
    "parallel_config",
    "runner_config",
    "runner_wrapper",
    "train_dataset_task",
    "recompute_config",
    "model.model_config",
    "grouped_lr_schedule",
)
"""Sections that only a file of the graph mode has (mindformers 2.1.0: tools/register/template.py)."""

_ONLY_DYNAMIC = ("parallelism", "training", "lr_scheduler", "recompute", "recompute_comm", "model.model_type")
"""Sections and fields that only a file of the dynamic-graph mode has (mindformers 2.1.0: pynative/config/config.py)."""

_PROBABLY_MEANT = 0.75
_MODEL_NAMES = (
    "model.model_config.model_type",
    "model.model_config.type",
    "model.arch.type",
    "model.model_config.architectures",
    "trainer.model_name",
)
"""Where a file of the graph mode names its model; the first that is written decides."""

_NO_MODEL = frozenset({"", "llm", "general", "common"})
"""Values of trainer.model_name that name none."""


@frozen
class NamedModel:
    """What a file of the graph mode calls its model: the field, its value, and the model here; None: there is none."""

    path: str
    value: str
    model_type: str | None


def foreign(document: Document) -> Problem | None:
    """The one problem of a file that is not of the format read here, or of a model that does not exist here."""
    if is_graph_mode(document):
        problem: Problem | None = mixed(document) or _graph_mode(document)
    else:
        problem = _unknown_model(document) or _no_configuration(document)
    return problem if problem is None else evolve(problem, mendable=False)


def is_graph_mode(document: Document) -> bool:
    """Whether the file has a section that only MindFormers' graph mode has."""
    return any(document.has(path) for path in _ONLY_GRAPH_MODE)


def mixed(document: Document) -> Problem | None:
    """The problem of a file with sections of both formats."""
    old, new = _written(document, _ONLY_GRAPH_MODE), _written(document, _ONLY_DYNAMIC)
    if not (old and new):
        return None
    return document.problem(
        old[0],
        None,
        f"belongs to MindFormers' graph-mode format, and {_places(document, new)} to its dynamic-graph format:"
        " a file has one of the two",
        "Keep the sections of one format; a file of the first is converted by parallel-config migrate.",
        at_key=True,
    )


def named_model(document: Document) -> NamedModel | None:
    """The model that a file of the graph mode names; None where it leaves that to a Hugging Face folder."""
    for path in _MODEL_NAMES:
        value = written_value(document, path)
        if isinstance(value, list) and len(value) == 1:
            value = value[0]
        if isinstance(value, str) and value.lower() not in _NO_MODEL:
            return NamedModel(path, value, model_type_of(value))
    return None


def model_type_of(name: str) -> str | None:
    """The model type here that a name stands for: a model type, a class or a trainer's name, in any spelling.

    >>> model_type_of("deepseekV3"), model_type_of("Qwen3MoeForCausalLM"), model_type_of("glm4")
    ('deepseek_v3', 'qwen3_moe', None)
    """
    plain = _letters(re.sub("(ForCausalLM|Config)$", "", name))
    return next((model for model in MODELS if _letters(model) == plain), None)


def missing_model(document: Document, named: NamedModel) -> Problem:
    """The problem of a file of the graph mode whose model does not exist here."""
    return document.problem(named.path, named.value, "names a model that does not exist here", _the_models(named.value))


def written_value(document: Document, path: str) -> Any:
    """The value at a path; None where nothing is written."""
    if not document.has(path):
        return None
    return get(document.values, as_keys(path, document.values))


def _graph_mode(document: Document) -> Problem:
    found = _written(document, _ONLY_GRAPH_MODE)
    others = f", and so is {_places(document, found[1:2])}" if found[1:] else ""
    rule = f"is a section of MindFormers' graph-mode format{others}: files of its dynamic-graph format are read here"
    named, mode = named_model(document), written_value(document, "run_mode")
    if named is not None and named.model_type is None:
        rule += f"; and its model, {named.value} ({_places(document, [named.path])}), does not exist here"
        suggestion = f"There is nothing to convert it to. {_the_models(named.value)}"
    elif isinstance(mode, str) and mode not in TRAINING_MODES:
        rule += f"; and run_mode {mode} ({_places(document, ['run_mode'])}) trains nothing"
        suggestion = "There is nothing to convert it to: this project trains and evaluates."
    else:
        suggestion = (
            f"Convert it: parallel-config migrate {shlex.quote(document.filename or 'FILE')} --output NEW.yaml."
        )
    return document.problem(found[0], None, rule, suggestion, at_key=True)


TRAINING_MODES = ("train", "finetune")
"""The values of run_mode with which MindFormers trains."""


def _unknown_model(document: Document) -> Problem | None:
    name = written_value(document, "model.model_type")
    if not isinstance(name, str) or not name or name in MODELS:
        return None
    return document.problem("model.model_type", name, "names a model that does not exist here", _the_models(name))


def _no_configuration(document: Document) -> Problem | None:
    """The problem of a file with several sections of which none is, or resembles, one of a configuration."""
    sections, known = list(document.values), known_keys(TrainConfig)
    if len(sections) < 2 or any(_belongs(section, known) for section in sections):
        return None
    shown = ", ".join(map(show, sections[:4])) + (", …" if len(sections) > 4 else "")
    return document.problem(
        sections[0],
        None,
        f"begins a file without a section of a training configuration: it has {shown}",
        f"The sections are {', '.join(sorted(known))}.",
        at_key=True,
    )


def _belongs(section: str, known: frozenset[str]) -> bool:
    return (
        section in _field_names()
        or most_alike(section, known, at_least=_PROBABLY_MEANT) is not None
        or any(name.startswith(section.lower() + "_") for name in known if len(section) > 3)
    )


@functools.cache
def _field_names() -> frozenset[str]:
    """The fields of all sections: at the top they are probably misplaced."""
    sections: list[Any] = [type(getattr(TrainConfig(), attribute.name)) for attribute in fields(TrainConfig)]
    return frozenset(name for section in sections if has(section) for name in known_keys(section))


def _written(document: Document, paths: tuple[str, ...]) -> list[str]:
    return sorted((path for path in paths if document.has(path)), key=lambda path: _line(document, path))


def _line(document: Document, path: str) -> int:
    spot = document.spots.get(path)
    return spot.key_line if spot else 0


def _places(document: Document, paths: list[str]) -> str:
    return ", ".join(_place(document, path) for path in paths)


def _place(document: Document, path: str) -> str:
    line = _line(document, path)
    return f"{path}, line {line}" if line else path


def _the_models(name: str) -> str:
    meant = model_type_of(name) or most_alike(name, MODELS, at_least=_PROBABLY_MEANT)
    if meant and re.findall(r"\d+", meant) != re.findall(r"\d+", name):
        meant = None  # deepseek_v4 is another model, not a misspelt one
    return f"The models are {', '.join(MODELS[:-1])} and {MODELS[-1]}." + (f" Did you mean {meant}?" if meant else "")


def _letters(name: str) -> str:
    return re.sub("[^a-z0-9]", "", name.lower())
