"""One training step: micro-batches, the gradient norm, the update."""

from __future__ import annotations

import re
from collections.abc import Sequence

from parallel_config import ParallelPlan

from parallel_trainer.engines.hyperparallel.blocks import Block
from parallel_trainer.engines.hyperparallel.calls import Attribute, Call, Module, Name, Phase, Use
from parallel_trainer.engines.hyperparallel.fully_shard import HSDP_MODULE, of_experts, replicated
from parallel_trainer.engines.hyperparallel.pipeline import seed
from parallel_trainer.engines.hyperparallel.tensor_parallel import divides

_RUNTIME = "parallel_trainer.engines.hyperparallel.runtime"


def micro_batches(plan: ParallelPlan) -> Phase:
    """Forward and backward of all of a step's micro-batches. `batches` gives the inputs of this rank.

    `set_requires_all_reduce(False)` would save an all-reduce for each but the last, and is not called: of a unit that
    all-reduces alone, HyperParallel would then lose the gradients of all but the last.
    """
    inputs = Call(Name("builtins.next"), (Use("batches"),), result="inputs")
    if plan.pp > 1:
        run = Call(Attribute(Use("schedule"), "run", ""), spread=Use("inputs"), why="all stages read the same rows")
        return Phase("all micro-batches of a step", (inputs, run))
    forward = Call(Module(), spread=Use("inputs"), result="loss")
    ranks = plan.world_size // plan.pp
    why = f"1 / (world_size // pp) / micro-batches = 1 / {ranks} / {plan.num_accumulation_steps}"
    backward = Call(Name(f"{_RUNTIME}.backward"), (Use("loss"), seed(plan)), why=why)
    return Phase("each micro-batch of a step", (inputs, forward, backward), plan.num_accumulation_steps)


def norm_divisors(blocks: Sequence[Block], plan: ParallelPlan) -> dict[str, int]:
    """How many ranks hold the same element of a gradient, by the parameter's name with * for the layer's number."""
    found = {}
    for block in blocks:
        for name, weight in block.weights.items():
            if not weight.trainable:
                continue
            copies = plan.dp_replicate
            if of_experts(block, name, plan):
                copies *= plan.efsdp if replicated(block, name, plan) else 1
            else:
                copies *= 1 if divides(weight, plan) else plan.tp
                copies *= plan.fsdp if replicated(block, name, plan) else 1
            found[re.sub(r"\.layers\.\d+\.", ".layers.*.", f"{block.module.name}.{name}")] = copies
    return found


def update(blocks: Sequence[Block], plan: ParallelPlan, chunks: int, max_norm: float) -> Phase:
    """The gradient norm over all ranks, each element once; then the caller's optimizer."""
    modules = [Module("", chunk) for chunk in range(chunks)]
    calls = [
        Call(
            Name(f"{_RUNTIME}.squared_norm"),
            (modules, norm_divisors(blocks, plan)),
            result="squares",
            why="of main_grad where there is one; divided by the ranks that hold the same element",
        ),
        Call(Name("mindspore.mint.distributed.all_reduce"), (Use("squares"),), {"op": "sum"}),
    ]
    calls.append(Call(Name(f"{_RUNTIME}.clip"), (modules, Use("squares")), {"max_norm": max_norm}, result="norm"))
    calls.append(Call(Attribute(Use("optimizer"), "step", ""), (Use("norm"),)))
    calls += [Call(Attribute(module, "zero_grad", HSDP_MODULE)) for module in modules]
    return Phase("the end of a step", tuple(calls))
