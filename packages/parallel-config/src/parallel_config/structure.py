"""Plain values to the schema's classes, with every wrong type and unknown key reported at its place."""

from __future__ import annotations

import difflib
import functools
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from attrs import Attribute, evolve, fields_dict, frozen
from cattrs.errors import (
    AttributeValidationNote,
    BaseValidationError,
    ClassValidationError,
    ForbiddenExtraKeysError,
    IterableValidationNote,
)

from parallel_config.document import Document
from parallel_config.paths import Keys, as_keys, as_text, get, join, parent, without
from parallel_config.problems import Edit, Fix, Problem
from parallel_config.schema import TrainConfig
from parallel_config.schema.setting import limit_of
from parallel_config.value_types import Rejected, converter, known_keys


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
        values = without(values, _field(as_keys(path, values)))
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
                values = without(values, rejection.field_path)
    return Structured(_completed(config, document), tuple(problems), frozenset(failed))


def _meant_instead(problem: Problem) -> set[str]:
    """Of a misspelt key, the field it stands for: that field's default would only mislead other rules."""
    renames = (edit for fix in problem.fixes for edit in fix if edit.action == "rename")
    return {join(parent(edit.path), edit.value) for edit in renames}


def _completed(config: TrainConfig, document: Document) -> TrainConfig:
    model = config.model.with_defaults()
    if config.train_dataset.dataloader.config.create_compressed_eod_mask:
        model = evolve(model, use_eod_attn_mask_compression=True)
    return evolve(config, model=model, source=document)


def similar(name: str, known: Iterable[str], *, at_least: float = 0.75) -> str | None:
    """The known name that was probably meant, if one is alike enough (`at_least` 1.0: only the same)."""
    choices = sorted(known)
    close = difflib.get_close_matches(name.lower(), choices, n=1, cutoff=at_least)
    return close[0] if close else None


def _completed_name(name: str, known: Iterable[str]) -> str | None:
    choices = sorted(known)
    return next((choice for choice in choices if len(name) > 3 and choice.startswith(name.lower() + "_")), None)


def _field(path: Keys) -> Keys:
    """The field that `path` belongs to: a list item stands for its whole list."""
    return path[: next((depth for depth, key in enumerate(path) if isinstance(key, int)), len(path))]


@frozen
class _Rejection:
    path: Keys
    error: Exception
    owner: Any
    attribute: Attribute[Any] | None

    @property
    def field_path(self) -> Keys:
        return _field(self.path)


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
    if limit is not None and limit.options:
        rule, instead = limit.rule(), limit.options
        suggestion = f"Write {' or '.join(limit.options)}."
        if isinstance(value, bool):
            suggestion += " YAML reads yes, no, on and off as switches."
    fixes: tuple[Fix, ...] = tuple((Edit(path, item),) for item in instead)
    return document.problem(
        path, value, rule, suggestion, fixes=(*fixes, (Edit(as_text(rejection.field_path), action="remove"),))
    )


def _unknown(rejection: _Rejection, document: Document) -> Problem:
    path, key = as_text(rejection.path), str(rejection.path[-1])
    siblings = get(document.values, rejection.path[:-1])
    known = known_keys(rejection.owner)
    what = "section" if len(rejection.path) == 1 else "field"
    remove: Fix = (Edit(path, action="remove"),)
    meant, homes = similar(key, known) or _completed_name(key, known), _homes().get(key, ())
    rule, suggestion = f"is not a known {what}", "Remove it: nothing here is spelt like it."
    fixes: tuple[Fix, ...] = (remove,)
    if meant is not None and meant in siblings:
        suggestion = f"Did you mean {meant}? That is written too: keep one of the two."
    elif meant is not None:
        suggestion = f"Did you mean {meant}?"
        fixes = ((Edit(path, meant, action="rename"),), remove)
    elif homes and homes[0] != as_text(rejection.path[:-1]):
        rule, suggestion = f"is not a {what} here", f"It belongs to section {homes[0]}."
        move: Fix = (Edit(join(homes[0], key), get(document.values, rejection.path)), *remove)
        fixes = (move, remove)
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
