"""The sections around the training itself: checkpoint, callbacks, monitor, profiler, context, inference."""

from __future__ import annotations

from typing import Any

from attrs import Factory, frozen

from parallel_config.schema.memory import LayerSpecs
from parallel_config.schema.setting import setting


@frozen
class Checkpoint:
    """What is saved when, and what a run starts from (an empty `load_path`: from nothing)."""

    enable_save: bool = True
    save_path: str = ""
    save_max: int = setting(5, minimum=1)
    save_interleaved_steps: int = setting(1000, minimum=1)
    no_save_optim: bool = False
    async_save: bool = False
    prefix: str | None = "checkpoint"
    remove_redundancy: bool = False
    load_path: str = ""
    load_balanced: bool = False
    no_load_optim: bool = False
    load_worker_number: int = setting(1, minimum=1, reserved=True)
    save_global_layout_cache: bool = True
    save_trainable_only: bool = False
    base_load_path: str = ""
    reshard_worker_num: int = setting(1, minimum=1)


@frozen
class Callback:
    """A callback by its registered name; its arguments are in `extra`."""

    type: str | None = setting(None, options=("MaxLogitsMonitor", "MaxLogitsReset"))
    step_interval: int = setting(1, minimum=1)
    extra: dict[str, Any] = Factory(dict)


@frozen
class TrainState:
    """Norms and losses per rank; a norm takes a switch, a part of a parameter's name, or a list of parts."""

    local_norm: bool | str | tuple[str, ...] = ""
    local_loss: bool = False
    device_norm: bool | str | tuple[str, ...] = False
    device_loss: bool = False


@frozen
class MoeMonitor:
    """Tokens per expert."""

    save_tokens_per_expert_interval: int | None = setting(None, minimum=1)
    target_layers: LayerSpecs | None = None


@frozen
class HealthCheckpoint:
    """Reserved: nothing reads these thresholds."""

    embedding_local_norm_threshold: float = setting(100.0, reserved=True)
    global_norm_skip_threshold: float = setting(100.0, reserved=True)
    global_norm_skip_time: int = setting(10, reserved=True)


@frozen
class Tensorboard:
    """Where and how often curves are written. Each field has an older and a newer name."""

    tensorboard_dir: str = ""
    tensorboard_log_interval: int = setting(1, minimum=1)
    tensorboard_queue_size: int = setting(1000, minimum=1)
    output_dir: str = ""
    log_interval: int = setting(1, minimum=1)
    queue_size: int = setting(1000, minimum=1)


@frozen
class Monitor:
    """What is watched while training."""

    train_state: TrainState = Factory(TrainState)
    moe_monitor: MoeMonitor = Factory(MoeMonitor)
    health_checkpoint: HealthCheckpoint = Factory(HealthCheckpoint)
    tensorboard: Tensorboard = Factory(Tensorboard)


@frozen
class Profiler:
    """Steps that are profiled, both ends included; `profiler_rank` None profiles every rank.

    `profiler_level` is 0, 1 or 2; other numbers profile at no level.
    """

    enable_profiling: bool = False
    start_step: int = setting(1, minimum=1)
    end_step: int = setting(1, minimum=1)
    output_path: str | None = None
    profiler_rank: int | tuple[int, ...] | None = None
    profiler_level: int = 0
    mstx: bool = False
    profile_memory: bool = False
    profile_cpu: bool = True
    with_stack: bool = True


@frozen
class Context:
    """The device the run is for."""

    mode: int = setting(1, minimum=0, maximum=1)
    max_device_memory: str = "59GB"
    device_target: str = "Ascend"


@frozen
class Inference:
    """Accepted as written; training reads none of it."""

    extra: dict[str, Any] = Factory(dict)
