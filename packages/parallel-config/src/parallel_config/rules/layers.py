"""Layer lists of recomputation and swapping: written "n" or "a-b", upwards, within the model."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress

from parallel_config.problems import Edit, Problem, show
from parallel_config.rules.degrees import set_each
from parallel_config.rules.engine import Facts, rule
from parallel_config.stages import BadRange, parse_range


def _last_layer(facts: Facts) -> int | None:
    layers = facts.model.num_hidden_layers
    return None if layers is None else layers + (facts.model.num_nextn_predict_layers or 0) - 1


def _faults(specs: Iterable[str], last: int | None) -> Iterator[str]:
    previous = -1
    for spec in specs:
        try:
            start, end = parse_range(spec)
        except BadRange as bad:
            yield str(bad)
            continue
        if start > end or start <= previous:
            yield f"must list layers upwards, and {spec} does not start above {max(previous, end)}"
        elif last is not None and end > last:
            yield f"must stay within layers 0 to {last}, and {spec} does not"
        previous = max(previous, end)


def _check(facts: Facts, path: str, specs: Iterable[str]) -> Iterator[Problem]:
    last = _last_layer(facts)
    whole = "0" if last in (None, 0) else f"0-{last}"
    instead = _in_order(specs, last) or [whole]
    for fault in _faults(specs, last):
        yield facts.problem(
            path, fault, f"For example {show(instead)}.", value=list(specs), fixes=set_each(path, [instead])
        )


def _in_order(specs: Iterable[str], last: int | None) -> list[str]:
    """The specs that can be read, upwards, those that overlap as one, cut at the last layer."""
    pairs = []
    for spec in specs:
        with suppress(BadRange):
            pairs.append(parse_range(spec))
    ranges: list[tuple[int, int]] = []
    for start, end in sorted((min(pair), max(pair)) for pair in pairs):
        if last is not None and start > last:
            break
        if ranges and start <= ranges[-1][1]:
            start, end = ranges[-1][0], max(ranges.pop()[1], end)
        ranges.append((start, end if last is None else min(end, last)))
    return [str(start) if start == end else f"{start}-{end}" for start, end in ranges]


def _check_modules(facts: Facts, path: str, modules: Mapping[str, Iterable[str]] | None) -> Iterator[Problem]:
    for module, specs in (modules or {}).items():
        yield from _check(facts, f"{path}.{module}", specs)


_RECOMPUTE = (
    "recompute.mode",
    "recompute.full_recompute_layer",
    "recompute.select_module",
    "model.num_hidden_layers",
)


@rule(*_RECOMPUTE, "recompute.exclude_op")
def recompute(facts: Facts) -> Iterator[Problem]:
    """Mode full names layers, mode select names modules."""
    section = facts.config.recompute
    off = [(Edit("recompute.mode", "None"),)]
    if section.mode == "full" and not section.full_recompute_layer:
        yield facts.problem(
            "recompute.full_recompute_layer",
            "must list layers with mode full",
            'For example ["0-3"]; or mode None.',
            fixes=off,
        )
    if section.mode == "select" and not section.select_module:
        yield facts.problem(
            "recompute.select_module",
            "must give layers for at least one module with mode select",
            'For example {"self_attention": ["0-3"]}; or mode None.',
            fixes=off,
        )
    yield from _check(facts, "recompute.full_recompute_layer", section.full_recompute_layer or ())
    yield from _check_modules(facts, "recompute.select_module", section.select_module)
    if isinstance(section.exclude_op, dict):
        yield from _check_modules(facts, "recompute.exclude_op", section.exclude_op)


@rule("recompute_comm.enable", "recompute_comm.select_module", "model.num_hidden_layers")
def recompute_comm(facts: Facts) -> Iterator[Problem]:
    """Switched on, it names modules."""
    section, path = facts.config.recompute_comm, "recompute_comm.select_module"
    if section.enable and not section.select_module:
        yield facts.problem(
            path,
            "must give layers for at least one module with enable true",
            'For example {"linear_proj": ["0-3"]}; or enable false.',
            fixes=set_each("recompute_comm.enable", [False]),
        )
    yield from _check_modules(facts, path, section.select_module)


@rule("swap", "swap.enable", "parallelism.pipeline_parallel")
def swap_without_pipeline(facts: Facts) -> Iterator[Problem]:
    """Swapping and pipelining exclude each other."""
    pp = facts.parallelism.pipeline_parallel
    if facts.config.swap.enable and pp > 1:
        yield facts.problem(
            "swap.enable",
            f"must be false with pipeline_parallel {pp} > 1",
            "Use false, or pipeline_parallel 1.",
            fixes=[*set_each("swap.enable", [False]), *set_each("parallelism.pipeline_parallel", [1])],
        )


@rule(
    "swap",
    "swap.enable",
    "swap.default_prefetch",
    "swap.layer_swap",
    "swap.op_swap",
    "model.num_hidden_layers",
)
def swapped_layers(facts: Facts) -> Iterator[Problem]:
    """Prefetching stays inside the model: the last swapped layer + default_prefetch < num_hidden_layers."""
    section, layers = facts.config.swap, facts.model.num_hidden_layers
    if not section.enable:
        return
    prefetch, path = section.default_prefetch, "swap.default_prefetch"
    entries = [(f"swap.layer_swap[{index}].layers", entry.layers) for index, entry in enumerate(section.layer_swap)]
    entries += [(f"swap.op_swap[{index}].layers", entry.layers) for index, entry in enumerate(section.op_swap)]
    if layers is not None and prefetch > layers - 1:
        yield facts.problem(
            path,
            f"must be ≤ num_hidden_layers {layers} - 1 = {layers - 1}",
            f"Use at most {layers - 1}." if layers > 1 else "Use swap.enable false: one layer has nothing to swap.",
            fixes=set_each(path, [layers - 1] if layers > 1 else []) + set_each("swap.enable", [False]),
        )
        return
    for where, specs in entries:
        faults = list(_check(facts, where, specs))
        yield from faults
        highest = max((int(spec.rpartition("-")[2]) for spec in specs), default=0) if not faults else 0
        if layers is not None and highest + prefetch >= layers:
            yield facts.problem(
                where,
                f"must keep its last layer {highest} + default_prefetch {prefetch} below num_hidden_layers {layers}",
                f"Swap layers up to {layers - prefetch - 1}.",
                value=list(specs),
                fixes=set_each(where, [[f"0-{layers - prefetch - 1}"]]) + set_each("swap.enable", [False]),
            )


RULES = (recompute, recompute_comm, swap_without_pipeline, swapped_layers)
