"""The sections around the training itself: checkpoint, callbacks, monitor, profiler, context, inference."""

from __future__ import annotations

from typing import Any

from attrs import Factory, frozen

from parallel_config.schema.memory import LayerSpecs
from parallel_config.schema.setting import NOWHERE, PathText, setting

_NO_PATH = PathText("")


@frozen
class Checkpoint:
    """What is saved when, and what a run starts from (an empty `load_path`: from nothing)."""

    enable_save: bool = setting(True, about="Save at all.")
    save_path: PathText = setting(_NO_PATH, about="Folder of the checkpoints.")
    save_max: int = setting(5, minimum=1, about="Checkpoints that are kept, the newest.")
    save_interleaved_steps: int = setting(1000, minimum=1, about="Steps between two checkpoints.")
    no_save_optim: bool = setting(False, about="Save weights alone.")
    async_save: bool = setting(False, about="Write while training goes on.")
    prefix: str | None = setting("checkpoint", about="How names of files begin.")
    remove_redundancy: bool = setting(False, about="Write each element once; always so here.")
    load_path: PathText = setting(_NO_PATH, about="Checkpoint to start from, or the folder of several; empty: none.")
    load_balanced: bool = setting(False, about="Read each element once; always so here.")
    no_load_optim: bool = setting(False, about="Load weights alone.")
    load_worker_number: int = setting(1, minimum=1, reserved=True, about="Threads that load.")
    save_global_layout_cache: bool = setting(
        True, about="Keep what is known of shards between two saves.", acts=NOWHERE
    )
    save_trainable_only: bool = setting(False, about="Save adapters alone; only false is accepted yet.")
    base_load_path: PathText = setting(_NO_PATH, about="Weights that adapters belong to.", acts=NOWHERE)
    reshard_worker_num: int = setting(1, minimum=1, about="Processes that reshard.", acts=NOWHERE)


@frozen
class Callback:
    """A callback by its registered name; its arguments are in `extra`."""

    type: str | None = setting(
        None, options=("MaxLogitsMonitor", "MaxLogitsReset"), about="Which callback.", acts=NOWHERE
    )
    step_interval: int = setting(1, minimum=1, about="Steps between two calls.", acts=NOWHERE)
    extra: dict[str, Any] = Factory(dict)


@frozen
class TrainState:
    """Norms and losses per rank; a norm takes a switch, a part of a parameter's name, or a list of parts."""

    local_norm: bool | str | tuple[str, ...] = setting("", about="Report gradient norms of each weight.", acts=NOWHERE)
    local_loss: bool = setting(False, about="Report each rank's loss.", acts=NOWHERE)
    device_norm: bool | str | tuple[str, ...] = setting(False, about="Report each rank's gradient norm.", acts=NOWHERE)
    device_loss: bool = setting(False, about="Report each rank's loss.", acts=NOWHERE)


@frozen
class MoeMonitor:
    """Tokens per expert."""

    save_tokens_per_expert_interval: int | None = setting(
        None, minimum=1, about="Steps between two records of the tokens of each expert."
    )
    target_layers: LayerSpecs | None = setting(None, about="Layers whose experts are recorded; null: all.")


@frozen
class HealthCheckpoint:
    """Reserved: nothing reads these thresholds."""

    embedding_local_norm_threshold: float = setting(100.0, reserved=True, about="Reserved.")
    global_norm_skip_threshold: float = setting(100.0, reserved=True, about="Reserved.")
    global_norm_skip_time: int = setting(10, reserved=True, about="Reserved.")


@frozen
class Tensorboard:
    """Where and how often curves are written. Each field has an older and a newer name."""

    tensorboard_dir: PathText = setting(
        _NO_PATH, about="Folder of TensorBoard's events; here they are in --output.", acts=NOWHERE
    )
    tensorboard_log_interval: int = setting(1, minimum=1, about="Steps between two records.", acts=NOWHERE)
    tensorboard_queue_size: int = setting(1000, minimum=1, about="Events that wait to be written.", acts=NOWHERE)
    output_dir: PathText = setting(_NO_PATH, about="The newer name of tensorboard_dir.", acts=NOWHERE)
    log_interval: int = setting(1, minimum=1, about="The newer name of tensorboard_log_interval.", acts=NOWHERE)
    queue_size: int = setting(1000, minimum=1, about="The newer name of tensorboard_queue_size.", acts=NOWHERE)


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

    enable_profiling: bool = setting(False, about="Profile at all.", acts=NOWHERE)
    start_step: int = setting(1, minimum=1, about="First step that is profiled.", acts=NOWHERE)
    end_step: int = setting(1, minimum=1, about="Last step that is profiled.", acts=NOWHERE)
    output_path: PathText | None = setting(None, about="Folder of the profiles.", acts=NOWHERE)
    profiler_rank: int | tuple[int, ...] | None = setting(
        None, about="Ranks that are profiled; null: all.", acts=NOWHERE
    )
    profiler_level: int = setting(0, about="How much is recorded.", acts=NOWHERE)
    mstx: bool = setting(False, about="Record marks.", acts=NOWHERE)
    profile_memory: bool = setting(False, about="Record memory.", acts=NOWHERE)
    profile_cpu: bool = setting(True, about="Record the host.", acts=NOWHERE)
    with_stack: bool = setting(True, about="Record call stacks.", acts=NOWHERE)


@frozen
class Context:
    """The device the run is for."""

    mode: int = setting(
        1,
        minimum=0,
        maximum=1,
        about="How MindSpore runs: 1 for dynamic graphs, which is what trains here.",
        acts=NOWHERE,
    )
    max_device_memory: str = setting("59GB", about="Memory that MindSpore may take of a device.", acts=NOWHERE)
    device_target: str = setting("Ascend", about="Kind of device; --device_target chooses it here.", acts=NOWHERE)


@frozen
class Inference:
    """Accepted as written; training reads none of it."""

    extra: dict[str, Any] = Factory(dict)
