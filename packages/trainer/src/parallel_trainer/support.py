"""What this version can run, and which fields of a file it acts on."""

from __future__ import annotations

from collections.abc import Iterator

from parallel_config import Problem, TrainConfig, inert_fields, written_fields

from parallel_trainer.models.config import CONFIGS


def refusals(config: TrainConfig) -> Iterator[Problem]:
    """Everything in a valid file that this version cannot train with, outside model and data, with its place."""
    refuse, optimizer = config.source.problem, config.optimizer
    if "lora_config" in written_fields(config):
        rule = "must be left out: low-rank adapters cannot be trained yet"
        yield refuse("lora_config", None, rule, "Remove the section to train all weights.", at_key=True)
    yield from _documents(config)
    steps = config.training.steps
    if steps < 1:
        yield refuse("training.steps", steps, "must be ≥ 1: there is nothing to train", "Use 1 or more.")
    ramp = config.training.rampup_batch_size
    if ramp:
        rule = "must be null: the batch size cannot grow during a run yet"
        yield refuse("training.rampup_batch_size", list(ramp), rule, "Remove the field.")
    if optimizer.type != "AdamW":
        yield refuse("optimizer.type", optimizer.type, "must be AdamW: no other optimizer exists yet", "Use AdamW.")
    if config.checkpoint.save_trainable_only:
        rule = "must be false: it leaves out frozen weights, and without adapters there are none that another file has"
        yield refuse("checkpoint.save_trainable_only", True, rule, "Remove the field.")
    prefix = config.checkpoint.prefix or ""
    if "/" in prefix or "\0" in prefix:
        rule = "must be the beginning of a file's name, without /: files lie in the checkpoint's own folder"
        yield refuse("checkpoint.prefix", prefix, rule, "Use letters, or put folders into checkpoint.save_path.")
    for field in ("amsgrad", "maximize"):
        if getattr(optimizer, field):
            rule = "must be false: this AdamW does not have it yet"
            yield refuse(f"optimizer.{field}", True, rule, "Remove the field.")


def _documents(config: TrainConfig) -> Iterator[Problem]:
    """What would let attention cross from document to document unnoticed."""
    data, model, path = config.train_dataset.dataloader.config, config.model, "train_dataset.dataloader.config."
    if data.create_compressed_eod_mask:
        return
    apart = f"Write {path}create_compressed_eod_mask: true"
    eod_mask = "model.use_eod_attn_mask_compression"
    if eod_mask in written_fields(config) and model.use_eod_attn_mask_compression:
        rule = f"needs {path}create_compressed_eod_mask: the data would not say where documents end"
        yield config.source.problem(eod_mask, True, rule, f"{apart}, which sets both.")
    # reset_attention_mask acts on the dense mask alone.
    if not data.reset_attention_mask:
        return
    if not data.create_attention_mask:
        reason = "create_attention_mask is false"
    elif model.use_attn_mask_compression:
        reason = "model.use_attn_mask_compression replaces the mask by a causal one"
    else:
        return
    yield config.source.problem(
        f"{path}reset_attention_mask",
        True,
        f"has no effect, because {reason}: attention would cross from document to document",
        f"{apart} to keep them apart, or reset_attention_mask: false.",
    )


def _under(section: str, *names: str) -> frozenset[str]:
    return frozenset(f"{section}.{name}" for name in names)


