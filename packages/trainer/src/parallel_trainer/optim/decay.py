"""Which weights decay: the rules of `optimizer.weight_decay_include` and `weight_decay_exclude`."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import cached_property
from itertools import pairwise

from attrs import define, frozen
from parallel_config import TrainConfig
from parallel_config.problems import show
from parallel_config.schema import Optimizer

from parallel_trainer.errors import UserError
from parallel_trainer.optim.mindformers_names import mindformers_names
from parallel_trainer.parallel.weights import Weight

_FIELDS = ("weight_decay_include", "weight_decay_exclude")
_MOST_SHOWN = 8


def decaying(weights: Iterable[Weight], section: Optimizer) -> dict[str, bool]:
    """By name of each trained weight of a whole model whether weight decay applies to it.

    A rule matches a name that it equals, is a part of, or matches as a glob: names here, or, where it matches none of
    them, MindFormers'. `include` beats `exclude`, and both beat the default: everything decays except one-dimensional
    weights (norms) and biases.
    """
    trained = {weight.name: weight for weight in weights if weight.trainable}
    names = _Names(tuple(trained))
    include, exclude = (
        {name for rule in getattr(section, field) or () for name in names.matched(rule).names} for field in _FIELDS
    )
    return {name: name in include or (name not in exclude and _by_default(weight)) for name, weight in trained.items()}


def decay_notes(weights: Iterable[Weight], config: TrainConfig) -> tuple[str, ...]:
    """What a file's rules match by a name of MindFormers, in sentences.

    weights: of the whole model. Raises one UserError with all rules that match no weight that is trained.
    """
    trained = {weight.name: weight for weight in weights if weight.trainable}
    names = _Names(tuple(trained))
    notes, problems = [], []
    for field in _FIELDS:
        for place, rule in enumerate(getattr(config.optimizer, field) or ()):
            found = names.matched(rule)
            path = f"optimizer.{field}[{place}]"
            if not found.names:
                what = "must match a weight of this model, and matches none"
                problems.append(str(config.source.problem(path, rule, what, names.suggestion(rule))))
            elif found.of_mindformers:
                notes.append(
                    f"optimizer.{field} {show(rule)} is a name in MindFormers; here it means {_listed(found.names)}."
                )
            elif others := _decided_otherwise(field, names, rule, trained):
                notes.append(
                    f"optimizer.{field} {show(rule)} is a part of names here, which count, and of other names in "
                    f"MindFormers, by which it would decide otherwise for {_listed(others)}."
                )
    if problems:
        raise UserError("Rules of weight decay without a weight:", problems)
    return tuple(notes)


def _by_default(weight: Weight) -> bool:
    return len(weight.shape) > 1 and not weight.name.endswith("bias")


def _matches(name: str, rule: str) -> bool:
    return rule in name or fnmatchcase(name, rule)


@frozen
class _Match:
    """The weights that a rule means, and whether by names of MindFormers."""

    names: tuple[str, ...]
    of_mindformers: bool = False


@define(slots=False)
class _Names:
    """The names of the weights that are trained."""

    here: tuple[str, ...]

    @cached_property
    def of_mindformers(self) -> Mapping[str, tuple[str, ...]]:
        """By each name here."""
        return mindformers_names(self.here)

    def matched(self, rule: str) -> _Match:
        """What a rule means."""
        here = tuple(name for name in self.here if _matches(name, rule))
        return _Match(here) if here else _Match(self.matched_there(rule), of_mindformers=True)

    def matched_there(self, rule: str) -> tuple[str, ...]:
        """What it means where all names are MindFormers'."""
        every = self.of_mindformers.items()
        return tuple(name for name, theirs in every if any(_matches(each, rule) for each in theirs))

    def suggestion(self, rule: str) -> str:
        """The parts of names most like it, or all parts."""
        parts = list(dict.fromkeys(part for name in self.here for part in _parts(name)))
        theirs = (part for names in self.of_mindformers.values() for name in names for part in _parts(name))
        near = difflib.get_close_matches(rule.strip("*."), dict.fromkeys([*parts, *theirs]), n=3, cutoff=0.5)
        if near:
            return f"Nearest are {', '.join(near)}."
        return f"Weights here are called {', '.join(parts[:30])}."


def _parts(name: str) -> Iterator[str]:
    """What a name can be told by: its parts, but for numbers, and two that follow one another."""
    unspecific = ("model", "decoder", "layers", "weight", "bias")
    parts = [part for part in name.split(".") if part not in unspecific and not part.isdigit()]
    yield from parts
    yield from (f"{first}.{second}" for first, second in pairwise(parts))


def _decided_otherwise(field: str, names: _Names, rule: str, trained: Mapping[str, Weight]) -> Sequence[str]:
    """Weights that a rule by MindFormers' names would decide otherwise; none where it is no part of these."""
    theirs = names.matched_there(rule)
    if not theirs:
        return ()
    decided = field == "weight_decay_include"
    differ = set(theirs) ^ set(names.matched(rule).names)
    return [name for name, weight in trained.items() if name in differ and _by_default(weight) is not decided]


def _listed(names: Iterable[str]) -> str:
    """The first few names, with a star for the numbers of several layers."""
    kinds: dict[str, list[str]] = {}
    for name in names:
        kinds.setdefault(re.sub(r"\.\d+\.", ".*.", name), []).append(name)
    shown = [kind if len(alike) > 1 else alike[0] for kind, alike in kinds.items()]
    more = f" and {len(shown) - _MOST_SHOWN} more" if len(shown) > _MOST_SHOWN else ""
    return f"{', '.join(shown[:_MOST_SHOWN])}{more}"
