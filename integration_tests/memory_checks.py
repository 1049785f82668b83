"""What a rank's memory is measured to hold during a step, beside what the plan says."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
from cases import BASELINES, CASES, Case, corpora
from device_mesh import Communicator
from mindspore import Tensor
from mindspore.common import _Function
from parallel_config import loads
from parallel_trainer.estimate import Estimate
from parallel_trainer.job import prepare
from parallel_trainer.kernels import cpu
from parallel_trainer.parallel.chunk import Chunk, Products, Tape
from parallel_trainer.parallel.fully_shard import ShardedWeight, ShardedWeights
from parallel_trainer.trainer import Trainer


@contextmanager
def after_each_call(owner: type, name: str, look: Callable[..., None]) -> Iterator[None]:
    """Call `look` with a method's arguments after each of its calls."""
    method = getattr(owner, name)

    def watched(*args: Any, **options: Any) -> Any:
        result = method(*args, **options)
        look(*args)
        return result

    setattr(owner, name, watched)
    try:
        yield
    finally:
        setattr(owner, name, method)


@contextmanager
def even_routing() -> Iterator[None]:
    """Routers choose experts in turn, whatever their logits: a rank's tokens go to all experts equally often."""

    def in_turn(logits: Tensor, *, top_k: int, **_: object) -> np.ndarray:
        tokens, experts = logits.shape
        return np.arange(tokens * top_k).reshape(tokens, top_k) % experts

    chosen = cpu.choose_experts
    cpu.choose_experts = in_turn
    try:
        yield
    finally:
        cpu.choose_experts = chosen


def saved_for_backward(weights: ShardedWeights) -> int:
    """Bytes held between forward and backward by functions, tapes and halves of a backward, shared memory once."""
    held: dict[int, int] = {}
    # A weak reference claims the class of what it refers to, but its type is its own.
    for found in gc.get_objects():
        kept: tuple[Any, ...] = ()
        if issubclass(type(found), _Function):
            kept = (*vars(found).values(), *(found.saved_tensors or ()))
        elif type(found) is Tape:
            kept = found.inputs
        elif type(found) is Products:
            kept = tuple(side for unit in found.units for _, left in unit for product in left for side in product.args)
        for value in kept:
            if isinstance(value, Tensor):
                storage = value.untyped_storage()
                held[storage.data_ptr()] = storage.size()
            elif isinstance(value, np.ndarray):
                held[value.ctypes.data] = value.nbytes
    for sharded in weights:
        held.pop(sharded.tensor.untyped_storage().data_ptr(), None)
    return sum(held.values())


def measured(trainer: Trainer) -> dict[str, int]:
    """Bytes that stay for a while, by what they are for, under the names of `Estimate.memory`."""
    weights, optimizer = trainer.weights, trainer.optimizer
    peak = {"gathered": 0, "saved": 0}
    whole: dict[str, int] = {}
    turns: list[Sequence[ShardedWeight]] = [()]

    def gathered(*_: object) -> None:
        found = sum(sharded.tensor.untyped_storage().size() for sharded in weights if not sharded.stays)
        peak["gathered"] = max(peak["gathered"], found)

    def saved(*_: object) -> None:
        peak["saved"] = max(peak["saved"], saved_for_backward(weights))

    def reduced(_: object, sharded: ShardedWeight, gradient: np.ndarray) -> None:
        whole[sharded.weight.name] = gradient.nbytes

    def done(chunk: Chunk, *_: object) -> None:
        turns.extend([weights[weight.name] for weight in unit.weights] for unit in reversed(chunk.units))

    def of(unit: Sequence[ShardedWeight], *, all_there: bool = True) -> int:
        return sum(whole.get(held.weight.name, 0) for held in unit if all_there or not held.stays)

    with ExitStack() as watching:
        # What is there now has not to be looked through each time.
        gc.freeze()
        watching.callback(gc.unfreeze)
        watching.enter_context(after_each_call(ShardedWeight, "gather", gathered))
        watching.enter_context(after_each_call(ShardedWeights, "add_gradient", reduced))
        watching.enter_context(after_each_call(Chunk, "forward", saved))
        watching.enter_context(after_each_call(Chunk, "backward_input", saved))
        for name in ("backward", "backward_input", "backward_weight"):
            watching.enter_context(after_each_call(Chunk, name, done))
        trainer.train_step()
    reshard = trainer.job.plan.reshard_after_forward
    # While a unit's gradients are made, those of the unit before are reduced, or all are added up.
    being_reduced = (of(before if reshard else list(weights), all_there=False) for before in turns)
    return {
        "parameters": weights.values.nbytes,
        "gradients": weights.gradients.nbytes,
        "whole gradients": max(there + of(unit) for there, unit in zip(being_reduced, turns[1:], strict=False)),
        "optimizer state": sum(
            array.nbytes for array in (optimizer.first_moment, optimizer.second_moment, optimizer.decay)
        ),
        "gathered parameters": peak["gathered"],
        "activations": peak["saved"],
    }


def held_memory(communicator: Communicator) -> dict[str, list[dict[str, list[int]]]]:
    """By case, for each rank: measured and planned bytes of each kind, where tokens go to all experts equally often."""
    texts = corpora()
    cases: dict[tuple[object, ...], Case] = {}
    for case in (*CASES, *(Case(model=model) for model in BASELINES)):
        if case.world == communicator.size and case.accumulation < 9:
            kind: tuple[object, ...] = (case.dimensions, case.model.mtp, case.zero_bubble)
            if case.world <= 2:
                kind += (case.asynchronous, case.loss_parallel, case.reshard == "never", case.paired)
            cases[kind] = case
    found = {}
    for case in cases.values():
        job = prepare(loads(case.yaml(texts)), communicator.size)
        with even_routing():
            numbers = measured(Trainer(job, communicator))
        planned = Estimate.of(job, communicator.rank).memory()
        pairs = np.array([[(kept, planned[kind]) for kind, kept in numbers.items()]])
        rows = communicator.all_gather(pairs).tolist()
        found[case.name] = [dict(zip(numbers, row, strict=True)) for row in rows]
    return found
