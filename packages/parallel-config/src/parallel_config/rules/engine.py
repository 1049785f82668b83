"""What a rule is, what it may look at, and in which order rules run so that no fault is reported twice."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import cached_property
from typing import Any

from attrs import define, frozen

from parallel_config.paths import parent
from parallel_config.problems import Fix, Problem
from parallel_config.schema import Model, Parallelism, TrainConfig, Training


@define(slots=False)
class Facts:
    """A configuration and a world size (None while it is not known), with what follows from them.

    A derived value is meaningful only where the rule that decides it found no problem: see `Rule.reads`.
    """

    config: TrainConfig
    world_size: int | None

    @property
    def parallelism(self) -> Parallelism:
        return self.config.parallelism

    @property
    def training(self) -> Training:
        return self.config.training

    @property
    def model(self) -> Model:
        return self.config.model

    @cached_property
    def degrees_product(self) -> int:
        """Ranks that one data-parallel replica takes: tp · cp · pp."""
        sizes = self.parallelism
        return sizes.tensor_parallel * sizes.context_parallel * sizes.pipeline_parallel

    @cached_property
    def data_parallel(self) -> int:
        assert self.world_size is not None
        return self.world_size // self.degrees_product

    @cached_property
    def dp_shard(self) -> int:
        shard = self.parallelism.data_parallel_shard
        return self.data_parallel if shard == -1 else shard

    @cached_property
    def global_batch_size(self) -> int:
        """The written size; where the file writes neither batch size, one micro-batch for every replica."""
        training = self.training
        if self.batch_is_inferred:
            return self.data_parallel * training.local_batch_size
        return training.global_batch_size

    @cached_property
    def batch_is_inferred(self) -> bool:
        sizes = ("training.local_batch_size", "training.global_batch_size")
        return self.training.global_batch_size == 1 and not any(map(self.wrote, sizes))

    def wrote(self, path: str) -> bool:
        """Whether the file writes this section or field."""
        return path in self.config.source.written

    def value(self, path: str) -> Any:
        """The value at a dotted path without list items; None where there is no such field."""
        value: Any = self.config
        for name in path.split("."):
            value = getattr(value, name, None)
        return value

    def problem(
        self,
        path: str,
        rule: str,
        suggestion: str,
        *,
        value: Any = None,
        fixes: Iterable[Fix] = (),
        unsupported: bool = False,
    ) -> Problem:
        """A problem of the field at `path`, with the field's value unless another is given."""
        shown = self.value(path) if value is None else value
        if path.startswith("model.") and shown is not None and not self.wrote(path):
            rule = f"(the default of model_type {self.model.model_type}) {rule}"
        return self.config.source.problem(path, shown, rule, suggestion, fixes=tuple(fixes), unsupported=unsupported)


@frozen
class Rule:
    """One rule of the specification.

    `reads` names the fields and derived values it looks at: where one of them is already at fault, the rule
    does not run. `decides` names what is at fault when it finds a problem.
    """

    find: Callable[[Facts], Iterable[Problem]]
    reads: frozenset[str]
    decides: frozenset[str]
    needs_world: bool


def rule(
    *reads: str, decides: tuple[str, ...] = (), needs_world: bool = False
) -> Callable[[Callable[[Facts], Iterable[Problem]]], Rule]:
    """Turn a function that finds problems into a rule."""

    def declare(find: Callable[[Facts], Iterable[Problem]]) -> Rule:
        return Rule(find, frozenset(_with_sections(reads)), frozenset(decides), needs_world)

    return declare


def _with_sections(paths: Iterable[str]) -> Iterator[str]:
    for path in paths:
        while path:
            yield path
            path = parent(path)


def run(rules: Iterable[Rule], facts: Facts, failed: Iterable[str]) -> Iterator[Problem]:
    """The problems that the rules find, in their order; a rule does not run on what is already at fault."""
    at_fault = set(failed)
    for each in rules:
        if each.needs_world and facts.world_size is None:
            continue
        if not at_fault.isdisjoint(each.reads):
            at_fault |= each.decides
            continue
        found = list(each.find(facts))
        if found:
            at_fault |= each.decides
        yield from found
