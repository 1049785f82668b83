"""What else ranks are asked besides parity: cases from public bug reports and measurements of memory.

Each check runs on all ranks of the worlds listed for it in `CHECKS` and returns numbers that rank 0's report carries;
`test_checks.py` says what they have to be.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping
from itertools import combinations, groupby
from typing import Any
from weakref import WeakSet

import numpy as np
import psutil
from attrs import evolve
from bfloat16_checks import bfloat16_plans
from cases import CASES, Case, Model, corpora
from checkpoint_checks import relay, same_plan
from context_checks import attention_everywhere, empty_blocks, ring_memory
from device_mesh import Communicator, Traffic, connect
from empty_batch_checks import empty_batches
from evaluation_checks import evaluations
from expert_checks import router_that_is_not_finite
from memory_checks import even_routing, held_memory
from mindspore import Tensor, mint
from moe_dispatch import AllToAllDispatcher, DeredundantDispatcher
from parallel_config import ParallelPlan, loads
from parallel_trainer.batch import MicroBatch
from parallel_trainer.costs import OnRank
from parallel_trainer.estimate import Estimate
from parallel_trainer.job import prepare
from parallel_trainer.models.router import Routing
from parallel_trainer.models.unit import Unit
from parallel_trainer.optim.adamw import AdamW
from parallel_trainer.optim.gradient_norm import clip_coefficient, global_norm
from parallel_trainer.parallel.chunk import Chunk, Products, Tape
from parallel_trainer.parallel.expert_parallel import Dispatcher
from parallel_trainer.parallel.fully_shard import ShardedWeight, ShardedWeights
from parallel_trainer.parallel.pipeline import Pipeline
from parallel_trainer.parallel.weights import Constant, Normal, Weight
from parallel_trainer.step import StepResult, training_step
from parallel_trainer.trainer import Trainer
from pipeline_schedule import peak_activations
from weight_checks import fused_weights, narrow_stages, narrow_weights


class Scalar(Unit):
    """loss = at_one + slope·(w - 1), from `position_ids[0]` = (at_one, slope): any loss and any gradient."""

    def __init__(self) -> None:
        super().__init__([Weight("w", (1,), init=Constant(1.0))])

    def construct(self, x: Tensor, batch: MicroBatch, *weights: Tensor) -> Tensor:
        at_one, slope = (float(value) for value in batch.position_ids[0])
        return (at_one + slope * mint.sum(weights[0] - 1.0)).reshape(1)


def scalar_part(loss_sum: float, slope: float, valid_tokens: int) -> MicroBatch:
    numbers = np.array([[loss_sum, slope]])
    return MicroBatch(np.zeros((1, valid_tokens), np.int32), numbers)


def hsdp(communicator: Communicator, dp_shard: int) -> dict[str, Communicator]:
    """The groups of an HSDP mesh whose shard groups are neighbours."""
    return {
        "fsdp": communicator.split(communicator.rank // dp_shard),
        "dp_replicate": communicator.split(communicator.rank % dp_shard),
        "tp": connect("single"),
    }


def scalar_step(
    parts: list[MicroBatch],
    communicator: Communicator,
    groups: Mapping[str, Communicator],
    *,
    average: bool = False,
) -> tuple[StepResult, float]:
    """One step of the scalar model with lr 0; the result and the gradient of w."""
    weights = ShardedWeights(
        [Weight("w", (1,), init=Constant(1.0))],
        communicators=groups,
        dtype=np.dtype(np.float64),
        seed=0,
        average=average,
    )
    chunk = Chunk([Scalar()], weights, reshard_after_forward=True)
    result = training_step(
        Pipeline([chunk]),
        weights,
        parts,
        world=communicator,
        loss_group=communicator,
        optimizer=AdamW(weights.values),
        lr=0.0,
        max_norm=0.0,
    )
    held = groups["fsdp"].all_gather(weights.gradients, sizes=weights["w"].sizes)
    return result, float(held[0])


def uneven_valid_tokens(communicator: Communicator) -> dict[str, list[float]]:
    """PUB-LOSS-01: four parts with 6, 3, 1 and 2 valid tokens, on 2 ranks x 2, 4 ranks x 1, 1 rank x 4.

    In every layout of the ranks and with both reductions; returns the values of each by name.
    """
    parts = [(12.0, 6.0, 6), (9.0, 9.0, 3), (5.0, 8.0, 1), (4.0, 1.0, 2)]
    each = len(parts) // communicator.size
    mine = parts[communicator.rank * each : (communicator.rank + 1) * each]
    found = {}
    for dp_shard in (size for size in (1, 2, 4) if communicator.size % size == 0):
        for average in (False, True):
            batches = [scalar_part(*part) for part in mine]
            result, gradient = scalar_step(batches, communicator, hsdp(communicator, dp_shard), average=average)
            found[f"dp_shard {dp_shard}, {'mean' if average else 'sum'}"] = [
                result.loss,
                gradient,
                result.valid_tokens,
            ]
    return found


def sum_or_average(communicator: Communicator) -> dict[str, float]:
    """PUB-LOSS-02: y = w·x, mean over x = 1..8; the gradient of w for every layout and reduction."""
    found = {}
    x = float(communicator.rank + 1)
    for dp_shard in (1, 4, 8):
        for average in (False, True):
            _, gradient = scalar_step(
                [scalar_part(x, x, 1)], communicator, hsdp(communicator, dp_shard), average=average
            )
            found[f"dp_shard {dp_shard}, {'mean' if average else 'sum'}"] = gradient
    return found


def gradient_norms(communicator: Communicator) -> dict[str, float]:
    """PUB-NORM-01: sharded, replicated, expert and HSDP gradients."""
    rank = communicator.rank
    sharded = np.array([[1, 2], [2, 4], [4, 4], [6, 0]][rank], np.float64)
    replicated = np.array([2, 1, 1, 1], np.float64)
    norm = global_norm([(sharded, 1), (replicated, 4)], communicator)
    experts = np.array([[[2, 4], [4, 0]], [[4, 4], [4, 4]]][rank % 2], np.float64)
    replica = np.array([3.0, 4.0][rank % 2])
    return {
        "a": norm,
        "a_coefficient": clip_coefficient(norm, 5.0),
        "b": global_norm([(experts, 2)], communicator),
        "c": global_norm([(replica, 2)], communicator),
        "spread": float(communicator.all_reduce(np.array([norm]), "max")[0] - norm),
    }


def uneven_shards(communicator: Communicator) -> dict[str, Any]:
    """PUB-FSDP-01: a (5, 3) weight over four ranks, gradient r + 1 on rank r."""
    weights = ShardedWeights(
        [Weight("odd", (5, 3), init=Constant(0.0))],
        communicators=hsdp(communicator, communicator.size),
        dtype=np.dtype(np.float64),
        seed=0,
    )
    odd = weights["odd"]
    everything = np.array([[10.0 * row + column for column in range(3)] for row in range(5)]).reshape(-1)
    odd.values[...] = everything[odd.holding.start :][: odd.values.size]
    odd.gather()
    odd.wait()
    gathered = odd.tensor.asnumpy().tolist()
    odd.release()
    weights.add_gradient(odd, np.full((5, 3), communicator.rank + 1.0))
    weights.finish_gradients()
    return {
        "gathered": gathered,
        "elements_by_rank": [int(n) for n in communicator.all_gather(np.array([odd.values.size]))],
        "gradient": communicator.all_gather(weights.gradients, sizes=odd.sizes).tolist(),
        "norm": global_norm([(weights.gradients, 1)], communicator),
        "freed_bytes": odd.tensor.untyped_storage().size(),
    }


class Square(Unit):
    """x -> x + silu(x·w), w square."""

    def construct(self, x: Tensor, batch: MicroBatch, *weights: Tensor) -> Tensor:
        return x + mint.nn.functional.silu(mint.matmul(x, weights[0]))


class Sum(Unit):
    """x -> sum(x²)."""

    def construct(self, x: Tensor, batch: MicroBatch, *weights: Tensor) -> Tensor:
        return mint.sum(x * x)


def _stack(
    communicator: Communicator,
    width: int,
    depth: int,
    *,
    frozen: tuple[int, ...] = (),
    dp_shard: int | None = None,
    reshard: bool = True,
) -> Chunk:
    declared = [Weight(f"layer.{i}.w", (width, width), init=Normal(0.1)) for i in range(depth)]
    declared = [evolve(weight, trainable=i not in frozen) for i, weight in enumerate(declared)]
    weights = ShardedWeights(
        declared,
        communicators=hsdp(communicator, dp_shard or communicator.size),
        dtype=np.dtype(np.float64),
        seed=1,
    )
    return Chunk([*(Square([weight]) for weight in declared), Sum([])], weights, reshard_after_forward=reshard)


def _peak_gathered(chunk: Chunk, passes: int) -> tuple[int, list[int]]:
    """Largest number of bytes of gathered weights during `passes`, and the process's resident memory after each."""
    x, peak, resident = Tensor(np.ones((2, 400))), 0, []
    gather = ShardedWeight.gather

    def measured(sharded: ShardedWeight) -> None:
        nonlocal peak
        gather(sharded)
        peak = max(peak, sum(other.tensor.untyped_storage().size() for other in chunk.weights))

    ShardedWeight.gather = measured  # type: ignore[method-assign]
    try:
        for _ in range(passes):
            _, tape = chunk.forward(x, None)  # type: ignore[arg-type]
            chunk.backward(tape, Tensor(np.array(1.0)))
            chunk.end_step()
            gc.collect()
            resident.append(psutil.Process().memory_info().rss)
    finally:
        ShardedWeight.gather = gather  # type: ignore[method-assign]
    return peak, resident


