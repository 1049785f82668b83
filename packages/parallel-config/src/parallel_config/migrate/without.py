"""Fields of graph-mode files that have no counterpart here, and what that means for the user.

Sources: the mindformers 2.1.0 wheel, tools/register/template.py, core/config_args.py, core/context/,
wrapper/wrapper.py, parallel_core/transformer_config.py; MindSpore's set_context and set_auto_parallel_context.
"""

from __future__ import annotations

from typing import Any

from parallel_config.migrate.draft import Kind
from parallel_config.migrate.rules import Without, look_up

_GRAPH = "is for compiling and running a graph, and there is none here"
_INFERENCE = "is for generating text, and this project trains"
_LAYOUT = "says how weights lie in memory, and changes no number"
_FUSED = "chooses a fused operator, which computes the same"
_OPERATORS = "MindSpore splits operators in a graph; here parallelism says all of it"
_CHECKPOINTS = "checkpoints load under any plan here, and are safetensors"
_UNKNOWN = "is not known to the conversion: look up what it does"


def _model(names: str, why: str, kind: Kind = Kind.NOTHING, fine: tuple[Any, ...] = ()) -> tuple[Without, ...]:
    return tuple(Without(f"model.model_config.{name}", why, kind, fine) for name in names.split())


def _plain(names: str, why: str, kind: Kind = Kind.NOTHING, fine: tuple[Any, ...] = ()) -> tuple[Without, ...]:
    return tuple(Without(name, why, kind, fine) for name in names.split())


_RUN = (
    *_plain("run_mode", "training is what this project does"),
    *_plain("use_parallel", "the number of ranks and parallelism say it"),
    *_plain("use_legacy use_legacy_format trainer.*", "chooses among MindFormers' classes"),
    *_plain("print_separate_loss", "the parts of the loss are reported anyway"),
    *_plain("output_dir", "parallel-train run --output says where a run writes"),
    *_plain("only_save_strategy", "there are no strategy files", Kind.TRAINED, (False,)),
    *_plain("load_checkpoint", "the run starts from new weights", fine=("",)),
    *_plain("resume_training", "there is nothing to resume from", Kind.TRAINED, (False,)),
    *_plain("load_ckpt_format auto_trans_ckpt transform_process_num src_strategy_path_or_dir", _CHECKPOINTS),
    *_plain("remove_redundancy load_ckpt_async", _CHECKPOINTS),
    *_plain("pretrained_model_dir", "load_checkpoint says what the run starts from"),
    *_plain(
        "ignore_data_skip data_skip_steps", "a run that is resumed goes on with the next sample", Kind.TRAINED, (False,)
    ),
    *_plain("remote_save_url", "is for a training platform"),
    *_plain("auto_tune filepath_prefix autotune_per_step", "tunes the number of data workers", Kind.COST, (False,)),
    *_plain("train_precision_sync infer_precision_sync", "there is no generation"),
    *_plain("use_skip_data_by_global_norm", "steps are skipped for non-finite norms alone", Kind.TRAINED, (False,)),
    *_plain("check_for_nan_in_loss_and_grad", "a loss or norm that is not finite ends the run anyway"),
    *_plain("input_data predict_batch_size adapter_id generation_config.*", _INFERENCE),
    *_plain("do_eval", "write a section eval_dataset for evaluation while training", Kind.COST, (False,)),
    *_plain(
        "eval_step_interval eval_epoch_interval eval_dataset.* eval_dataset eval_callbacks* metric*", "do_eval says"
    ),
    *_plain("eval_dataset_task*", "do_eval says"),
    *_plain("processor*", "samples are token ids already; no tokenizer is needed while training"),
    *_plain("layer_scale", "MindFormers itself refuses it", Kind.TRAINED, (False,)),
    *_plain("layer_decay", "layer_scale decides"),
    *_plain("lr_scale", "learning rates are written as they are", Kind.TRAINED, (False,)),
    *_plain("lr_scale_factor", "lr_scale decides"),
    *_plain("runner_config.sink_mode runner_config.sink_size runner_config.initial_*", _GRAPH),
    *_plain("runner_config.num_classes", "is for classification"),
    *_plain("runner_config.stop_step", "the run ends with its last step", fine=(0,)),
)

