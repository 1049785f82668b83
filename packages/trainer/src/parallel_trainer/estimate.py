"""What a plan costs a rank, from declarations and arithmetic: parameters, memory and communication of one step.

Parameters and communication are exact, and tests hold them against what runs measure; activations are an estimate.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator

from attrs import frozen
from device_mesh import ParallelMesh

from parallel_trainer.job import Job
from parallel_trainer.kernels import kernels
from parallel_trainer.models import build_model
from parallel_trainer.models.config import Qwen3Config, model_config
from parallel_trainer.parallel.layout import TensorPart, tensor_part
from parallel_trainer.parallel.weights import Weight, shard_sizes, split_evenly

KINDS = {"embed_tokens": "embedding", "lm_head": "head", "self_attn": "attention", "mlp": "feed-forward"}
"""Kinds of weights by a part of their names; what is left are norms."""


@frozen
class HeldWeight:
    """What one rank holds of a weight: `elements` of its tensor-parallel part, which has `part.size`."""

    part: TensorPart
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
    units:     the weights of each unit of the model, in the order they run.
    """

    job: Job
    rank: int
    units: tuple[tuple[HeldWeight, ...], ...]
    mesh: ParallelMesh

    @classmethod
    def of(cls, job: Job, rank: int = 0) -> Estimate:
        """For rank `rank` of the job's world. Rank 0 holds the most where sizes do not divide."""
        mesh = ParallelMesh(job.plan)

        def held(weight: Weight) -> HeldWeight:
            part = tensor_part(weight, job.plan.tp, mesh.axis("tp").index(rank))
            shards = mesh.axis(weight.axis)
            return HeldWeight(part, shard_sizes(part.size, shards.size)[shards.index(rank)])

        model = build_model(job.config.model, kernels("cpu"))
        return cls(job, rank, tuple(tuple(held(weight) for weight in unit.weights) for unit in model.units), mesh)

    @property
    def weights(self) -> tuple[HeldWeight, ...]:
        """Every weight once."""
        return tuple({held.part.weight.name: held for unit in self.units for held in unit}.values())

    def parameters(self) -> Counter[str]:
        """Elements that the rank holds, by kind."""
        found: Counter[str] = Counter()
        for held in self.weights:
            found[held.kind] += held.elements
        return found

    def memory(self) -> dict[str, int]:
        """Bytes by what they are for; `activations` is an estimate for the micro-batches in flight."""
        size, elements = self.job.dtype.itemsize, sum(held.elements for held in self.weights)
        largest = max(sum(held.part.size for held in unit) for unit in self.units)
        everything = sum(held.part.size for held in self.weights)
        gathered = 0 if self.job.plan.fsdp == 1 else largest if self.job.plan.reshard_after_forward else everything
        return {
            "parameters": elements * size,
            "gradients": elements * size,
            "optimizer state": 2 * elements * size,
            "gathered parameters": gathered * size,
            "activations (estimate)": _activations(self.job) * size,
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
            steps = plan.num_accumulation_steps
            once = [held for unit in self.units for held in unit] if plan.reshard_after_forward else self.weights
            for held in once:
                times = 2 * steps if plan.reshard_after_forward else 1
                yield "fsdp", times * (held.part.size - held.elements) * size
            for held in (held for unit in self.units for held in unit):
                yield "fsdp", steps * (plan.fsdp - 1) * held.elements * size
        by_copies: Counter[int] = Counter()
        for held in self.weights:
            by_copies[held.part.copies] += held.elements
        for copies, elements in by_copies.items():
            yield "tp", _all_reduce(copies, elements * size)
        yield "dp_replicate", _all_reduce(plan.dp_replicate, sum(by_copies.values()) * size)

    def _of_activations(self) -> Iterator[tuple[str, int]]:
        plan, size, model = self.job.plan, self.job.dtype.itemsize, model_config(self.job.config.model)
        tokens = plan.local_batch_size * self.job.seq_length // plan.cp
        border = (plan.tp - 1) * tokens // plan.tp * model.hidden_size * size
        layers, steps = model.num_hidden_layers, plan.num_accumulation_steps
        # Forward and backward: out of the embedding, twice into and out of each block, into the head.
        yield "tp", 2 * steps * border * (1 + 4 * layers + 1)
        if plan.tp > 1:
            yield "tp", steps * _loss(self.job, model, tokens, self.mesh.axis("tp").index(self.rank))
        if plan.cp > 1:
            yield "cp", steps * layers * _attention(self.job, model, tokens)

    def _of_numbers(self) -> Iterator[tuple[str, int]]:
        plan = self.job.plan
        # Valid tokens and the loss; the norm.
        yield "loss", 2 * _all_reduce(plan.data_parallel * plan.cp, 8)
        yield "world", _all_reduce(plan.world_size, 8)


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
    heads, kv_heads = model.num_attention_heads // plan.tp, max(1, model.num_key_value_heads // plan.tp)
    degree = plan.ulysses_degree
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


def _activations(job: Job) -> int:
    """Elements that are kept for the backward pass of one micro-batch, counted by what the kernels save."""
    plan, model = job.plan, model_config(job.config.model)
    inside = plan.local_batch_size * job.seq_length // plan.cp
    outside = inside // plan.tp
    heads = (model.num_attention_heads + model.num_key_value_heads) * model.head_dim
    query, inner = model.num_attention_heads * model.head_dim, model.intermediate_size
    entered = 2 * inside * model.hidden_size if plan.tp > 1 else 0
    # Hidden states and norms; queries, keys and values as they come, normed and turned; the result of attention, twice.
    block = 4 * outside * model.hidden_size + entered + inside * (3 * heads + 2 * query + 3 * inner) // plan.tp
    logits = inside * model.vocab_size // (plan.tp if job.config.parallelism.enable_loss_parallel else 1)
    return model.num_hidden_layers * block + 2 * logits + 2 * outside * model.hidden_size