# Every field that has an effect, or whose only values that this version accepts are those it does anyway; beside what
# each model has of its own.
_ACTED_ON = (
    _under("parallelism", "data_parallel_shard", "reshard_after_forward_policy", "disable_gradient_division")
    | _under("parallelism", "expert_parallel", "moe_token_dispatcher_type", "npu_nums_per_device")
    | _under("parallelism", "pipeline_parallel", "pipeline_parallel_interleave_num")
    | _under("parallelism", "pipeline_parallel_layers_per_stage", "pipeline_parallel_overlap_p2p")
    | _under("parallelism", "pipeline_parallel_overlap_b_f", "pipeline_parallel_zero_bubble")
    | _under("parallelism", "pipeline_parallel_schedule")
    | _under("parallelism", "tensor_parallel", "sequence_parallel", "enable_loss_parallel")
    | _under("parallelism", "context_parallel", "context_parallel_method", "context_parallel_async")
    | _under("parallelism", "context_parallel_order", "context_parallel_mask_type", "ulysses_degree_in_cp")
    | _under("training", "steps", "local_batch_size", "global_batch_size", "max_norm", "seed", "deterministic")
    | _under("training", "use_skip_step_on_nan", "max_consecutive_skipped_steps", "rampup_batch_size")
    | _under("optimizer", "type", "betas", "eps", "weight_decay", "weight_decay_include", "weight_decay_exclude")
    | _under("optimizer", "amsgrad", "maximize")
    | _under("lr_scheduler", "type", "learning_rate", "warmup_steps", "warmup_ratio", "warmup_lr_init", "lr_end")
    | _under("lr_scheduler", "decay_steps", "decay_start_steps", "total_steps")
    | _under("model", "model_type", "architectures", "seq_length", "params_dtype", "compute_dtype")
    | _under("model", "use_flash_attention", "use_attn_mask_compression", "use_eod_attn_mask_compression")
    | _under("model", "calculate_per_token_loss", "pad_token_id")
    | _under("checkpoint", "enable_save", "save_path", "save_max", "save_interleaved_steps", "no_save_optim")
    | _under("checkpoint", "async_save", "prefix", "load_path", "no_load_optim")
    # Each element is written once and read once, whatever these say.
    | _under("checkpoint", "remove_redundancy", "load_balanced", "save_trainable_only")
    | _under("extensions", "engine")
    | _under("monitor.moe_monitor", "save_tokens_per_expert_interval", "target_layers")
    | _under("eval_dataset", "interval", "samples")
    | _under("train_dataset.dataloader", "type", "shuffle", "column_names", "datasets_type", "sizes")
    | _under("train_dataset.dataloader.config", "data_path", "train_data_path", "valid_data_path", "test_data_path")
    | _under("train_dataset.dataloader.config", "split", "seq_length", "seed", "eod", "pad", "eod_mask_loss")
    | _under("train_dataset.dataloader.config", "reset_position_ids", "reset_attention_mask")
    | _under("train_dataset.dataloader.config", "create_attention_mask", "create_compressed_eod_mask")
    | _under("train_dataset.dataloader.config", "eod_pad_length", "compressed_eod_mask_length")
    | _under("train_dataset.dataloader.config", "add_extra_token_to_sequence", "drop_last_partial_validation_sequence")
)
# Evaluation reads a dataloader as training does, but for the order of its samples.
_ACTED_ON |= {
    f"eval_{path.removeprefix('train_')}" for path in _ACTED_ON if path.startswith("train_dataset.dataloader")
}
_ACTED_ON -= {"eval_dataset.dataloader.shuffle"}


_ACTED_ON_BY_HYPERPARALLEL = _under("parallelism", "pipeline_parallel_p2p_transport") | _under(
    "recompute", "mode", "full_recompute_layer", "select_module"
)


def fields_without_effect(config: TrainConfig, engine: str = "native") -> tuple[str, ...]:
    """The fields that the file sets and `engine` does not act on; a section without any effect by its name.

    Without those that parallel-config has warned of.
    """
    written = {path.partition("[")[0] for path in written_fields(config)}  # a list counts as one field
    leaves = {path for path in written if not any(other.startswith(f"{path}.") for other in written)}
    model = CONFIGS.get(config.model.model_type or "")
    by_engine = _ACTED_ON | (_ACTED_ON_BY_HYPERPARALLEL if engine == "hyperparallel" else frozenset())
    acted_on = by_engine | (_under("model", *model.acted_on()) if model else frozenset())
    ignored = {path for path in leaves - acted_on if not path.startswith("model.rope_scaling.")}
    ignored -= set(inert_fields(config))
    sections_with_effect = {_section(path) for path in by_engine}
    ignored -= sections_with_effect  # written as {}
    return tuple(sorted({path if _section(path) in sections_with_effect else _section(path) for path in ignored}))


def _section(path: str) -> str:
    return path.partition(".")[0]