def memory(communicator: Communicator) -> dict[str, Any]:
    """Weights in memory while six equal units run, in units of one: FSDP, HSDP, and kept gathered."""
    unit = 400 * 400 * 8
    found = {}
    for name, dp_shard, reshard, passes in (("fsdp", 4, True, 25), ("hsdp", 2, True, 2), ("never", 4, False, 2)):
        chunk = _stack(communicator, 400, 6, dp_shard=dp_shard, reshard=reshard)
        peak, resident = _peak_gathered(chunk, passes)
        found[name] = {
            "shards": chunk.weights.values.nbytes / unit,
            "peak_gathered": peak / unit,
            "left_gathered": sum(sharded.tensor.untyped_storage().size() for sharded in chunk.weights),
        }
        if name == "fsdp":
            found["growth"] = (resident[-1] - resident[4]) / unit
    return found


def frozen_weights(communicator: Communicator) -> dict[str, Any]:
    """Three layers, the middle one frozen: gradients of the others equal those of the unfrozen stack."""
    x = Tensor(np.linspace(-1, 1, 14).reshape(2, 7))
    gradients = []
    for frozen in ((), (1,)):
        chunk = _stack(communicator, 7, 3, frozen=frozen)
        _, tape = chunk.forward(x, None)  # type: ignore[arg-type]
        chunk.backward(tape, Tensor(np.array(1.0 / communicator.size)))
        chunk.weights.finish_gradients()
        gradients.append(
            {
                sharded.weight.name: communicator.all_gather(
                    chunk.weights.gradients[sharded.slice], sizes=sharded.sizes
                )
                for sharded in chunk.weights.trainable
            }
        )
    everything, partly = gradients
    return {
        "trainable": sorted(partly),
        "difference": max(float(np.abs(everything[name] - partly[name]).max()) for name in partly),
        "largest": max(float(np.abs(values).max()) for values in partly.values()),
        "state_elements": int(communicator.all_reduce(np.array([chunk.weights.gradients.size]))[0]),
    }


