"""Pipeline parallelism: where the layers go (specification, section 4.4), and which schedules fit that."""

from __future__ import annotations

from collections.abc import Iterator

from parallel_config.paths import last
from parallel_config.problems import Edit, Fix, Problem, show
from parallel_config.rules.degrees import near, set_each
from parallel_config.rules.engine import Facts, rule
from parallel_config.rules.fitting import divisors
from parallel_config.stages import (
    BadItem,
    as_items,
    coverage_faults,
    even_ranges,
    in_virtual_order,
    joined,
    parse_item,
    parse_ranges,
    stage_ranks,
)

_LAYERS = "parallelism.pipeline_parallel_layers_per_stage"
_PP = "parallelism.pipeline_parallel"
_CHUNKS = "parallelism.pipeline_parallel_interleave_num"
_ZERO_BUBBLE = "parallelism.pipeline_parallel_zero_bubble"
_OVERLAP = "parallelism.pipeline_parallel_overlap_b_f"
_SCHEDULE = "parallelism.pipeline_parallel_schedule"
_CHUNKS_OF = {"zbh1": 1, "zbv": 2}


@rule(_PP, _CHUNKS, _ZERO_BUBBLE, _OVERLAP, decides=("stage_ranks",))
def zero_bubble(facts: Facts) -> Iterator[Problem]:
    """A zero-bubble schedule has its own number of chunks, and its own order of forwards and backwards."""
    name, chunks = facts.parallelism.pipeline_parallel_zero_bubble, facts.value(_CHUNKS)
    if name == "none" or facts.parallelism.pipeline_parallel == 1:
        return
    needed = _CHUNKS_OF[name]
    others = [other for other, number in _CHUNKS_OF.items() if number == chunks]
    if chunks != needed:
        choices = [f"pipeline_parallel_interleave_num {needed}", *others, "none"]
        yield facts.problem(
            _ZERO_BUBBLE,
            f"needs pipeline_parallel_interleave_num {needed}, the chunks of a stage in {name}, and it is {chunks}",
            f"Use {', or '.join(choices)}.",
            fixes=[*set_each(_ZERO_BUBBLE, [*others, "none"]), *set_each(_CHUNKS, [needed])],
        )
    elif facts.parallelism.pipeline_parallel_overlap_b_f:
        yield facts.problem(
            _OVERLAP,
            f"must be false with pipeline_parallel_zero_bubble {name}, which orders forwards and backwards otherwise",
            "Use false, or pipeline_parallel_zero_bubble none.",
            fixes=[*set_each(_OVERLAP, [False]), *set_each(_ZERO_BUBBLE, ["none"])],
        )


@rule(_PP, _CHUNKS, _ZERO_BUBBLE, _OVERLAP, _SCHEDULE)
def schedule(facts: Facts) -> Iterator[Problem]:
    """GPipe has one chunk on each stage and all forwards before all backwards; interleaving takes several chunks."""
    sizes, name = facts.parallelism, facts.parallelism.pipeline_parallel_schedule
    chunks = sizes.pipeline_parallel_interleave_num
    if sizes.pipeline_parallel == 1 or name == "1f1b":
        return
    if name == "interleaved_1f1b":
        if chunks == 1:
            yield facts.problem(
                _SCHEDULE,
                "needs pipeline_parallel_interleave_num ≥ 2, the chunks of a stage that take turns, and it is 1",
                "Use 1f1b, or pipeline_parallel_interleave_num 2.",
                fixes=[*set_each(_SCHEDULE, ["1f1b"]), *set_each(_CHUNKS, [2])],
            )
        return
    others = {_CHUNKS: (chunks, 1), _ZERO_BUBBLE: (sizes.pipeline_parallel_zero_bubble, "none")}
    others[_OVERLAP] = (sizes.pipeline_parallel_overlap_b_f, False)
    for path, (value, needed) in others.items():
        if value != needed:
            yield facts.problem(
                path,
                f"must be {show(needed)} with pipeline_parallel_schedule gpipe,"
                " which runs all forwards of one chunk a stage before all backwards",
                f"Use {show(needed)}, or pipeline_parallel_schedule 1f1b.",
                fixes=[*set_each(path, [needed]), *set_each(_SCHEDULE, ["1f1b"])],
            )


@rule(_PP, _CHUNKS, _LAYERS, "stage_ranks", "model.num_hidden_layers", decides=("stage_layers",))
def layers_per_stage(facts: Facts) -> Iterator[Problem]:
    """With pp > 1 the layers are `auto` and divide evenly, or a list that covers each layer exactly once."""
    if facts.parallelism.pipeline_parallel == 1:
        return
    written = facts.parallelism.pipeline_parallel_layers_per_stage
    if written is None:
        yield _not_written(facts)
    elif isinstance(written, str):
        yield from _automatic(facts, written)
    else:
        yield from _explicit(facts, written)


def _proposal(facts: Facts) -> list[str] | None:
    pp, chunks = facts.parallelism.pipeline_parallel, facts.parallelism.pipeline_parallel_interleave_num
    layers = facts.model.num_hidden_layers
    ranges = even_ranges(layers, pp * chunks) if layers is not None else None
    return as_items(ranges, _ranks(facts, pp, chunks)) if ranges else None


def _ranks(facts: Facts, pp: int, chunks: int) -> tuple[int, ...]:
    return stage_ranks(pp, chunks, facts.parallelism.pipeline_parallel_zero_bubble)


