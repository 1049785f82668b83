"""What a plan costs a rank, from declarations and arithmetic: parameters, memory and communication of one step.

Parameters, what is kept in memory, and communication are counted as runs count them, and tests compare.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator
from collections.abc import Set as AbstractSet

from attrs import frozen
from device_mesh import ParallelMesh

from parallel_trainer.activations import heads_inside, logits_at_work, most_kept, sizes, tokens_inside
from parallel_trainer.job import Job
from parallel_trainer.kernels import kernels
from parallel_trainer.models import build_model
from parallel_trainer.models.config import Qwen3Config
from parallel_trainer.parallel.layout import WeightPart, weight_part
from parallel_trainer.parallel.pipeline import stage_units, weight_ranks
from parallel_trainer.parallel.weights import Weight, shard_sizes, split_evenly

KINDS = {"embed_tokens": "embedding", "lm_head": "head", "self_attn": "attention", "mlp": "feed-forward"}
"""Kinds of weights by a part of their names; what is left are norms."""


@frozen
class HeldWeight:
    """What one rank holds of a weight: `elements` of its tensor-parallel part, which has `part.size`."""

    part: WeightPart
    elements: int

    @property
    def kind(self) -> str:
        """Which kind of weight it is, for a table."""
        name = self.part.weight.name
        if "norm" in name:
            return "norms"
        return next(kind for text, kind in KINDS.items() if text in name)


@frozen(eq=False)
class Estimate:
    """The cost of a job for one rank.

    job, rank: what is asked about.
    chunks:    the weights of each unit of each of the rank's chunks, in the order they run.
    model_size: elements of the whole model.
    shared:    names of weights that two ranks of a pipeline share, the first and the last.
    """

    job: Job
    rank: int
    chunks: tuple[tuple[tuple[HeldWeight, ...], ...], ...]
    mesh: ParallelMesh
    model_size: int
    shared: AbstractSet[str]

    @property
    def units(self) -> tuple[tuple[HeldWeight, ...], ...]:
        """The weights of each unit that the rank runs."""
        return tuple(unit for chunk in self.chunks for unit in chunk)

    @property
    def stages(self) -> tuple[int, ...]:
        """The virtual stages that the rank runs."""
        own = self.mesh.axis("pp").index(self.rank)
        return tuple(stage for stage, rank in enumerate(self.job.plan.stage_ranks) if rank == own)

    @classmethod
    def of(cls, job: Job, rank: int = 0) -> Estimate:
        """For rank `rank` of the job's world."""
        mesh = ParallelMesh(job.plan)

        def held(weight: Weight) -> HeldWeight:
            split = mesh.axis(weight.split_axis)
            part = weight_part(weight, split.size, split.index(rank))
            shards = mesh.axis(weight.shard_axis)
            return HeldWeight(part, shard_sizes(part.size, shards.size)[shards.index(rank)])

        model = build_model(job.config.model, kernels("cpu"))
        stages = stage_units(model.units, job.plan.stage_layers)
        own = mesh.axis("pp").index(rank)
        chunks = tuple(
            tuple(tuple(held(weight) for weight in unit.weights) for unit in units)
            for units, at in zip(stages, job.plan.stage_ranks, strict=True)
            if at == own
        )
        return cls(
            job,
            rank,
            chunks,
            mesh,
            model_size=sum(weight.size for weight in model.weights),
            shared={name for name, ranks in weight_ranks(stages, job.plan.stage_ranks).items() if len(ranks) > 1},
        )

    @classmethod
    def largest(cls, job: Job) -> Estimate:
        """For a rank that needs the most memory: where sizes do not divide, the first ranks have the larger parts."""
        first_of_stages = ParallelMesh(job.plan).group("pp", 0)
        return max((cls.of(job, rank) for rank in first_of_stages), key=lambda found: sum(found.memory().values()))

    @property
    def weights(self) -> tuple[HeldWeight, ...]:
        """Every weight once."""
        return _once(self.units)

    def parameters(self) -> Counter[str]:
        """Elements that the rank holds, by kind."""
        found: Counter[str] = Counter()
        for held in self.weights:
            found[held.kind] += held.elements
        return found

    def memory(self) -> dict[str, int]:
        """Bytes by what they are for, each when it is most; other working memory of kernels is left out."""
        plan, size, elements = self.job.plan, self.job.dtype.itemsize, sum(held.elements for held in self.weights)
        unit = max(sum(held.part.size for held in unit) for unit in self.units)
        everything = sum(held.part.size for held in self.weights)
        kept_whole = plan.fsdp > 1 and not plan.reshard_after_forward
        gathered = 0 if plan.fsdp == 1 else everything if kept_whole else unit
        return {
            "parameters": elements * size,
            "gradients": elements * size,
            # Those of the unit whose backward pass runs, and what is added up before it is reduced.
            "whole gradients": (unit + kept_whole * everything) * size,
            # Two moments, and whether weight decay applies.
            "optimizer state": elements * (2 * size + 1),
            "gathered parameters": gathered * size,
            "activations": most_kept(self.job, self.rank) * size,
            "logits at work": logits_at_work(self.job, self.rank) * size,
        }

    def communication(self) -> Counter[str]:
        """Bytes that the rank receives in a step, by mesh axis, as `device_mesh.Traffic` counts them."""
        found: Counter[str] = Counter()
        for axis, received in (*self._of_weights(), *self._of_activations(), *self._of_numbers()):
            found[axis] += received
        return +found

    def _of_weights(self) -> Iterator[tuple[str, int]]:
        plan, size = self.job.plan, self.job.dtype.itemsize
        if plan.fsdp > 1:
            if plan.reshard_after_forward:  # each use by a unit, forward and backward, in each micro-batch
                gathered = scattered = [held for unit in self.units for held in unit]
                scatters = plan.num_accumulation_steps
                gathers = 2 * scatters
            else:  # each weight, and its gradient from each chunk
                gathered = list(self.weights)
                scattered = [held for chunk in self.chunks for held in _once(chunk)]
                gathers = scatters = 1
            for held in gathered:
                yield "fsdp", gathers * (held.part.size - held.elements) * size
            for held in scattered:
                yield "fsdp", scatters * (plan.fsdp - 1) * held.elements * size
        areas: Counter[tuple[int, bool]] = Counter()
        for held in self.weights:
            areas[held.part.copies, held.part.weight.name in self.shared] += held.elements
        for (copies, shared), elements in areas.items():
            yield "tp", _all_reduce(copies, elements * size)
            yield "pp", _all_reduce(2 if shared else 1, elements * size)
        yield "dp_replicate", _all_reduce(plan.dp_replicate, sum(areas.values()) * size)

    def _of_activations(self) -> Iterator[tuple[str, int]]:
        plan, size, model = self.job.plan, self.job.dtype.itemsize, sizes(self.job)
        tokens = tokens_inside(self.job)
        border = (plan.tp - 1) * tokens // plan.tp * model.hidden_size * size
        steps, last = plan.num_accumulation_steps, plan.pp * plan.interleave_num - 1
        layers = sum(b - a + 1 for a, b in (plan.stage_layers[stage] for stage in self.stages))
        ends = (0 in self.stages) + (last in self.stages)
        # Forward and backward: out of the embedding, twice into and out of each block, into the head.
        yield "tp", 2 * steps * border * (4 * layers + ends)
        if plan.tp > 1 and last in self.stages:
            yield "tp", steps * _loss(self.job, model, tokens, self.mesh.axis("tp").index(self.rank))
        if plan.cp > 1:
            yield "cp", steps * layers * _attention(self.job, model, tokens)
        if plan.pp > 1:
            # Activations from the stage before, gradients from the stage after, if that is on another rank.
            beside = [other for stage in self.stages for other in (stage - 1, stage + 1) if 0 <= other <= last]
            received = sum(other not in self.stages for other in beside)
            yield "pp", steps * received * tokens // plan.tp * model.hidden_size * size

    def _of_numbers(self) -> Iterator[tuple[str, int]]:
        plan = self.job.plan
        # Valid tokens and the loss; the norm.
        yield "loss", 2 * _all_reduce(plan.data_parallel * plan.cp, 8)
        yield "pp", _all_reduce(plan.pp, 8)
        yield "world", _all_reduce(plan.world_size, 8)