def even_communication(communicator: Communicator) -> dict[str, dict[str, Any]]:
    """What ranks receive in a step where tokens go to all experts equally often, by case, one of each kind.

    Of this rank measured and planned, and how many ranks differ. Every other plan is compared where it is trained
    (`ranks.trace`). So is one whose dispatcher sends a token to a node once: that is planned for random choices.
    """
    texts = corpora()
    cases: dict[tuple[object, ...], Case] = {}
    for case in CASES:
        if case.world == communicator.size and case.ep > 1 and not case.node and case.model.dtype == "float64":
            cases.setdefault((case.dimensions, case.ep, case.model.mtp), case)
    found = {}
    for case in cases.values():
        job = prepare(loads(case.yaml(texts)), communicator.size)
        traffic = Traffic()
        trainer = Trainer(job, communicator, traffic=traffic)
        traffic.calls.clear()
        with even_routing():
            trainer.train_step()
        estimate = Estimate.of(job, communicator.rank)
        measured, planned = +traffic.received_bytes(), estimate.communication()
        measured["ep (even routing)"] = measured.pop("ep")
        same = measured == planned
        found[case.name] = {
            "ranks that differ": int(communicator.all_reduce(np.array([0 if same else 1]))[0]),
            "measured": dict(measured),
            "planned": dict(planned),
        }
    return found


