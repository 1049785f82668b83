"""What a plan can be here, and HyperParallel 1.0 cannot do or has no call for among those that MindFormers makes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from parallel_config import ParallelPlan, Problem, TrainConfig, written_fields

from parallel_trainer.checkpoint.save import saves
from parallel_trainer.engines.hyperparallel.blocks import CORE_ATTENTION, EMBEDDING, HEAD, Block
from parallel_trainer.engines.hyperparallel.recompute import recomputed
from parallel_trainer.engines.hyperparallel.tensor_parallel import divides

_WITH = "with engine hyperparallel"


def unmapped(config: TrainConfig, plan: ParallelPlan) -> Iterator[Problem]:
    """Problems of the file that follow from its fields and the plan."""
    yield from _types_and_sums(config)
    yield from _context(config, plan)
    yield from _pipeline(config, plan)
    yield from _memory(config)


def _types_and_sums(config: TrainConfig) -> Iterator[Problem]:
    refuse = config.source.problem
    for name in ("params_dtype", "compute_dtype"):
        if getattr(config.model, name) == "float64":
            rule = f"must not be float64 {_WITH}: NPUs have no matrix product of it"
            yield refuse(f"model.{name}", "float64", rule, "Use bfloat16, float16 or float32.")
    if not config.parallelism.disable_gradient_division:
        rule = f"must be true {_WITH}: its units would average what 1 / (world_size // pp) has divided already"
        yield refuse("parallelism.disable_gradient_division", False, rule, "Write true: the gradients are the same.")
    if config.model.tie_word_embeddings:
        rule = f"must be false {_WITH}: among the calls is none for a parameter of two modules"
        yield refuse("model.tie_word_embeddings", True, rule, "Write false, or use --engine native.")


def _context(config: TrainConfig, plan: ParallelPlan) -> Iterator[Problem]:
    if plan.cp == 1:
        return
    refuse = config.source.problem
    if plan.context_parallel_order != "contiguous":
        rule = f"must be contiguous {_WITH}: each rank has one block of the sequence there"
        path = "parallelism.context_parallel_order"
        yield refuse(path, plan.context_parallel_order, rule, "Use contiguous, or --engine native.")
    if plan.context_parallel_async and plan.context_parallel_method == "colossal":
        rule = f"must be false with context_parallel_method colossal {_WITH}, as in MindFormers: there is no ring"
        suggestion = "Write false, use context_parallel_method ulysses or hybrid, or --engine native."
        yield refuse("parallelism.context_parallel_async", True, rule, suggestion)
    for name in ("num_attention_heads", "num_key_value_heads"):
        heads = getattr(config.model, name)
        if heads and plan.ulysses_degree > 1 and heads % (plan.tp * plan.ulysses_degree):
            rule = (
                f"must be a multiple of tensor_parallel {plan.tp} · Ulysses degree {plan.ulysses_degree} = "
                f"{plan.tp * plan.ulysses_degree} {_WITH}, which exchanges whole heads"
            )
            yield refuse(f"model.{name}", heads, rule, "Use a smaller degree, or context_parallel_method colossal.")


def _pipeline(config: TrainConfig, plan: ParallelPlan) -> Iterator[Problem]:
    if plan.pp == 1:
        return
    refuse = config.source.problem
    if plan.zero_bubble != "none":
        rule = f"must be none {_WITH}: it has GPipe, 1F1B and interleaved 1F1B"
        path = "parallelism.pipeline_parallel_zero_bubble"
        yield refuse(path, plan.zero_bubble, rule, "Use none, or --engine native.")
    if plan.schedule == "gpipe" and config.parallelism.pipeline_parallel_overlap_p2p:
        rule = f"must be false with pipeline_parallel_schedule gpipe {_WITH}, whose GPipe cannot overlap transfers"
        path = "parallelism.pipeline_parallel_overlap_p2p"
        yield refuse(path, True, rule, "Use false, pipeline_parallel_schedule 1f1b, or --engine native.")
    if config.model.num_nextn_predict_layers:
        rule = f"must be 0 with pipeline_parallel {plan.pp} {_WITH}: the first stage's embedding is used on the last"
        value = config.model.num_nextn_predict_layers
        yield refuse("model.num_nextn_predict_layers", value, rule, "Use 0, pipeline_parallel 1, or --engine native.")
    least = plan.pp - 1
    if plan.interleave_num > 1 and plan.num_accumulation_steps < least:
        rule = (
            f"must give {least} micro-batches or more, one less than pipeline_parallel {plan.pp}, {_WITH} and several "
            f"chunks a rank, and gives {plan.num_accumulation_steps}: its order of fewer has been wrong"
        )
        enough = least * plan.data_parallel * plan.local_batch_size
        suggestion = f"Use {enough} or more, or pipeline_parallel_interleave_num 1."
        yield refuse("training.global_batch_size", plan.global_batch_size, rule, suggestion)


def _memory(config: TrainConfig) -> Iterator[Problem]:
    refuse = config.source.problem
    for path, used in (
        ("recompute.exclude_op", bool(config.recompute.exclude_op)),
        ("recompute_comm.enable", config.recompute_comm.enable),
        ("swap.enable", config.swap.enable),
        ("parallelism.dense_fsdp_shard_size", config.parallelism.dense_fsdp_shard_size is not None),
    ):
        if used:
            rule = f"must be left out {_WITH}: it is not mapped to calls yet"
            yield refuse(path, None, rule, "Remove the field.", at_key=True)


def unserved(config: TrainConfig) -> Iterator[Problem]:
    """Problems of what a run by the engine does not do yet, though the calls can be shown."""
    refuse, written = config.source.problem, written_fields(config)
    for path, used, way_out in (
        ("checkpoint.enable_save", saves(config.checkpoint), "Write false"),
        ("checkpoint.load_path", bool(config.checkpoint.load_path), "Remove it"),
        ("eval_dataset", any(field.startswith("eval_dataset.dataloader") for field in written), "Remove the section"),
        ("parallelism.cpu_offload", config.parallelism.cpu_offload, "Write false"),
    ):
        if used:
            rule = f"must be left out of a run {_WITH}: this is served by the native engine alone"
            yield refuse(path, None, rule, f"{way_out}, or use --engine native.", at_key=True)


def unsplittable(config: TrainConfig, plan: ParallelPlan, blocks: Sequence[Block]) -> Iterator[Problem]:
    """Problems of the model's weights: heads and features that equal parts do not make up; names that match nothing.

    The tables of a vocabulary may be whole on every rank, which changes no other weight.
    """
    if plan.tp > 1:
        for block in blocks:
            for name, weight in block.weights.items():
                if weight.tp_dim is None or divides(weight, plan) or block.module.name in (EMBEDDING, HEAD):
                    continue
                units = weight.shape[weight.tp_dim] // weight.tp_block
                rule = (
                    f"must divide the {units} {'heads' if weight.tp_block > 1 else 'features'} of "
                    f"{block.module.name}.{name} {_WITH}, which cuts equal parts"
                )
                fits = [degree for degree in range(1, plan.tp) if units % degree == 0 and plan.tp % degree == 0]
                suggestion = f"Use {fits[-1]}, or --engine native."
                yield config.source.problem("parallelism.tensor_parallel", plan.tp, rule, suggestion)
                return
    again = list(recomputed(config.recompute, blocks))
    if plan.cp > 1 and plan.context_parallel_async and any(each.name.endswith(CORE_ATTENTION) for each in again):
        rule = (
            f"must not name {CORE_ATTENTION} alone with context_parallel_async {_WITH}: computed again, it would wait "
            "for exchanges that began outside of it"
        )
        suggestion = "Name self_attn, write context_parallel_async: false, or use --engine native."
        yield config.source.problem(
            "recompute.select_module", list(config.recompute.select_module or ()), rule, suggestion
        )
    if config.recompute.mode == "select" and not again:
        names = sorted({name for block in blocks if block.layer is not None for name in block.modules})
        rule = f"must name a module of its layers {_WITH}, and matches none"
        patterns = list(config.recompute.select_module or ())
        suggestion = f"Modules of a layer are {', '.join(names)}."
        yield config.source.problem("recompute.select_module", patterns, rule, suggestion)
