"""Plain values to the schema's classes, with every wrong type and unknown key reported at its place."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from attrs import Attribute, evolve, fields, fields_dict, frozen
from cattrs.errors import (
    AttributeValidationNote,
    BaseValidationError,
    ClassValidationError,
    ForbiddenExtraKeysError,
    IterableValidationNote,
)

from parallel_config.document import Document
from parallel_config.likeness import most_alike
from parallel_config.paths import Keys, as_keys, as_text, get, join, parent, with_value, without
from parallel_config.problems import Edit, Fix, Problem
from parallel_config.schema import TrainConfig
from parallel_config.schema.setting import limit_of
from parallel_config.value_types import NotSection, NotText, Rejected, converter, known_keys

_PROBABLY_MEANT = 0.75
"""Likeness from which a known key is taken for what an unknown one should be."""


@frozen
class Structured:
    """A configuration in which every field that failed has its default, and what failed."""

    config: TrainConfig
    problems: tuple[Problem, ...] = ()
    failed: frozenset[str] = frozenset()


def structure(document: Document) -> Structured:
    """Build the configuration from a document's values. Never raises on bad values: they become problems."""
    problems: list[Problem] = []
    failed: set[str] = {problem.path for problem in document.problems}
    values: Any = document.values
    for path in failed:
        values = _set_aside(values, _field(as_keys(path, values)))
    while True:
        try:
            config = converter().structure(values, TrainConfig)
            break
        except BaseValidationError as error:
            found = list(_rejections(error, (), TrainConfig, None))
            for rejection in found:
                problem = _problem(rejection, document)
                problems.append(problem)
                failed.add(as_text(rejection.field_path))
                failed |= _meant_instead(problem)
                values = _set_aside(values, rejection.field_path)
    return Structured(_completed(config, document), tuple(problems), frozenset(failed))


def _meant_instead(problem: Problem) -> set[str]:
    """Of a misspelt key, the field it stands for: that field's default would only mislead other rules."""
    renames = (edit for fix in problem.fixes for edit in fix if edit.action == "rename")
    return {join(parent(edit.path), edit.value) for edit in renames}


def _completed(config: TrainConfig, document: Document) -> TrainConfig:
    section = document.values.get("model")
    model = config.model.with_defaults(section if isinstance(section, Mapping) else ())
    if config.train_dataset.dataloader.config.create_compressed_eod_mask:
        model = evolve(model, use_eod_attn_mask_compression=True)
    return evolve(config, model=model, source=document)


def _completed_name(name: str, known: Iterable[str]) -> str | None:
    choices = sorted(known)
    return next((choice for choice in choices if len(name) > 3 and choice.startswith(name.lower() + "_")), None)


def _field(path: Keys, *, is_section: bool = False) -> Keys:
    """The field that `path` belongs to: a list of values is one field, a section in a list is looked into."""
    for depth, key in enumerate(path):
        if isinstance(key, int):
            inside = path[depth + 1 :]
            if not (isinstance(inside[0], str) if inside else is_section):
                return path[:depth]
    return path


def _set_aside(values: Any, path: Keys) -> Any:
    """Without the value at the path; a section in a list leaves an empty one, so that the others keep their index."""
    return with_value(values, path, {}) if path and isinstance(path[-1], int) else without(values, path)


@frozen
class _Rejection:
    path: Keys
    error: Exception
    owner: Any
    attribute: Attribute[Any] | None

    @property
    def field_path(self) -> Keys:
        return _field(self.path, is_section=isinstance(self.error, NotSection))