def expert_exchange(communicator: Communicator) -> dict[str, dict[str, list[float]]]:
    """What a rank sends and receives for tokens that choose every pair of experts once, and what is planned, by node.

    Forward and backward of one layer; within nodes, between them, and received in all.
    """
    world, hidden, experts = communicator.size, 6, 2 * communicator.size
    routing = Routing(experts=experts, inner=4, top_k=2, scoring="softmax", normalized=True)
    ids = np.array(list(combinations(range(experts), routing.top_k)))
    x, weights = np.ones((len(ids), hidden)), np.ones(ids.shape)
    found = {}
    for node in (None, *(size for size in (1, 2, 4) if size <= world)):
        plan = ParallelPlan.from_degrees(
            world,
            expert_parallel=world,
            moe_token_dispatcher_type="alltoall" if node is None else "alltoall_deredundancy",
            npu_nums_per_device=node or 8,
        )
        planned = OnRank(plan, 0, len(ids), x.itemsize, loss_parallel=False).experts(hidden, routing).received
        traffic = Traffic()
        group = traffic.count(communicator, "ep")
        dispatcher: Dispatcher = AllToAllDispatcher(group, experts)
        if node:
            dispatcher = DeredundantDispatcher(group, experts, node)
        route = dispatcher.route(ids)
        rows = route.dispatch(x)
        d_rows, _ = route.combine_gradient(route.combine(rows, weights), rows, weights)
        route.dispatch_gradient(d_rows)
        sent = dispatcher.sent
        names = ("ep (even routing)", "ep within nodes (even routing)", "ep between nodes (even routing)")
        found[f"nodes of {node}"] = {
            "measured": [sent.within_nodes, sent.between_nodes, traffic.received_bytes()["ep"]],
            "planned": [planned[names[0]] + planned[names[1]], planned[names[2]], sum(planned.values())],
        }
    return found


def layer_traffic(communicator: Communicator) -> dict[str, list[list[Any]]]:
    """Calls on the tensor-parallel axis during the first block's forward and backward, and those outside blocks."""
    traffic = Traffic()
    case = Case(tp=communicator.size, loss_parallel=True)
    Trainer(prepare(loads(case.yaml(corpora())), communicator.size), communicator, traffic=traffic).train_step()
    return {
        during: [
            [call.operation, call.received_bytes]
            for call in traffic.calls
            if call.group == "tp" and call.during == during
        ]
        for during in ("embedding forward", "layers.0 forward", "layers.0 backward", "head forward", "head backward")
    }


def experts_meanwhile(communicator: Communicator) -> dict[str, list[str]]:
    """What starts and ends over tensor and expert parallelism in a layer with a shared expert, by part of the step."""
    moments = _moments(
        communicator, Case(tp=communicator.size, ep=communicator.size, model=Model(architecture="deepseek_v3"))
    )
    return {
        part: [f"{axis} {moment}" for axis, _, during, moment in moments if during == part and axis in ("tp", "ep")]
        for part in ("layers.1 forward", "layers.1 backward")
    }


