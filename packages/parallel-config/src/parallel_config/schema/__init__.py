"""What a configuration file may contain: one class for each section, with the file's names and defaults."""

from __future__ import annotations

from attrs import Factory, field, frozen

from parallel_config.document import Document
from parallel_config.schema.dataset import Dataloader, DataloaderConfig, EvalDataset, TrainDataset
from parallel_config.schema.extensions import Extensions
from parallel_config.schema.memory import LayerSwap, OpSwap, Recompute, RecomputeComm, Swap
from parallel_config.schema.model import LoraConfig, Model
from parallel_config.schema.optimization import LrScheduler, Optimizer
from parallel_config.schema.parallelism import Parallelism, Training
from parallel_config.schema.running import (
    Callback,
    Checkpoint,
    Context,
    HealthCheckpoint,
    Inference,
    MoeMonitor,
    Monitor,
    Profiler,
    Tensorboard,
    TrainState,
)
from parallel_config.schema.setting import setting


@frozen
class TrainConfig:
    """A whole configuration. A section that the file leaves out holds its defaults.

    `source` is the file it came from; it takes no part in comparisons.
    """

    parallelism: Parallelism = Factory(Parallelism)
    training: Training = Factory(Training)
    model: Model = Factory(Model)
    train_dataset: TrainDataset = Factory(TrainDataset)
    eval_dataset: EvalDataset = Factory(EvalDataset)
    optimizer: Optimizer = Factory(Optimizer)
    lr_scheduler: LrScheduler = Factory(LrScheduler)
    checkpoint: Checkpoint = Factory(Checkpoint)
    recompute: Recompute = Factory(Recompute)
    recompute_comm: RecomputeComm = Factory(RecomputeComm)
    swap: Swap = Factory(Swap)
    callbacks: tuple[Callback, ...] = Factory(tuple)
    monitor: Monitor = Factory(Monitor)
    profiler: Profiler = Factory(Profiler)
    context: Context = Factory(Context)
    lora_config: LoraConfig = Factory(LoraConfig)
    run_mode: str = setting("train", options=("train", "predict"), about="What the file is for; these programs train.")
    inference: Inference = Factory(Inference)
    extensions: Extensions = Factory(Extensions)
    source: Document = field(factory=lambda: Document(filename=None), eq=False, repr=False)

    @property
    def eval_dataloader(self) -> Dataloader:
        """Where the samples of an evaluation come from: its own section, or that of the training data."""
        own = "eval_dataset.dataloader" in written_fields(self)
        return self.eval_dataset.dataloader if own else self.train_dataset.dataloader


def written_fields(config: TrainConfig) -> frozenset[str]:
    """Dotted paths of the sections and fields that the file really wrote (list items as `name[0]`)."""
    return config.source.written


__all__ = [
    "Callback",
    "Checkpoint",
    "Context",
    "Dataloader",
    "DataloaderConfig",
    "EvalDataset",
    "Extensions",
    "HealthCheckpoint",
    "Inference",
    "LayerSwap",
    "LoraConfig",
    "LrScheduler",
    "Model",
    "MoeMonitor",
    "Monitor",
    "OpSwap",
    "Optimizer",
    "Parallelism",
    "Profiler",
    "Recompute",
    "RecomputeComm",
    "Swap",
    "Tensorboard",
    "TrainConfig",
    "TrainDataset",
    "TrainState",
    "Training",
    "written_fields",
]