def _rejections(error: BaseException, path: Keys, owner: Any, attribute: Attribute[Any] | None) -> Iterator[_Rejection]:
    if isinstance(error, BaseValidationError):
        if isinstance(error, ClassValidationError):
            owner = error.cl
        for inner in error.exceptions:
            inner_path, inner_attribute = path, attribute
            for note in getattr(inner, "__notes__", ()):
                if isinstance(note, AttributeValidationNote):
                    inner_path = (*path, note.name)
                    inner_attribute = fields_dict(owner)[note.name]
                elif isinstance(note, IterableValidationNote):
                    inner_path = (*path, int(note.index))
            yield from _rejections(inner, inner_path, owner, inner_attribute)
    elif isinstance(error, ForbiddenExtraKeysError):
        for key in sorted(error.extra_fields):
            yield _Rejection((*path, key), error, owner, None)
    elif isinstance(error, Exception):
        yield _Rejection(path, error, owner, attribute)


def _problem(rejection: _Rejection, document: Document) -> Problem:
    path, error = as_text(rejection.path), rejection.error
    if isinstance(error, ForbiddenExtraKeysError):
        return _unknown(rejection, document)
    if not isinstance(error, Rejected):
        raise error
    value = get(document.values, rejection.path)
    limit = limit_of(rejection.attribute) if rejection.attribute is not None else None
    rule, suggestion, instead = error.rule, error.suggestion, error.instead
    if isinstance(error, NotText) and path in document.texts:
        written = document.texts[path]
        suggestion, instead = f"Quote it: '{written}'.", (written,)
    if limit is not None and limit.options:
        rule, instead = limit.rule(), limit.nearest(value)
        suggestion = f"Write {' or '.join(limit.options)}."
        if isinstance(value, bool):
            suggestion += " YAML reads yes, no, on and off as switches."
    last_resort = Edit(as_text(rejection.field_path), action="remove")
    if isinstance(error, NotSection) and isinstance(rejection.path[-1], int):
        # Without the item, those after it would have other paths.
        last_resort = Edit(path, _least_section(error.cls, value))
    fixes: tuple[Fix, ...] = (*((Edit(path, item),) for item in instead), (last_resort,))
    return document.problem(path, value, rule, suggestion, fixes=fixes)


def _least_section(cls: Any, value: Any) -> dict[str, Any]:
    """A section with nothing but what is chosen from options, the choice nearest to `value`."""
    limits = ((attribute.name, limit_of(attribute)) for attribute in fields(cls))
    return {name: limit.nearest(value)[0] for name, limit in limits if limit is not None and limit.options}


def _unknown(rejection: _Rejection, document: Document) -> Problem:
    path, key = as_text(rejection.path), str(rejection.path[-1])
    siblings = get(document.values, rejection.path[:-1])
    known = known_keys(rejection.owner)
    what = "section" if len(rejection.path) == 1 else "field"
    remove: Fix = (Edit(path, action="remove"),)
    meant, homes = (
        most_alike(key, known, at_least=_PROBABLY_MEANT) or _completed_name(key, known),
        _homes().get(key, ()),
    )
    rule, suggestion = f"is not a known {what}", "Remove it: nothing here is spelt like it."
    fixes: tuple[Fix, ...] = (remove,)
    if meant is not None and meant in siblings:
        suggestion = f"Did you mean {meant}? That is written too: keep one of the two."
    elif meant is not None:
        suggestion = f"Did you mean {meant}?"
        fixes = ((Edit(path, meant, action="rename"),), remove)
    elif homes and homes[0] != as_text(rejection.path[:-1]):
        rule, suggestion = f"is not a {what} here", f"It belongs to section {homes[0]}."
        if not document.has(join(homes[0], key)):
            fixes = ((Edit(path, homes[0], action="move"),), remove)
    elif what == "section":
        suggestion = f"Remove it; the sections are {', '.join(sorted(known))}."
    return document.problem(path, None, rule, suggestion, fixes=fixes, at_key=True)


@functools.cache
def _homes() -> Mapping[str, tuple[str, ...]]:
    homes: dict[str, tuple[str, ...]] = {}
    for section in ("parallelism", "training", "model", "checkpoint", "optimizer", "lr_scheduler"):
        cls: Any = type(getattr(TrainConfig(), section))
        for key in known_keys(cls):
            homes[key] = (*homes.get(key, ()), section)
    return homes
