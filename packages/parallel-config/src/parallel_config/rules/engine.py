"""What a rule is, what it may look at, and in which order rules run so that no fault is reported twice."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import cached_property
from typing import Any

from attrs import define, frozen, has

from parallel_config.paths import parent
from parallel_config.problems import Fix, Problem
from parallel_config.schema import Model, Parallelism, TrainConfig, Training
from parallel_config.schema.model import MODEL_DEFAULTS


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

    def room(self, degree: str) -> int:
        """The ranks that a degree of `parallelism` has to divide, as far as they are known; 0 if not at all.

        The greatest common divisor with it leaves only sizes that the degree can really have.
        """
        if self.world_size is None:
            return 0
        sizes, others = self.parallelism, 1
        for name in ("tensor_parallel", "context_parallel", "pipeline_parallel"):
            others *= getattr(sizes, name) if name != degree else 1
        if others < 1:
            return 0
        if self.world_size % others:
            return self.world_size
        if degree != "expert_parallel":
            return self.world_size // others
        shard = self.data_parallel if sizes.data_parallel_shard == -1 else max(sizes.data_parallel_shard, 1)
        return shard * sizes.context_parallel * sizes.tensor_parallel

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
        if has(type(shown)):
            shown = None
        if shown is not None and not self.wrote(path):
            rule = self._origin(path, shown) + rule
        return self.config.source.problem(path, shown, rule, suggestion, fixes=tuple(fixes), unsupported=unsupported)

    def _origin(self, path: str, shown: Any) -> str:
        """For a field that the file does not write: whose default its value is."""
        section, _, name = path.rpartition(".")
        model_type = self.model.model_type or ""
        if section == "model" and MODEL_DEFAULTS.get(model_type, {}).get(name) == shown:
            return f"(the default of model_type {model_type}) "
        return "(the default) " if Facts(TrainConfig(), None).value(path) == shown else ""


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
        found = [problem for problem in each.find(facts) if at_fault.isdisjoint(_with_sections([problem.path]))]
        if found:
            at_fault |= each.decides
        yield from found
