"""How much of its micro-batches a rank keeps between their forward and their backward passes.

Counted by what the CPU kernels save and who shares it. Left out are token ids, masks and rotary angles, which no layer
has for itself, and the working memory of the kernels but for logits, which may be larger than all else.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from itertools import accumulate

from device_mesh import ParallelMesh
from pipeline_schedule import Action, Kind, Step

from parallel_trainer.errors import UserError
from parallel_trainer.job import Job
from parallel_trainer.models.config import Qwen3Config, Qwen3MoeConfig, model_config
from parallel_trainer.parallel.pipeline import Order, schedule
from parallel_trainer.parallel.weights import split_evenly


def sizes(job: Job) -> Qwen3Config:
    """The model's sizes. Raises UserError for a model whose activations and communication are not known here."""
    model = model_config(job.config.model)
    if not isinstance(model, Qwen3Config) or isinstance(model, Qwen3MoeConfig):
        raise UserError(f"model_type {job.config.model.model_type!r}: what a plan costs is known of qwen3 alone yet.")
    return model


def tokens_inside(job: Job) -> int:
    """Tokens of a rank's micro-batch within a region of split weights; between regions it has 1/tp of them."""
    return job.plan.local_batch_size * job.seq_length // job.plan.cp


def heads_inside(job: Job, model: Qwen3Config) -> tuple[int, int]:
    """The query and the key/value heads that a tensor-parallel rank has."""
    return model.num_attention_heads // job.plan.tp, max(1, model.num_key_value_heads // job.plan.tp)


def most_kept(job: Job, rank: int) -> int:
    """Elements that a rank keeps when they are most: each micro-batch under way counts for the stages it passed."""
    plan, model, mesh = job.plan, sizes(job), ParallelMesh(job.plan)
    pp_rank, tp_rank = mesh.axis("pp").index(rank), mesh.axis("tp").index(rank)
    layers = [stop - start + 1 for start, stop in plan.stage_layers]
    kept = [count * _of_block(job, model) for count in layers]
    kept[-1] += _of_head(job, model, tp_rank)
    left = [count * _of_block_products(job, model) for count in layers]
    left[-1] += _of_head_products(job, model, tp_rank)
    order = Order.of(job.config.parallelism)
    program = schedule(plan.pp, plan.interleave_num, plan.num_accumulation_steps, order).programs[pp_rank]
    changes = {
        Kind.FORWARD: kept,
        Kind.BACKWARD: [-elements for elements in kept],
        Kind.BACKWARD_INPUT: [after - before for before, after in zip(kept, left, strict=True)],
        Kind.BACKWARD_WEIGHT: [-elements for elements in left],
    }
    computations = (action for action in _one_by_one(program) if action.kind in changes)
    return max(accumulate(changes[action.kind][action.stage] for action in computations))


def logits_at_work(job: Job, rank: int) -> int:
    """Elements that the head needs beside what it keeps: its logits, and those of its own columns before gathering."""
    plan, model, mesh = job.plan, sizes(job), ParallelMesh(job.plan)
    if mesh.axis("pp").index(rank) != plan.stage_ranks[-1]:
        return 0
    first, stop = split_evenly(model.vocab_size, plan.tp, mesh.axis("tp").index(rank))
    gathered = plan.tp > 1 and not job.config.parallelism.enable_loss_parallel
    return tokens_inside(job) * (stop - first + gathered * model.vocab_size)


def _one_by_one(program: Iterable[Step]) -> Iterator[Action]:
    """What a rank does in turn: a CPU does a backward and then the forward that may go on beside it."""
    for step in program:
        yield from (step,) if isinstance(step, Action) else (step.backward, step.forward)


def _of_block(job: Job, model: Qwen3Config) -> int:
    """What a block keeps of a micro-batch."""
    inside, (heads, kv_heads) = tokens_inside(job), heads_inside(job, model)
    # The inputs of both norms, and a root mean square for each token.
    between = 2 * (model.hidden_size + 1) * inside // job.plan.tp
    # Their results, gathered; gate, up, its sigmoid and the product; of each head two root mean squares or log-sums.
    feed_forward = 4 * model.intermediate_size // job.plan.tp
    return between + inside * (2 * model.hidden_size + feed_forward + 2 * heads + kv_heads + _of_heads(job, model))


def _of_block_products(job: Job, model: Qwen3Config) -> int:
    """What the first half of a block's backward leaves for the second: both sides of each product, shared ones once."""
    heads, kv_heads = heads_inside(job, model)
    inner = model.intermediate_size // job.plan.tp
    inputs = 2 * model.hidden_size + heads * model.head_dim + inner
    gradients = (heads + 2 * kv_heads) * model.head_dim + 2 * inner + 2 * model.hidden_size
    return tokens_inside(job) * (inputs + gradients)


def _of_heads(job: Job, model: Qwen3Config) -> int:
    """Numbers of a token's queries, keys, values and results of attention."""
    plan, (heads, kv_heads) = job.plan, heads_inside(job, model)
    blocks, degree = plan.cp // plan.ulysses_degree, plan.ulysses_degree
    ring = blocks > 1 and plan.context_parallel_async
    # Queries before their norm and as attention takes them; its result as it keeps it and as the projection takes it,
    # which in a ring is one array unless tokens and heads are traded in between.
    queries = heads * (3 if ring and degree == 1 else 4)
    # Keys before their norm; keys and values as attention takes them, of all ranks where they are gathered.
    keys_values = 2 * math.lcm(kv_heads, degree) * (1 if ring else blocks)
    return model.head_dim * (queries + kv_heads + keys_values)


def _of_head(job: Job, model: Qwen3Config, tp_rank: int) -> int:
    """What the head keeps of a micro-batch: the norm's input and its result, gathered; the gradient of the logits."""
    inside, first, stop = tokens_inside(job), 0, model.vocab_size
    if job.config.parallelism.enable_loss_parallel:
        first, stop = split_evenly(model.vocab_size, job.plan.tp, tp_rank)
    return (model.hidden_size + 1) * inside // job.plan.tp + inside * (model.hidden_size + stop - first)


def _of_head_products(job: Job, model: Qwen3Config, tp_rank: int) -> int:
    """The same of the head: the norm's result, gathered, and the gradient of the rank's own logits."""
    first, stop = split_evenly(model.vocab_size, job.plan.tp, tp_rank)
    return tokens_inside(job) * (model.hidden_size + stop - first)