def _divides(facts: Facts) -> bool:
    pp, chunks = facts.parallelism.pipeline_parallel, facts.parallelism.pipeline_parallel_interleave_num
    layers = facts.model.num_hidden_layers
    return layers is None or layers % (pp * chunks) == 0


def _fixes(facts: Facts) -> list[Fix]:
    items = _proposal(facts)
    fixes = set_each(_LAYERS, ["auto"]) if _divides(facts) else []
    if items:
        return fixes + set_each(_LAYERS, [items])
    layers = facts.model.num_hidden_layers
    if layers is None:
        return fixes
    fewer = [size for size in divisors(layers) if size < facts.value(_PP)]
    return fixes + set_each(_CHUNKS, [1]) + set_each(_PP, near(fewer, facts.value(_PP)))


def _not_written(facts: Facts) -> Problem:
    pp, items = facts.parallelism.pipeline_parallel, _proposal(facts)
    if _divides(facts):
        suggestion = "Write auto, or list the layers of each stage."
    elif items:
        suggestion = f"List the layers of each stage: {show(items)}."
    else:
        suggestion = f"Use fewer stages: {facts.model.num_hidden_layers} layers do not fill them."
    return facts.problem(_LAYERS, f"must be written with pipeline_parallel {pp} > 1", suggestion, fixes=_fixes(facts))


def _automatic(facts: Facts, written: str) -> Iterator[Problem]:
    pp, chunks = facts.parallelism.pipeline_parallel, facts.parallelism.pipeline_parallel_interleave_num
    proposal = _proposal(facts)
    if written.lower() != "auto":
        yield facts.problem(
            _LAYERS,
            f"must be auto or a list with one text for each of the {pp} stages",
            f"Write auto, or a list such as {show(proposal)}." if proposal else "Write auto.",
            fixes=_fixes(facts),
        )
    elif not _divides(facts):
        layers = facts.model.num_hidden_layers
        if proposal:
            suggestion = f"List the layers of each stage instead: {show(proposal)}."
        else:
            suggestion = f"Use at most {layers} stages in all, or a model with more layers."
        yield facts.problem(
            _LAYERS,
            f"needs num_hidden_layers {layers} to be a multiple of pipeline_parallel {pp}"
            f" · pipeline_parallel_interleave_num {chunks} = {pp * chunks}",
            suggestion,
            fixes=_fixes(facts),
        )


def _explicit(facts: Facts, items: tuple[str, ...]) -> Iterator[Problem]:
    pp, chunks = facts.parallelism.pipeline_parallel, facts.parallelism.pipeline_parallel_interleave_num
    near_by = _kept(facts, items)
    example = _proposal(facts)
    instead = f"For example: {show(example)}." if example else "Give each layer to exactly one virtual stage, in order."
    if near_by:
        instead = f"Use {', '.join(f'{last(edit.path)} {show(edit.value)}' for edit in near_by[0])}."
    fixes = [*near_by, *_fixes(facts)]
    if len(items) != pp:
        yield facts.problem(
            _LAYERS,
            f"must have one item for each of the {pp} stages (pipeline_parallel {pp}), and has {len(items)}",
            instead,
            value=list(items),
            fixes=fixes,
        )
        return
    by_stage, malformed = [], False
    for index, item in enumerate(items):
        try:
            by_stage.append(parse_item(item, index, chunks))
        except BadItem as bad:
            malformed = True
            yield facts.problem(f"{_LAYERS}[{index}]", bad.rule, instead, value=item, fixes=fixes)
    if malformed:
        return
    layers = facts.model.num_hidden_layers
    for fault in coverage_faults(in_virtual_order(by_stage, _ranks(facts, pp, chunks)), layers):
        end = "the last layer" if layers is None else f"num_hidden_layers - 1 = {layers - 1}"
        yield facts.problem(
            _LAYERS,
            f"must place layers 0 to {end} once each, in the order of the virtual stages: {fault}",
            instead,
            value=list(items),
            fixes=fixes,
        )


def _kept(facts: Facts, items: tuple[str, ...]) -> list[Fix]:
    """The fix that keeps a placement as it is written, as far as possible: it has its own stages and chunks."""
    try:
        by_stage = [parse_ranges(item, index) for index, item in enumerate(items)]
    except BadItem:
        return []
    if len({len(ranges) for ranges in by_stage}) != 1:
        return []
    pp, chunks, layers = len(by_stage), len(by_stage[0]), facts.model.num_hidden_layers
    if _CHUNKS_OF.get(facts.parallelism.pipeline_parallel_zero_bubble, chunks) != chunks:
        return []
    ranks = _ranks(facts, pp, chunks)
    ranges = in_virtual_order(by_stage, ranks)
    edits = [Edit(path, number) for path, number in ((_PP, pp), (_CHUNKS, chunks)) if facts.value(path) != number]
    if coverage_faults(ranges, layers):
        moved = joined(ranges, ranges[-1][1] + 1 if layers is None else layers)
        if not coverage_faults(upwards := tuple(sorted(ranges)), layers):
            moved = upwards
        if moved is None:
            return []
        edits.append(Edit(_LAYERS, as_items(moved, ranks)))
    return [tuple(edits)]


RULES = (zero_bubble, schedule, layers_per_stage)
