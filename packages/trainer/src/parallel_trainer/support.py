"""What this version can run, and which fields of a file it acts on."""

from __future__ import annotations

from parallel_config import ParallelPlan, TrainConfig, written_fields

from parallel_trainer.errors import UserError

# Sections and fields that a file may hold for the reference's sake and that change nothing here.
_WITHOUT_EFFECT = (
    "callbacks",
    "checkpoint",
    "context",
    "inference",
    "monitor",
    "optimizer.enable_fused_opt",
    "optimizer.use_fused",
    "parallelism.cpu_offload",
    "parallelism.dense_fsdp_shard_size",
    "parallelism.enable_mc2",
    "profiler",
    "recompute",
    "recompute_comm",
    "run_mode",
    "swap",
    "train_dataset.balance_enabled",
    "train_dataset.drop_remainder",
    "train_dataset.numa_enable",
    "train_dataset.num_parallel_workers",
    "train_dataset.prefetch_size",
    "train_dataset.use_distribute_dataset",
    "train_dataset.dataloader.python_multiprocessing",
)

_DIMENSIONS = (
    ("tp", "tensor_parallel", "tensor parallelism"),
    ("cp", "context_parallel", "context parallelism"),
    ("pp", "pipeline_parallel", "pipeline parallelism"),
    ("ep", "expert_parallel", "expert parallelism"),
)


def check_support(config: TrainConfig, plan: ParallelPlan) -> None:
    """Raise one UserError with everything in a valid file that this version cannot train with."""
    refusals = []
    for attribute, field, dimension in _DIMENSIONS:
        degree = getattr(plan, attribute)
        if degree > 1:
            refusals.append(f"parallelism.{field} is {degree}: {dimension} cannot run yet, only degree 1.")
    written = written_fields(config)
    if any(path == "lora_config" or path.startswith("lora_config.") for path in written):
        refusals.append(
            "lora_config: low-rank adapters cannot be trained yet; remove the section to train all weights."
        )
    if config.training.rampup_batch_size:
        refusals.append("training.rampup_batch_size: the batch size cannot grow during a run yet; remove the field.")
    if config.optimizer.type != "AdamW":
        refusals.append(f"optimizer.type {config.optimizer.type!r}: only AdamW exists yet.")
    for field in ("amsgrad", "maximize"):
        if getattr(config.optimizer, field):
            refusals.append(f"optimizer.{field}: this AdamW does not have it yet; remove the field.")
    if refusals:
        raise UserError(
            "This version trains with data parallelism (FSDP/HSDP) and cannot run the plan:\n"
            + "\n".join(f"  - {refusal}" for refusal in refusals)
        )


def fields_without_effect(config: TrainConfig) -> tuple[str, ...]:
    """The fields that the file sets and this version does not act on."""
    return tuple(
        path
        for path in sorted(written_fields(config))
        if any(path == prefix or path.startswith(prefix + ".") for prefix in _WITHOUT_EFFECT)
    )
