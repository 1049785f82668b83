"""The sections `parallelism` and `training`: how far each dimension is split, how much a step takes."""

from __future__ import annotations

from typing import Any

from attrs import field, frozen

from parallel_config.schema.setting import LayerText, setting


def _placement(value: Any) -> Any:
    """A list that was set from code, as the tuple that a file gives."""
    return tuple(map(str, value)) if isinstance(value, list) else value


@frozen
class Parallelism:
    """Degrees of parallelism (specification, "Parallelism Configuration Methods")."""

    data_parallel_shard: int = -1
    data_parallel_shard_strategy: str = setting("optim_grads_params", reserved=True)
    reshard_after_forward_policy: str = setting("default", options=("always", "never", "default"))
    cpu_offload: bool = False
    disable_gradient_division: bool = True
    dense_fsdp_shard_size: int | None = setting(None, minimum=1)

    tensor_parallel: int = setting(1, minimum=1)
    sequence_parallel: bool = False
    enable_mc2: bool = False
    enable_loss_parallel: bool = False

    context_parallel: int = setting(1, minimum=1)
    context_parallel_method: str = setting("colossal", options=("colossal", "ulysses", "hybrid"), fold_case=True)
    context_parallel_async: bool = False
    ulysses_degree_in_cp: int | None = setting(None, minimum=1)
    context_parallel_order: str = setting("contiguous", options=("contiguous", "zigzag"))
    context_parallel_mask_type: str = setting("causal", options=("causal",), unsupported=True)

    pipeline_parallel: int = setting(1, minimum=1)
    pipeline_parallel_interleave_num: int = setting(1, minimum=1)
    pipeline_parallel_layers_per_stage: LayerText | tuple[LayerText, ...] | None = field(
        default=None, converter=_placement
    )
    pipeline_parallel_schedule: str = setting("1f1b", options=("1f1b", "interleaved_1f1b", "gpipe"), fold_case=True)
    pipeline_parallel_microbatch_size: int = setting(1, reserved=True)
    pipeline_parallel_overlap_p2p: bool = False
    pipeline_parallel_overlap_b_f: bool = False
    pipeline_parallel_enable_dxdw_split: bool = setting(False, reserved=True)
    pipeline_parallel_zero_bubble: str = setting("none", options=("none", "zbh1", "zbv"))
    pipeline_parallel_p2p_transport: str = setting("plain", options=("plain", "auto"))

    expert_parallel: int = setting(1, minimum=1)
    npu_nums_per_device: int = setting(8, minimum=1)
    moe_token_dispatcher_type: str = setting("alltoall", options=("alltoall", "alltoall_deredundancy"))
    expert_parallel_async_d2h: bool = False
    expert_parallel_use_safe_tokens: bool = True


@frozen
class Training:
    """Length, batch and seed of the run. `max_norm` of 0 or less means that gradients are not clipped."""

    steps: int = setting(1000, minimum=0)
    local_batch_size: int = setting(1, minimum=1)
    global_batch_size: int = setting(1, minimum=1)
    max_norm: float = 1.0
    seed: int = setting(42, minimum=0)
    deterministic: bool = False
    use_skip_step_on_nan: bool = False
    max_consecutive_skipped_steps: int = setting(0, minimum=0)
    rampup_batch_size: tuple[int, ...] | None = None