def _once(units: Iterable[Iterable[HeldWeight]]) -> tuple[HeldWeight, ...]:
    return tuple({held.part.weight.name: held for unit in units for held in unit}.values())


def _all_reduce(ranks: int, nbytes: int) -> int:
    return round(2 * nbytes * (ranks - 1) / ranks)


def _loss(job: Job, model: Qwen3Config, tokens: int, tp_rank: int) -> int:
    """Bytes of a micro-batch's logits, or of what stands for them."""
    tp, size = job.plan.tp, job.dtype.itemsize
    if job.config.parallelism.enable_loss_parallel:
        return _all_reduce(tp, tokens * size) + _all_reduce(tp, 2 * tokens * 8)
    first, stop = split_evenly(model.vocab_size, tp, tp_rank)
    return tokens * (model.vocab_size - (stop - first)) * size


def _attention(job: Job, model: Qwen3Config, tokens: int) -> int:
    """Bytes of one attention of a micro-batch, forward and backward, over the context-parallel ranks."""
    plan, size = job.plan, job.dtype.itemsize * model.head_dim
    (heads, kv_heads), degree = heads_inside(job, model), plan.ulysses_degree
    found = 0
    if degree > 1:
        kv_heads = math.lcm(kv_heads, degree)
        # Queries, keys and values there and back, the result there and back.
        found += 2 * (2 * heads + 2 * kv_heads) * tokens * size * (degree - 1) // degree
        heads, kv_heads, tokens = heads // degree, kv_heads // degree, tokens * degree
    blocks = plan.cp // degree
    if blocks > 1:
        block = 2 * kv_heads * tokens * size
        # Keys and values once around, and their gradients home; in a ring the backward pass needs them once more.
        ring = plan.context_parallel_async
        found += (2 * (blocks - 1) + blocks if ring else 2 * (blocks - 1)) * block
    return found
