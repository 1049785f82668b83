"""World size and degrees: their product, the shard degree, the batch (specification, "Limitations")."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator

from parallel_config.paths import last
from parallel_config.problems import Edit, Fix, Problem
from parallel_config.rules.engine import Facts, rule
from parallel_config.rules.fitting import divisors, fits

_SECTION = "parallelism."
_SPLITTING = ("tensor_parallel", "context_parallel", "pipeline_parallel")


def near(choices: Iterable[int], value: int, count: int = 4) -> list[int]:
    """The choices closest in ratio to `value`, the closest first."""
    return sorted(choices, key=lambda choice: (abs(math.log(choice / max(value, 1))), choice))[:count]


def multiples(step: int, value: int) -> list[int]:
    """The multiples of `step` next to `value`, from below and above; never 0."""
    return sorted({max(value // step, 1) * step, (value // step + 1) * step})


def listed(numbers: Iterable[int]) -> str:
    """Numbers as a sentence offers them: "1, 2, 4 or 8"."""
    texts = [str(number) for number in numbers]
    return texts[0] if len(texts) == 1 else ", ".join(texts[:-1]) + " or " + texts[-1]


def set_each(path: str, values: Iterable[object]) -> list[Fix]:
    """One fix for each value."""
    return [(Edit(path, value),) for value in values]


@rule(*(_SECTION + name for name in _SPLITTING), decides=("data_parallel",), needs_world=True)
def product_of_degrees(facts: Facts) -> Iterator[Problem]:
    """tp · cp · pp divides world_size, so that no device is left over."""
    world, product = facts.world_size, facts.degrees_product
    assert world is not None
    if world % product == 0:
        return
    sizes = {name: facts.value(_SECTION + name) for name in _SPLITTING}
    culprits = [name for name, size in sizes.items() if world % size] or list(sizes)
    blamed = max(culprits, key=lambda name: sizes[name])
    factors = " · ".join(f"{name} {size}" for name, size in sizes.items())
    if world < product:
        outcome = "data_parallel would be 0"
    else:
        outcome = f"data_parallel would be {world // product} and {world % product} devices would be left over"
    fixes = _product_fixes(facts, world, sizes)
    alternatives = " or ".join(", ".join(f"{last(edit.path)} {edit.value}" for edit in fix) for fix in fixes[:3])
    worlds = listed(sorted({max(world // product, 1) * product, (world // product + 1) * product}))
    yield facts.problem(
        _SECTION + blamed,
        f"must let {factors} = {product} divide world_size {world} exactly ({outcome})",
        f"Use {alternatives}; or a world size of {worlds}.",
        fixes=fixes,
    )


def _product_fixes(facts: Facts, world: int, sizes: dict[str, int]) -> list[Fix]:
    """Degrees that share out the world and that sizes allow for: as few of them changed as possible, by as little."""
    tp, cp, pp = _SPLITTING
    degrees = divisors(world)
    allowed = {
        tp: [size for size in degrees if fits(facts, size, 1)],
        cp: [size for size in degrees if fits(facts, 1, size)],
        pp: degrees,
    }
    for changed in range(1, len(sizes) + 1):
        found: list[tuple[float, Fix]] = []
        for names in itertools.combinations(sizes, changed):
            for values in itertools.product(*({1, *near(allowed[name], sizes[name], 6)} for name in names)):
                changed_to = sizes | dict(zip(names, values, strict=True))
                if world % math.prod(changed_to.values()) == 0 and fits(facts, changed_to[tp], changed_to[cp]):
                    distance = sum(
                        abs(math.log(value / sizes[name])) for name, value in zip(names, values, strict=True)
                    )
                    edits = zip(names, values, strict=True)
                    found.append((distance, tuple(Edit(_SECTION + name, value) for name, value in edits)))
        if found:
            return [fix for _, fix in sorted(found, key=lambda item: item[0])][:6]
    return []


@rule(_SECTION + "data_parallel_shard", decides=("dp_shard", _SECTION + "data_parallel_shard"))
def shard_degree_value(facts: Facts) -> Iterator[Problem]:
    """The shard degree is -1 or positive."""
    shard, path = facts.parallelism.data_parallel_shard, _SECTION + "data_parallel_shard"
    if shard < 1 and shard != -1:
        yield facts.problem(
            path,
            "must be -1 (shard over all of data_parallel) or a positive number",
            "Write -1, or the number of ranks to shard over.",
            fixes=set_each(path, (-1, 1)),
        )


@rule(_SECTION + "data_parallel_shard", "data_parallel", decides=("dp_shard",), needs_world=True)
def shard_degree_divides(facts: Facts) -> Iterator[Problem]:
    """dp_shard divides data_parallel."""
    path, total = _SECTION + "data_parallel_shard", facts.data_parallel
    if total % facts.dp_shard == 0:
        return
    possible = divisors(total)
    yield facts.problem(
        path,
        f"must divide data_parallel = world_size {facts.world_size} // (tensor_parallel"
        f" {facts.parallelism.tensor_parallel} · context_parallel {facts.parallelism.context_parallel}"
        f" · pipeline_parallel {facts.parallelism.pipeline_parallel}) = {total}",
        f"Use {listed(possible)}, or -1 for all {total}.",
        fixes=set_each(path, [*near(possible, facts.dp_shard), -1]),
    )


@rule(
    _SECTION + "dense_fsdp_shard_size",
    _SECTION + "context_parallel",
    "data_parallel",
    "dp_shard",
    needs_world=True,
)
def dense_shard_size_divides(facts: Facts) -> Iterator[Problem]:
    """The narrower sharding of dense weights divides the fsdp group."""
    size, path = facts.parallelism.dense_fsdp_shard_size, _SECTION + "dense_fsdp_shard_size"
    group = facts.dp_shard * facts.parallelism.context_parallel
    if size is None or group % size == 0:
        return
    yield facts.problem(
        path,
        f"must divide dp_shard {facts.dp_shard} · context_parallel {facts.parallelism.context_parallel} = {group}",
        f"Use {listed(divisors(group))}, or null.",
        fixes=set_each(path, [*near(divisors(group), size), None]),
    )


@rule(
    "training.local_batch_size",
    "training.global_batch_size",
    "data_parallel",
    decides=("num_accumulation_steps",),
    needs_world=True,
)
def batch_divides(facts: Facts) -> Iterator[Problem]:
    """global_batch_size is a multiple of data_parallel · local_batch_size, so that no sample is dropped."""
    local, total, path = (
        facts.training.local_batch_size,
        facts.global_batch_size,
        "training.global_batch_size",
    )
    step = facts.data_parallel * local
    if total % step == 0:
        return
    multiples = sorted({max(total // step, 1) * step, (total // step + 1) * step})
    locals_ = [size for size in divisors(total) if total % (facts.data_parallel * size) == 0]
    alternative = f"; or local_batch_size {listed(near(locals_, local))}" if locals_ else ""
    yield facts.problem(
        path,
        f"must be a multiple of data_parallel {facts.data_parallel} · local_batch_size {local} = {step}",
        f"Use global_batch_size {listed(multiples)}{alternative}.",
        value=total,
        fixes=set_each(path, multiples) + set_each("training.local_batch_size", near(locals_, local)),
    )


@rule("training.rampup_batch_size", "training.global_batch_size", decides=("rampup",))
def rampup_levels(facts: Facts) -> Iterator[Problem]:
    """rampup_batch_size is [start, increment, samples] and reaches the global batch in whole increments."""
    ramp, path, final = (
        facts.training.rampup_batch_size,
        "training.rampup_batch_size",
        facts.training.global_batch_size,
    )
    if ramp is None:
        return
    none: list[Fix] = set_each(path, (None,))
    form = "must be three integers: start (≥ 1), increment (≥ 1) and samples (≥ 0)"
    if len(ramp) != 3 or ramp[0] < 1 or ramp[1] < 1 or ramp[2] < 0:
        yield facts.problem(
            path, form, f"Write [{final}, {final}, 0], or null for no ramp-up.", value=list(ramp), fixes=none
        )
    elif final == 1 and not facts.wrote("training.global_batch_size"):
        yield facts.problem(
            path,
            "needs global_batch_size, the size at which it ends",
            f"Write global_batch_size: {ramp[0]} plus a multiple of {ramp[1]}, or null here for no ramp-up.",
            value=list(ramp),
            fixes=[*set_each("training.global_batch_size", [ramp[0] + ramp[1]]), *none],
        )
    elif ramp[0] > final or (final - ramp[0]) % ramp[1]:
        yield facts.problem(
            path,
            f"must reach global_batch_size {final} from start {ramp[0]} in whole increments of {ramp[1]}",
            f"Use an increment that divides {max(final - ramp[0], 0)}, a start of at most {final}, or null.",
            value=list(ramp),
            fixes=none,
        )


@rule("rampup", "num_accumulation_steps", "training.local_batch_size", "data_parallel", needs_world=True)
def rampup_divides(facts: Facts) -> Iterator[Problem]:
    """Every batch size of the ramp-up is a multiple of data_parallel · local_batch_size."""
    ramp, path = facts.training.rampup_batch_size, "training.rampup_batch_size"
    step = facts.data_parallel * facts.training.local_batch_size
    if ramp is None or (ramp[0] % step == 0 and (ramp[0] == facts.global_batch_size or ramp[1] % step == 0)):
        return
    yield facts.problem(
        path,
        f"must have a start and an increment that are multiples of data_parallel {facts.data_parallel}"
        f" · local_batch_size {facts.training.local_batch_size} = {step}",
        f"Use multiples of {step}, or null for no ramp-up.",
        value=list(ramp),
        fixes=set_each(path, (None,)),
    )


RULES = (
    product_of_degrees,
    shard_degree_value,
    shard_degree_divides,
    dense_shard_size_divides,
    batch_divides,
    rampup_levels,
    rampup_divides,
)
