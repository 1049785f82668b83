"""What is around the training: seed, checkpoints, device, monitor, profiler, adapters.

Sources, in the mindformers 2.1.0 wheel: tools/register/template.py (defaults), core/callback/callback.py
(`CheckpointMonitor`, `TopkBiasBalanceCallback`, `TrainingStateMonitor`), trainer/trainer.py
(`_try_use_pretrained_model_dir_as_ckpt`, `_reassign_monitor_config`, `_build_profile_cb`), pet/pet_config.py.
"""

from __future__ import annotations

from typing import Any

from parallel_config.migrate.draft import Draft, Kind
from parallel_config.migrate.rules import Rename, rename_all
from parallel_config.schema import Checkpoint
from parallel_config.value_types import known_keys

_SAVED = (
    ("prefix", "prefix", "CKP"),
    ("save_checkpoint_steps", "save_interleaved_steps", 1),
    ("keep_checkpoint_max", "save_max", 5),
    ("async_save", "async_save", None),
    ("remove_redundancy", "remove_redundancy", None),
    ("save_trainable_params", "save_trainable_only", None),
)
"""Fields of a CheckpointMonitor, their names here, and MindFormers' defaults where they are others here."""

_PROFILER = tuple(
    Rename(old, f"profiler.{new}")
    for old, new in (
        ("profile", "enable_profiling"),
        ("profile_start_step", "start_step"),
        ("profile_stop_step", "end_step"),
        ("profile_output", "output_path"),
        ("profile_rank_ids", "profiler_rank"),
        ("profiler_level", "profiler_level"),
        ("profile_level", "profiler_level"),
        ("profile_memory", "profile_memory"),
        ("mstx", "mstx"),
        ("with_stack", "with_stack"),
    )
)
_STATES = {
    "local_norm_format": "local_norm",
    "device_local_norm_format": "device_norm",
    "local_loss_format": "local_loss",
    "device_local_loss_format": "device_loss",
}
_BUILT_IN = {
    "MFLossMonitor": "loss, norm and learning rate of each step are reported anyway",
    "TopkBiasBalanceCallback": "router biases move with each step anyway",
    "TrainingStateMonitor": "the section monitor says what is watched",
}
"""Callbacks of which the trainer does the same."""

_LORA = ("lora_rank", "lora_alpha", "lora_dropout", "target_modules")
_PLAIN = (
    Rename("seed", "training.seed"),
    Rename("context.device_target", "context.device_target"),
    Rename("context.max_device_memory", "context.max_device_memory"),
    Rename("balanced_load", "checkpoint.load_balanced"),
    Rename("reshard_worker_num", "checkpoint.reshard_worker_num"),
    Rename("calculate_per_token_loss", "model.calculate_per_token_loss"),
    Rename("tensorboard.tensorboard_dir", "monitor.tensorboard.tensorboard_dir"),
    Rename("tensorboard.tensorboard_queue_size", "monitor.tensorboard.tensorboard_queue_size"),
    *(Rename(f"checkpoint.{name}", f"checkpoint.{name}") for name in sorted(known_keys(Checkpoint))),
)


def running(draft: Draft) -> None:
    """Carry all that is around the training."""
    rename_all(draft, _PLAIN)
    if not draft.has("seed"):
        draft.carry((), "training.seed", 1, "MindFormers' default")
    _deterministic(draft)
    _callbacks(draft)
    _start(draft)
    if draft.switch("profile", False):
        rename_all(draft, _PROFILER)
    else:
        for rule in _PROFILER[1:]:
            draft.leave(rule.old, "profile is not true")
    _monitor(draft)
    _dispatcher(draft)
    _adapters(draft)


def _deterministic(draft: Draft) -> None:
    written = [path for path in ("train_precision_sync", "context.deterministic") if draft.has(path)]
    on = any(draft.get(path) in (True, "ON") for path in written)
    draft.carry(tuple(written), "training.deterministic", on, "" if len(written) < 2 else "one of the two is on")


