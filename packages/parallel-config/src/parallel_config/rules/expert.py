"""Expert parallelism: degrees, experts and routing groups (specification, section 5)."""

from __future__ import annotations

import math
from collections.abc import Iterator

from parallel_config.problems import Problem
from parallel_config.rules.degrees import listed, multiples, near, set_each
from parallel_config.rules.engine import Facts, rule
from parallel_config.rules.fitting import divisors
from parallel_config.rules.tensor import not_divided
from parallel_config.schema.model import MODEL_DEFAULTS

_EP = "parallelism.expert_parallel"
_NODE = "parallelism.npu_nums_per_device"
_DISPATCHER = "parallelism.moe_token_dispatcher_type"
_OVERLAP = "parallelism.pipeline_parallel_overlap_b_f"


@rule(
    _EP,
    "parallelism.tensor_parallel",
    "parallelism.context_parallel",
    "data_parallel",
    "dp_shard",
    needs_world=True,
)
def expert_degree(facts: Facts) -> Iterator[Problem]:
    """ep divides dp_shard · cp · tp, whose ranks it reuses."""
    sizes = facts.parallelism
    region = facts.dp_shard * sizes.context_parallel * sizes.tensor_parallel
    if region % sizes.expert_parallel == 0:
        return
    possible = divisors(region)
    yield facts.problem(
        _EP,
        f"must divide dp_shard {facts.dp_shard} · context_parallel {sizes.context_parallel}"
        f" · tensor_parallel {sizes.tensor_parallel} = {region}",
        f"Use {listed(possible)}.",
        fixes=set_each(_EP, near(possible, sizes.expert_parallel, 8)),
    )


_EXPERTS = ("model.n_routed_experts", "model.num_experts", "model.model_type")


@rule(_EP, *_EXPERTS)
def experts_exist(facts: Facts) -> Iterator[Problem]:
    """Expert parallelism is for models with experts."""
    ep, model = facts.parallelism.expert_parallel, facts.model
    if ep == 1 or model.experts is not None or model.model_type not in MODEL_DEFAULTS:
        return
    yield facts.problem(
        _EP,
        f"needs a model with experts, and model_type {model.model_type} without {model.experts_field} has none",
        "Use expert_parallel 1.",
        fixes=set_each(_EP, [1]),
    )


@rule(_EP, *_EXPERTS)
def experts_divide(facts: Facts) -> Iterator[Problem]:
    """Each expert-parallel rank holds whole experts."""
    path, ep = f"model.{facts.model.experts_field}", facts.parallelism.expert_parallel
    experts = facts.model.experts
    if experts is not None and experts % ep:
        degrees = divisors(math.gcd(experts, facts.room("expert_parallel")))
        yield not_divided(facts, _EP, path, degrees=degrees, sizes=multiples(ep, experts))


@rule(_EP, _NODE, _DISPATCHER)
def redundancy_free(facts: Facts) -> Iterator[Problem]:
    """alltoall_deredundancy works on whole nodes: ep is a multiple of the ranks per node."""
    sizes = facts.parallelism
    ep, node = sizes.expert_parallel, sizes.npu_nums_per_device
    if sizes.moe_token_dispatcher_type != "alltoall_deredundancy" or ep % node == 0:
        return
    rule_text = (
        f"must be ≥ npu_nums_per_device {node}" if ep < node else f"must be a multiple of npu_nums_per_device {node}"
    )
    split = math.gcd(facts.model.experts or 0, facts.room("expert_parallel"))  # 0, which all divide, where unknown
    multiples = [size for size in sorted({max(ep // node, 1) * node, (ep // node + 1) * node}) if split % size == 0]
    fitting = [size for size in divisors(ep) if size > 1]
    larger = f"expert_parallel {listed(multiples)}, or " if multiples else ""
    yield facts.problem(
        _EP,
        f"{rule_text} with moe_token_dispatcher_type alltoall_deredundancy",
        f"Use {larger}moe_token_dispatcher_type alltoall.",
        fixes=[
            *set_each(_DISPATCHER, ["alltoall"]),
            *set_each(_EP, multiples),
            *set_each(_NODE, near(fitting, node) if fitting else []),
        ],
    )


@rule(_EP, _DISPATCHER, _OVERLAP, "parallelism.pipeline_parallel")
def overlapped_dispatch(facts: Facts) -> Iterator[Problem]:
    """A backward is overlapped with a forward through the hooks of the plain all-to-all only."""
    sizes = facts.parallelism
    if not sizes.pipeline_parallel_overlap_b_f or sizes.pipeline_parallel == 1 or sizes.expert_parallel == 1:
        return
    if sizes.moe_token_dispatcher_type == "alltoall":
        return
    yield facts.problem(
        _OVERLAP,
        f"must be false with moe_token_dispatcher_type {sizes.moe_token_dispatcher_type}"
        f" and expert_parallel {sizes.expert_parallel} > 1",
        "Use false, or moe_token_dispatcher_type alltoall.",
        fixes=[*set_each(_OVERLAP, [False]), *set_each(_DISPATCHER, ["alltoall"])],
    )


@rule(*_EXPERTS, "model.num_experts_per_tok", "model.n_group", "model.topk_group")
def routing_groups(facts: Facts) -> Iterator[Problem]:
    """Experts form equal groups; a token takes equally many experts from each of its chosen groups."""
    model = facts.model
    experts, groups, chosen, top = (
        model.experts,
        model.n_group,
        model.topk_group,
        model.num_experts_per_tok,
    )
    if experts is None:
        return
    if top is not None and top > experts:
        path = "model.num_experts_per_tok"
        yield facts.problem(
            path,
            f"must be ≤ {model.experts_field} {experts}",
            f"Use at most {experts}.",
            fixes=set_each(path, [experts, 1]),
        )
    if groups is not None and experts % groups:
        path = "model.n_group"
        yield facts.problem(
            path,
            f"must divide {model.experts_field} {experts}",
            f"Use {listed(divisors(experts))}.",
            fixes=set_each(path, near(divisors(experts), groups, 8)),
        )
    if groups is not None and chosen is not None and chosen > groups:
        path = "model.topk_group"
        yield facts.problem(
            path, f"must be ≤ n_group {groups}", f"Use at most {groups}.", fixes=set_each(path, [groups, 1])
        )
    elif chosen is not None and top is not None and top % chosen:
        path = "model.topk_group"
        yield facts.problem(
            path,
            f"must divide num_experts_per_tok {top}",
            f"Use {listed(divisors(top))}.",
            fixes=set_each(path, near(divisors(top), chosen)),
        )
    elif groups is not None and chosen is not None and top is not None and experts % groups == 0:
        size, path = experts // groups, "model.topk_group"
        if chosen * size < top <= experts:
            possible = [number for number in divisors(top) if number <= groups and number * size >= top]
            advice = f"Use {listed(possible)}." if possible else f"Use num_experts_per_tok at most {chosen * size}."
            yield facts.problem(
                path,
                f"must leave num_experts_per_tok {top} experts to choose from, and {chosen} groups of"
                f" {experts} / {groups} = {size} have {chosen * size}",
                advice,
                fixes=[*set_each(path, possible), *set_each("model.num_experts_per_tok", [chosen * size])],
            )


RULES = (expert_degree, experts_exist, experts_divide, redundancy_free, overlapped_dispatch, routing_groups)