def units_meanwhile(communicator: Communicator) -> dict[str, list[str]]:
    """By what travels, what it does before, while and after a unit runs, which calls of tensor parallelism show."""
    moments = _moments(communicator, Case(dp_shard=communicator.size // 2, tp=2, reshard="always"))
    found = {}
    for operation, travelling, running in (
        ("all_gather", "layers.1 forward", "layers.0 forward"),
        ("all_gather", "layers.0 backward", "layers.1 backward"),
        ("reduce_scatter", "layers.1 backward", "layers.0 backward"),
    ):
        both = [
            moment if axis == "fsdp" else "the unit runs"
            for axis, called, during, moment in moments
            if (axis, called, during) == ("fsdp", operation, travelling) or (axis, during) == ("tp", running)
        ]
        found[f"{operation} of {travelling}"] = [what for what, _ in groupby(both)]
    return found


def _moments(communicator: Communicator, case: Case) -> list[tuple[str, str, str, str]]:
    """Axis, operation, part and "start" or "end" of all that a rank calls in a step."""
    traffic = Traffic()
    Trainer(prepare(loads(case.yaml(corpora())), communicator.size), communicator, traffic=traffic).train_step()
    found = [(moment.call.group, moment.call.operation, moment.call.during, moment.what) for moment in traffic.moments]
    assert sum(what == "start" for *_, what in found) == sum(what == "end" for *_, what in found)
    return found


def calls_of_one_rank(communicator: Communicator) -> dict[str, list[list[Any]]]:
    """Every call of a step on one rank, with all that a plan of one rank can have."""
    traffic = Traffic()
    case = Case(loss_parallel=True, reshard="always", accumulation=3, model=Model(tied=True, bias=True))
    trainer = Trainer(prepare(loads(case.yaml(corpora())), communicator.size), communicator, traffic=traffic)
    traffic.calls.clear()
    trainer.train_step()
    return {"calls": [[call.group, call.operation, call.during, call.received_bytes] for call in traffic.calls]}


def live_activations(communicator: Communicator) -> dict[str, dict[str, list[int]]]:
    """By schedule the most passes on each rank that were between a forward and the end of its backward; its numbers."""
    layers = 2 * communicator.size
    base = Case(pp=communicator.size, accumulation=9, model=Model(layers=layers, batch=36))
    found = {}
    orders: dict[str, dict[str, Any]] = {
        "none": {"chunks": 2},
        "zbh1": {"zero_bubble": "zbh1"},
        "zbv": {"zero_bubble": "zbv", "chunks": 2},
        "gpipe": {"schedule": "gpipe"},
    }
    for name, order in orders.items():
        case = evolve(base, **order)
        trainer = Trainer(prepare(loads(case.yaml(corpora())), communicator.size), communicator)
        peak, left = _live(trainer)
        everywhere = communicator.all_gather(np.array([[peak, left]]))
        found[name] = {
            "peaks": everywhere[:, 0].tolist(),
            "left": everywhere[:, 1].tolist(),
            "schedule": list(peak_activations(trainer.pipeline.schedule(9))),
        }
    return found


def _live(trainer: Trainer) -> tuple[int, int]:
    """The most tapes, and products left for later, that were alive during a step; how many are after it."""
    alive: WeakSet[Tape | Products] = WeakSet()
    peak = 0

    def watched(method: Callable[..., tuple[Tensor, Tape | Products]]) -> Callable[..., tuple[Tensor, Any]]:
        def run(*arguments: Any) -> tuple[Tensor, Any]:
            nonlocal peak
            out, kept = method(*arguments)
            alive.add(kept)
            if isinstance(kept, Tape):
                peak = max(peak, len(alive))
            return out, kept

        return run

    for chunk in trainer.pipeline.chunks:
        chunk.forward = watched(chunk.forward)  # type: ignore[method-assign]
        chunk.backward_input = watched(chunk.backward_input)  # type: ignore[method-assign]
    trainer.train_step()
    return peak, len(alive)


CHECKS: Mapping[Callable[[Communicator], dict[str, Any]], tuple[int, ...]] = {
    uneven_valid_tokens: (1, 2, 4),
    sum_or_average: (8,),
    gradient_norms: (4,),
    uneven_shards: (4,),
    memory: (4,),
    frozen_weights: (2, 4),
    fused_weights: (2, 4),
    narrow_weights: (2, 4),
    narrow_stages: (2, 4),
    attention_everywhere: (2, 4, 8),
    empty_blocks: (2, 4, 8),
    ring_memory: (4, 8),
    held_memory: (1, 2, 4),
    even_communication: (2, 4, 8),
    expert_exchange: (2, 4, 8),
    layer_traffic: (2, 4),
    experts_meanwhile: (2, 4),
    units_meanwhile: (4,),
    calls_of_one_rank: (1,),
    live_activations: (4,),
    router_that_is_not_finite: (2, 4),
    relay: (2, 4, 8),
    same_plan: (1, 2, 4),
    evaluations: (1, 2, 4),
    empty_batches: (1, 2, 4),
    bfloat16_plans: (2, 4),
}
