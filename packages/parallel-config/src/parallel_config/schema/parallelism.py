"""The sections `parallelism` and `training`: how far each dimension is split, how much a step takes."""

from __future__ import annotations

from typing import Any

from attrs import frozen

from parallel_config.schema.setting import HYPERPARALLEL, NOWHERE, LayerText, setting


def _placement(value: Any) -> Any:
    """A list that was set from code, as the tuple that a file gives."""
    return tuple(map(str, value)) if isinstance(value, list) else value


@frozen
class Parallelism:
    """Degrees of parallelism (specification, "Parallelism Configuration Methods")."""

    data_parallel_shard: int = setting(
        -1, about="Ranks that share one copy of the weights (FSDP); -1 for all data-parallel ranks."
    )
    data_parallel_shard_strategy: str = setting(
        "optim_grads_params", reserved=True, about="What FSDP shards; always weights, gradients and optimizer states."
    )
    reshard_after_forward_policy: str = setting(
        "default",
        options=("always", "never", "default"),
        about="Whether gathered weights are freed after the forward pass; default: yes without pipelining.",
    )
    cpu_offload: bool = setting(
        False,
        about="Keep shards and optimizer states in host memory. On CPU ranks they are there anyway.",
        acts=HYPERPARALLEL,
    )
    disable_gradient_division: bool = setting(
        True, about="Reduce gradients by sums (true) or averages (false); both give the same gradients."
    )
    dense_fsdp_shard_size: int | None = setting(
        None, minimum=1, about="Shard dense weights over so many ranks, and experts over all.", acts=HYPERPARALLEL
    )

    tensor_parallel: int = setting(1, minimum=1, about="Ranks that split the weight matrices of each layer (TP).")
    sequence_parallel: bool = setting(
        False, about="Not a switch: sequence parallelism comes with tensor_parallel above 1."
    )
    enable_mc2: bool = setting(
        False, about="Fuse the collectives of tensor parallelism into matrix products.", acts=NOWHERE
    )
    enable_loss_parallel: bool = setting(
        False, about="Compute the loss over logits that stay split over the tensor-parallel ranks."
    )

    context_parallel: int = setting(1, minimum=1, about="Ranks that split each sequence (CP).")
    context_parallel_method: str = setting(
        "colossal",
        options=("colossal", "ulysses", "hybrid"),
        fold_case=True,
        about="How ranks see each other's keys: gathered (colossal), by heads (ulysses), or both (hybrid).",
    )
    context_parallel_async: bool = setting(
        False, about="Exchange keys and values while computing; with colossal in a ring, an extension."
    )
    ulysses_degree_in_cp: int | None = setting(
        None, minimum=1, about="Of context_parallel, how many ranks exchange heads; for hybrid."
    )
    context_parallel_order: str = setting(
        "contiguous",
        options=("contiguous", "zigzag"),
        about="Which tokens a rank gets: one contiguous piece, or two in zigzag, an extension.",
    )
    context_parallel_mask_type: str = setting(
        "causal", options=("causal",), unsupported=True, about="The mask of attention over several ranks."
    )

    pipeline_parallel: int = setting(1, minimum=1, about="Stages that the layers are split into (PP).")
    pipeline_parallel_interleave_num: int = setting(
        1, minimum=1, about="Chunks of layers on each stage, visited in turn."
    )
    pipeline_parallel_layers_per_stage: LayerText | tuple[LayerText, ...] | None = setting(
        None, converter=_placement, about="The layers of each stage: auto, or a list of ranges."
    )
    pipeline_parallel_schedule: str = setting(
        "1f1b",
        options=("1f1b", "interleaved_1f1b", "gpipe"),
        fold_case=True,
        about="The order of forwards and backwards; 1f1b with several chunks is interleaved_1f1b.",
    )
    pipeline_parallel_microbatch_size: int = setting(
        1, reserved=True, about="Follows from the batch sizes: micro-batches are the accumulation steps."
    )
    pipeline_parallel_overlap_p2p: bool = setting(False, about="Post receives ahead and complete sends late.")
    pipeline_parallel_overlap_b_f: bool = setting(False, about="Run a backward and the forward after it as one step.")
    pipeline_parallel_enable_dxdw_split: bool = setting(
        False, reserved=True, about="Split a backward in two; pipeline_parallel_zero_bubble does that here."
    )
    pipeline_parallel_zero_bubble: str = setting(
        "none",
        options=("none", "zbh1", "zbv"),
        about="A zero-bubble schedule, which splits each backward in two: an extension.",
    )
    pipeline_parallel_p2p_transport: str = setting(
        "plain",
        options=("plain", "auto"),
        about="How stages send: one transfer at a time, or batched with overlap_b_f (auto).",
        acts=HYPERPARALLEL,
    )

    expert_parallel: int = setting(1, minimum=1, about="Ranks that split the experts of each layer (EP).")
    npu_nums_per_device: int = setting(8, minimum=1, about="Ranks of a node, for alltoall_deredundancy.")
    moe_token_dispatcher_type: str = setting(
        "alltoall",
        options=("alltoall", "alltoall_deredundancy"),
        about="How tokens travel to experts: to each expert's rank, or once to each node.",
    )
    expert_parallel_async_d2h: bool = setting(
        False, about="Copy token counts to the host while permuting.", acts=NOWHERE
    )
    expert_parallel_use_safe_tokens: bool = setting(
        True, about="Give each expert a padding token; experts without tokens need none here.", acts=NOWHERE
    )


@frozen
class Training:
    """Length, batch and seed of the run. `max_norm` of 0 or less means that gradients are not clipped."""

    steps: int = setting(1000, minimum=0, about="Optimizer steps of the run.")
    local_batch_size: int = setting(1, minimum=1, about="Samples of a rank in one forward pass (the micro-batch).")
    global_batch_size: int = setting(1, minimum=1, about="Samples of an optimizer step over all ranks.")
    max_norm: float = setting(1.0, about="Clip gradients to this global norm; 0 or less: no clipping.")
    seed: int = setting(42, minimum=0, about="Where initial weights come from.")
    deterministic: bool = setting(False, about="Training is deterministic in any case; accepted.")
    use_skip_step_on_nan: bool = setting(
        False, about="Skip a step whose loss or gradient norm is not finite, instead of ending the run."
    )
    max_consecutive_skipped_steps: int = setting(
        0, minimum=0, about="End the run after so many skipped steps in a row; 0: never."
    )
    rampup_batch_size: tuple[int, ...] | None = setting(
        None, about="Grow the batch during a run; only null is accepted yet."
    )