_PARALLEL = (
    *_plain("parallel_config.vocab_emb_dp", "tensor parallelism splits the embedding here; the numbers are the same"),
    *_plain("parallel_config.gradient_aggregation_group parallel_config.mem_coeff", _GRAPH),
    *_plain("parallel_config.optimizer_shard", "has no effect in MindFormers: parallel.enable_parallel_optimizer has"),
    *_plain(
        "parallel_config.seq_split_num",
        "sequences are not cut for a pipeline; the numbers are the same",
        Kind.COST,
        (1,),
    ),
    *_plain("parallel_config.*", _UNKNOWN, Kind.TRAINED),
    *_plain("parallel.parallel_mode", "parallelism says how far each dimension is split"),
    *_plain(
        "parallel.gradients_mean parallel.loss_repeated_mean", "gradients are those of the mean over all valid tokens"
    ),
    *_plain(
        "parallel.parallel_optimizer_config.gradient_accumulation_shard",
        "gradients are sharded as weights are",
        Kind.COST,
        (False,),
    ),
    *_plain(
        "parallel.parallel_optimizer_config.parallel_optimizer_threshold", "all weights are sharded, small ones too"
    ),
    *_plain(
        "parallel.parallel_optimizer_config.*", "reshard_after_forward_policy says when weights are gathered", Kind.COST
    ),
    *_plain("parallel.full_batch parallel.dataset_strategy", "each rank reads its own samples"),
    *_plain(
        "parallel.strategy_ckpt* parallel.enable_alltoall parallel.search_mode parallel.auto_parallel*", _OPERATORS
    ),
    *_plain("parallel.pipeline_config.*", "parallelism says what pipelines do"),
    *_plain("parallel.*", _OPERATORS),
    *_plain("moe_config.*", "is for MindFormers' older models; fields of model say what experts do"),
)

_MEMORY = (
    *_plain("recompute_config.select_recompute", "no operators are named", fine=(False,)),
    *_plain("recompute_config.mp_comm_recompute", "recomputing a layer repeats its collectives", Kind.COST, (True,)),
    *_plain(
        "recompute_config.*", "single operators and collectives are not chosen for recomputation", Kind.COST, (False,)
    ),
    *_plain("swap_config.*", _UNKNOWN, Kind.COST),
    *_plain(
        "optimizer.swap",
        "states stay on the device, unless parallelism.cpu_offload moves them and the weights",
        Kind.COST,
        (False,),
    ),
    *_plain("optimizer.*", _UNKNOWN, Kind.TRAINED),
    *_plain("lr_schedule.warmup_epochs", "warmup_ratio decides in MindFormers too"),
    *_plain("*lr_schedule*.num_cycles", "a cosine falls once", Kind.TRAINED, (0.5,)),
    *_plain("*lr_schedule*.power", "a polynomial of another degree does not exist here", Kind.TRAINED, (1, 1.0)),
    *_plain("*lr_schedule*", _UNKNOWN, Kind.TRAINED),
)

