"""What this version cannot run."""

from __future__ import annotations

from collections.abc import Iterator

from parallel_config import Problem, TrainConfig, written_fields


def refusals(config: TrainConfig) -> Iterator[Problem]:
    """Everything in a valid file that this version cannot train with, outside model and data, with its place."""
    refuse, optimizer = config.source.problem, config.optimizer
    if "lora_config" in written_fields(config):
        rule = "must be left out: low-rank adapters cannot be trained yet"
        yield refuse("lora_config", None, rule, "Remove the section to train all weights.", at_key=True)
    if config.run_mode != "train":
        rule = "must be train: nothing here generates text"
        yield refuse("run_mode", config.run_mode, rule, "Write train, or remove the field.")
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