def _callbacks(draft: Draft) -> None:
    """Savers become the checkpoint section, a callback that exists here is listed, the rest is left behind."""
    callbacks = draft.get("callbacks", [])
    callbacks = callbacks if isinstance(callbacks, list) else []
    kinds = [str(item.get("type")) if isinstance(item, dict) else "" for item in callbacks]
    savers = [index for index, kind in enumerate(kinds) if kind == "CheckpointMonitor"]
    if savers:
        _saver(draft, f"callbacks[{savers[0]}]")
        for index in savers[1:]:
            draft.leave(f"callbacks[{index}]", "one saver writes all checkpoints here", Kind.COST)
    elif draft.new_value("checkpoint.enable_save") is None:
        draft.carry((), "checkpoint.enable_save", False, "no callback saves checkpoints")
    logits = [index for index, kind in enumerate(kinds) if kind == "MaxLogitsMonitor"]
    if logits:
        sources = tuple(f"callbacks[{index}]" for index in logits)
        draft.carry(sources, "callbacks", [callbacks[index] for index in logits])
    for index, kind in enumerate(kinds):
        if kind in _BUILT_IN:
            draft.leave(f"callbacks[{index}]", _BUILT_IN[kind])
        elif kind != "CheckpointMonitor":
            draft.leave(f"callbacks[{index}]", "this callback of MindFormers does not exist here", Kind.COST)
    moved = draft.new_value("model.moe_router_enable_expert_bias") is True
    if moved and "TopkBiasBalanceCallback" not in kinds:
        why = "no TopkBiasBalanceCallback moves the biases"
        draft.carry((), "model.moe_router_bias_update_rate", 0.0, why)
        draft.leave("model.model_config.moe_router_bias_update_rate", why, Kind.NOTHING)


def _saver(draft: Draft, path: str) -> None:
    draft.leave(f"{path}.type", "the section checkpoint saves")
    for old, new, default in _SAVED:
        value = draft.get(f"{path}.{old}", default)
        how = "MindFormers' default" if not draft.has(f"{path}.{old}") and value is not None else ""
        draft.carry(f"{path}.{old}", f"checkpoint.{new}", value, how)
    if draft.has(f"{path}.save_optimizer"):
        draft.carry(f"{path}.save_optimizer", "checkpoint.no_save_optim", not draft.get(f"{path}.save_optimizer"))
    folder = draft.get(f"{path}.directory")
    if folder is not None:
        draft.carry(f"{path}.directory", "checkpoint.save_path", folder)
    else:
        folder = f"{str(draft.get('output_dir', './output')).rstrip('/')}/checkpoint"
        draft.carry("output_dir", "checkpoint.save_path", folder, "checkpoint in output_dir")


def _start(draft: Draft) -> None:
    """What the run starts from: load_checkpoint, else the weights in pretrained_model_dir."""
    path = next((path for path in ("load_checkpoint", "pretrained_model_dir") if draft.get(path)), None)
    if path is None or draft.new_value("checkpoint.load_path") is not None:
        return
    how = "a checkpoint of this project: import Hugging Face weights with parallel-train checkpoint import-hf"
    draft.carry(path, "checkpoint.load_path", draft.get(path), how)
    resumes = draft.get("resume_training", False)
    how = "" if resumes else "the optimizer starts anew"
    draft.carry("resume_training", "checkpoint.no_load_optim", not resumes, how)


def _monitor(draft: Draft) -> None:
    switch = "monitor_config.monitor_on"
    if not draft.switch(switch, False):
        draft.leave("monitor_config", "monitor_on is not true")
        return
    draft.leave(switch, "each state of monitor.train_state has a switch of its own")
    for old, new in _STATES.items():
        path = f"monitor_config.{old}"
        draft.carry(path, f"monitor.train_state.{new}", bool(draft.get(path)))


def _dispatcher(draft: Draft) -> None:
    path = "model.model_config.moe_token_dispatcher_type"
    kind = draft.get(path)
    if kind in ("alltoall", "alltoall_deredundancy"):
        draft.carry(path, "parallelism.moe_token_dispatcher_type", kind)
        if kind == "alltoall_deredundancy":
            ranks = "model.model_config.npu_nums_per_device"
            draft.carry(ranks, "parallelism.npu_nums_per_device", draft.get(ranks))


def _adapters(draft: Draft) -> None:
    section = "model.model_config.pet_config"
    if not draft.has(section):
        return
    if draft.get(f"{section}.pet_type", "lora") != "lora":
        draft.refuse(f"{section}.pet_type", "must be lora: no other adapters exist here", "Train without adapters.")
        return
    for name in _LORA:
        draft.carry(f"{section}.{name}", f"lora_config.{name}", draft.get(f"{section}.{name}"))
    if not draft.has(f"{section}.lora_dropout"):
        draft.carry((), "lora_config.lora_dropout", 0.01, "MindFormers' default")
    draft.leave(f"{section}.pet_type", "adapters are low-rank here")
    layers: Any = draft.get(f"{section}.exclude_layers")
    draft.carry(
        f"{section}.exclude_layers", "lora_config.exclude_layers", layers if isinstance(layers, list) else [layers]
    )