_AROUND = (
    *_plain("runner_wrapper.type runner_wrapper.local_norm", "a step is one function here"),
    *_plain(
        "runner_wrapper.scale_sense*",
        "the loss is not scaled: float32 and bfloat16 need no scaling, float16 does",
        Kind.TRAINED,
        (1, 1.0),
    ),
    *_plain("runner_wrapper.*", _UNKNOWN, Kind.TRAINED),
    *_plain("train_dataset.construct_args_key", "columns go by their names"),
    *_plain("train_dataset.seed", "dataloader.config.seed decides on the order of samples", Kind.NOTHING),
    *_plain("train_dataset.batch_size", "runner_config.batch_size decides"),
    *_plain("train_dataset.data_loader.use_broadcast_data", "each rank reads its own samples"),
    *_plain("train_dataset.*", _UNKNOWN, Kind.COST),
    *_plain("context.mode", "operators run one by one here, in MindSpore's dynamic graph"),
    *_plain("context.*", _GRAPH),
    *_plain("profile", "it is off here too", Kind.COST, (False,)),
    *_plain("profile_* init_start_profile data_simplification", "is not collected here", Kind.COST, (False,)),
    *_plain("monitor_config.* tensorboard.*", "is not shown here", Kind.COST),
    *_plain("checkpoint.*", _UNKNOWN, Kind.COST),
    *_plain("callbacks*.integrated_save callbacks*.checkpoint_format", _CHECKPOINTS),
)

_MODEL = (
    *_model("offset pp_interleave_num", "there is no pipeline"),
    *_model("input_sliced_sig batch_size is_dynamic disable_lazy_inline return_extra_loss", _GRAPH),
    *_model("qkv_concat mlp_concat mla_qkv_concat use_contiguous_weight_layout_attention", _LAYOUT),
    *_model("use_interleaved_weight_layout_mlp", _LAYOUT),
    *_model("moe_grouped_gemm use_gmm bias_swiglu_fusion use_fused_swiglu moe_router_fusion", _FUSED),
    *_model("use_fused_ops_topkrouter use_fused_ops_permute moe_permute_fusion use_fused_mla fused_norm", _FUSED),
    *_model("bias_dropout_fusion", _FUSED),
    *_model(
        "moe_token_dispatcher_type npu_nums_per_device", "tokens go to experts by all-to-all", Kind.COST, ("alltoall",)
    ),
    *_model("use_pad_tokens enable_gmm_safe_tokens", "experts without tokens need no padding"),
    *_model("use_cache use_past block_size num_blocks max_decode_length max_length top_k top_p do_sample", _INFERENCE),
    *_model("repetition_penalty temperature bos_token_id eos_token_id auto_map is_encoder_decoder", _INFERENCE),
    *_model("num_assistant_tokens transformers_version torch_dtype dtype quantization*", "is for other programs"),
    *_model("type checkpoint_name_or_path multiple_of ffn_dim_multiplier", "is for MindFormers' older models"),
    *_model("fp32_residual_connection", "residuals are rounded as activations are", Kind.TRAINED, (False,)),
    *_model("router_dense_type moe_router_dtype", "routers compute in float32", Kind.TRAINED, ("float32", "fp32")),
    *_model("moe_router_pre_softmax", "softmax comes before the choice of experts", Kind.TRAINED, (True,)),
    *_model("moe_token_drop_policy enable_sdrop", "no token is dropped, and none is without a capacity factor"),
    *_model("router_aux_loss_coef output_router_logits", "moe_aux_loss_coeff decides in MindFormers too"),
    *_model("ep_size max_window_layers layer_types sliding_window", "MindFormers ignores it too"),
    *_model("qkv_has_bias attention_softmax_in_fp32", "softmax_compute_dtype says it"),
    *_model("num_experts n_routed_experts expert_num num_moe_experts", "this model has no experts", Kind.TRAINED, (0,)),
    *_model("pet_config*", "adapters have fewer settings here", Kind.TRAINED),
    *_plain("model.arch* model.generation_config*", "model_type says it"),
    *_plain("model.*", _UNKNOWN, Kind.TRAINED),
)

_TABLE = (*_RUN, *_PARALLEL, *_MEMORY, *_AROUND, *_MODEL)


def reason(path: str, value: Any) -> tuple[str, Kind]:
    """Why the value at a path of the old file is not in the new one, and what that means."""
    if value is None:
        return "null sets nothing", Kind.NOTHING
    return look_up(_TABLE, path, value) or (_UNKNOWN, Kind.TRAINED)
