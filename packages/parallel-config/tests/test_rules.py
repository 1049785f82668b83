"""Every rule that looks at more than one field: a file that breaks it, the field blamed, the numbers named."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from attrs import evolve
from parallel_config import ConfigError, ConfigWarning, ParallelPlan, UnsupportedConfigError, loads, plan, read
from parallel_config.loading import examine

QWEN = "model_type: qwen3, architectures: Qwen3ForCausalLM"
QWEN_MOE = "model_type: qwen3_moe, architectures: Qwen3MoeForCausalLM"
DEEPSEEK = "model_type: deepseek_v3, architectures: DeepseekV3ForCausalLM"
GPT = "type: BlendedMegatronDatasetDataLoader, datasets_type: GPTDataset, sizes: [8, 0, 0]"
CP2 = "parallelism: {context_parallel: 2}"
PIPELINE = "pipeline_parallel: 2, pipeline_parallel_layers_per_stage: auto"
REDUNDANCY_FREE = "moe_token_dispatcher_type: alltoall_deredundancy"
COMPRESSED = "use_attn_mask_compression: true"


def both(parallelism: str, model: str) -> str:
    return f"parallelism: {{{parallelism}}}\nmodel: {{{model}}}"


def dataset(config: str, extra: str = "") -> str:
    return f"train_dataset: {{dataloader: {{{GPT}, config: {{{config}}}{extra}}}}}"


def evaluated(config: str, section: str = "interval: 5") -> str:
    """Training data, with the same corpora evaluated."""
    return f"{dataset(config)}\neval_dataset: {{{section}}}"


def held_out(config: str, extra: str = "", trained: str = "seq_length: 16") -> str:
    """Training data, and a dataloader of its own for what is evaluated."""
    loader = "type: BlendedMegatronDatasetDataLoader, datasets_type: GPTDataset"
    own = f"dataloader: {{{loader}, config: {{{config}}}{extra}}}"
    return f"{dataset(trained)}\neval_dataset: {{interval: 5, {own}}}"


BROKEN: list[tuple[int, str, str, list[str]]] = [
    # data parallelism and batch
    (8, "parallelism: {dense_fsdp_shard_size: 3}", "parallelism.dense_fsdp_shard_size", ["3", "8"]),
    (2, "training: {rampup_batch_size: [1, 2]}", "training.rampup_batch_size", ["three integers"]),
    (8, "training: {rampup_batch_size: [8, 8, 1000]}", "training.rampup_batch_size", ["Write global_batch_size"]),
    (8, "training: {local_batch_size: 2}", "training.global_batch_size", ["1 (the default)", "= 16"]),
    (
        2,
        "training: {global_batch_size: 8, rampup_batch_size: [2, 4, 100]}",
        "training.rampup_batch_size",
        ["8", "2", "4"],
    ),
    (
        4,
        "training: {global_batch_size: 8, rampup_batch_size: [2, 2, 100]}",
        "training.rampup_batch_size",
        ["multiples of", "4"],
    ),
    # tensor parallelism
    (
        3,
        both("tensor_parallel: 3", f"{QWEN}, intermediate_size: 12, seq_length: 3"),
        "parallelism.tensor_parallel",
        ["num_attention_heads 32"],
    ),
    (
        4,
        both("tensor_parallel: 4", f"{QWEN}, intermediate_size: 10"),
        "parallelism.tensor_parallel",
        ["intermediate_size 10"],
    ),
    (
        6,
        both(
            "tensor_parallel: 6",
            f"{QWEN}, num_attention_heads: 12, num_key_value_heads: 4, intermediate_size: 12, seq_length: 12",
        ),
        "model.num_key_value_heads",
        ["4", "6"],
    ),
    (
        1,
        f"model: {{{QWEN}, num_attention_heads: 6}}",
        "model.num_key_value_heads",
        ["32", "6", "default of model_type qwen3"],
    ),
    (
        4,
        both("tensor_parallel: 4", f"{QWEN}, vocab_size: 3"),
        "parallelism.tensor_parallel",
        ["4 must be ≤ vocab_size 3", "Use tensor_parallel 1 or 2; or vocab_size 4 or more."],
    ),
    (2, both("tensor_parallel: 2", f"{QWEN}, seq_length: 7"), "model.seq_length", ["7", "tensor_parallel 2"]),
    (2, both("tensor_parallel: 2", f"{DEEPSEEK}, q_lora_rank: 0"), "model.q_lora_rank", ["tensor_parallel 2"]),
    (2, both("tensor_parallel: 2", f"{DEEPSEEK}, q_lora_rank: null"), "model.q_lora_rank", ["tensor_parallel 2"]),
    # context parallelism
    (
        4,
        "parallelism: {context_parallel: 4, context_parallel_method: ulysses, ulysses_degree_in_cp: 2}",
        "parallelism.ulysses_degree_in_cp",
        ["2", "4"],
    ),
    (
        4,
        "parallelism: {context_parallel: 4, context_parallel_method: hybrid}",
        "parallelism.ulysses_degree_in_cp",
        ["context_parallel 4", "Use 2"],
    ),
    (
        4,
        "parallelism: {context_parallel: 4, context_parallel_method: hybrid, ulysses_degree_in_cp: 4}",
        "parallelism.ulysses_degree_in_cp",
        ["4"],
    ),
    (
        6,
        "parallelism: {context_parallel: 6, context_parallel_method: hybrid, ulysses_degree_in_cp: 4}",
        "parallelism.ulysses_degree_in_cp",
        ["4", "6", "Use 2 or 3"],
    ),
    (
        3,
        "parallelism: {context_parallel: 3, context_parallel_method: hybrid, ulysses_degree_in_cp: 2}",
        "parallelism.ulysses_degree_in_cp",
        ["colossal or ulysses"],
    ),
    (
        2,
        both(
            "context_parallel: 2, context_parallel_order: zigzag",
            f"{QWEN}, seq_length: 4098, {COMPRESSED}",
        ),
        "model.seq_length",
        ["4098", "2 · context_parallel 2 = 4", "Use seq_length 4096 or 4100"],
    ),
    (
        8,
        both(
            "context_parallel: 8, context_parallel_method: ulysses",
            f"{QWEN}, num_attention_heads: 4, num_key_value_heads: 4, {COMPRESSED}",
        ),
        "model.num_attention_heads",
        ["4", "8"],
    ),
    (
        8,
        both(
            "tensor_parallel: 2, context_parallel: 4, context_parallel_method: ulysses, context_parallel_async: true",
            f"{QWEN}, num_attention_heads: 4, num_key_value_heads: 4, {COMPRESSED}",
        ),
        "model.num_attention_heads",
        ["4 // tensor_parallel 2 = 2"],
    ),
    (
        2,
        f"{CP2}\nmodel: {{{QWEN}}}",
        "model.use_attn_mask_compression",
        ["requires a compressed attention mask", "create_compressed_eod_mask"],
    ),
    (
        2,
        f"{CP2}\nmodel: {{{QWEN}, {COMPRESSED}}}\n" + dataset("seq_length: 4096, create_attention_mask: true"),
        "train_dataset.dataloader.config.create_attention_mask",
        ["must be false"],
    ),
    (
        3,
        "parallelism: {context_parallel: 3}\n"
        + dataset("seq_length: 4096, create_compressed_eod_mask: true, create_attention_mask: false"),
        "train_dataset.dataloader.config.seq_length",
        ["4096", "context_parallel 3"],
    ),
    (
        2,
        f"{CP2}\n" + dataset("create_attention_mask: false"),
        "model.use_attn_mask_compression",
        ["requires a compressed attention mask"],
    ),
    (
        2,
        f"{CP2}\nmodel: {{{QWEN}, {COMPRESSED}}}\n"
        + dataset("seq_length: 4096", ", column_names: [input_ids, labels, loss_mask, position_ids]"),
        "train_dataset.dataloader.config.create_attention_mask",
        ["true (the default) must be false"],
    ),
    (
        2,
        f"{CP2}\nmodel: {{{QWEN}, {COMPRESSED}}}\ntrain_dataset: {{dataloader: {{type: HFDataLoader}}}}",
        "train_dataset.dataloader.column_names",
        ["position_ids", "[input_ids, labels, position_ids]"],
    ),
    (
        2,
        (
            f"{CP2}\nmodel: {{{QWEN}, {COMPRESSED}}}\n"
            "train_dataset: {dataloader: {type: MindDataset, column_names: [input_ids, position_ids, attention_mask]}}"
        ),
        "train_dataset.dataloader.column_names",
        ["no attention_mask"],
    ),
    (
        2,
        (
            f"{CP2}\nmodel: {{{QWEN}, {COMPRESSED}}}\ntrain_dataset: {{dataloader: {{type: HFDataLoader,"
            " create_attention_mask: true, column_names: [input_ids, labels, position_ids]}}"
        ),
        "train_dataset.dataloader.create_attention_mask",
        ["must be false with context_parallel 2"],
    ),
    (
        2,
        f"{CP2}\nmodel: {{{QWEN}, {COMPRESSED}, apply_rope_fusion: true}}",
        "model.apply_rope_fusion",
        ["context_parallel 2", "EOD"],
    ),
    # pipeline parallelism
    (
        2,
        f"parallelism: {{{PIPELINE}, pipeline_parallel_zero_bubble: zbv}}",
        "parallelism.pipeline_parallel_zero_bubble",
        ["needs pipeline_parallel_interleave_num 2", "it is 1", "interleave_num 2, or zbh1, or none"],
    ),
    (
        2,
        f"parallelism: {{{PIPELINE}, pipeline_parallel_interleave_num: 3, pipeline_parallel_zero_bubble: zbh1}}",
        "parallelism.pipeline_parallel_zero_bubble",
        ["needs pipeline_parallel_interleave_num 1", "it is 3", "interleave_num 1, or none"],
    ),
    (
        2,
        f"parallelism: {{{PIPELINE}, pipeline_parallel_zero_bubble: zbh2}}",
        "parallelism.pipeline_parallel_zero_bubble",
        ["zbh2", "none, zbh1 or zbv"],
    ),
    (
        2,
        f"parallelism: {{{PIPELINE}, pipeline_parallel_overlap_b_f: true, pipeline_parallel_zero_bubble: zbh1}}",
        "parallelism.pipeline_parallel_overlap_b_f",
        ["must be false with pipeline_parallel_zero_bubble zbh1", "zero_bubble none"],
    ),
    (
        2,
        f"parallelism: {{{PIPELINE}, pipeline_parallel_schedule: dualpipe}}",
        "parallelism.pipeline_parallel_schedule",
        ["dualpipe", "must be 1f1b, interleaved_1f1b or gpipe"],
    ),
    (
        2,
        f"parallelism: {{{PIPELINE}, pipeline_parallel_schedule: interleaved_1f1b}}",
        "parallelism.pipeline_parallel_schedule",
        ["needs pipeline_parallel_interleave_num ≥ 2", "it is 1", "1f1b, or pipeline_parallel_interleave_num 2"],
    ),
    (
        2,
        f"parallelism: {{{PIPELINE}, pipeline_parallel_interleave_num: 3, pipeline_parallel_schedule: gpipe}}",
        "parallelism.pipeline_parallel_interleave_num",
        ["must be 1 with pipeline_parallel_schedule gpipe", "Use 1, or pipeline_parallel_schedule 1f1b"],
    ),
    (
        2,
        f"parallelism: {{{PIPELINE}, pipeline_parallel_zero_bubble: zbh1, pipeline_parallel_schedule: gpipe}}",
        "parallelism.pipeline_parallel_zero_bubble",
        ["must be none with pipeline_parallel_schedule gpipe"],
    ),
    # extensions
    (
        2,
        "extensions: {engine: hyper_parallel}",
        "extensions.engine",
        ["hyper_parallel must be native or hyperparallel", "Did you mean hyperparallel?"],
    ),
    (
        2,
        "extensions: {initial_weights: Megatron}",
        "extensions.initial_weights",
        ["Megatron must be hugging_face, megatron or mindformers", "Did you mean megatron?"],
    ),
    # expert parallelism
    (
        1,
        f"model: {{{QWEN}, moe_router_load_balancing_type: global_loss}}",
        "model.moe_router_load_balancing_type",
        ["global_loss must be none, seq_aux_loss", "Did you mean global_aux_loss?"],
    ),
    (
        32,
        (
            "parallelism: {pipeline_parallel: 2, pipeline_parallel_layers_per_stage: auto, expert_parallel: 8,"
            " moe_token_dispatcher_type: alltoall_deredundancy, pipeline_parallel_overlap_b_f: true}"
        ),
        "parallelism.pipeline_parallel_overlap_b_f",
        ["alltoall_deredundancy", "expert_parallel 8"],
    ),
    (2, both("expert_parallel: 2", f"{QWEN}"), "parallelism.expert_parallel", ["qwen3"]),
    (
        8,
        both("expert_parallel: 8", f"{DEEPSEEK}, n_routed_experts: 12, n_group: 4"),
        "parallelism.expert_parallel",
        ["n_routed_experts 12"],
    ),
    (
        8,
        "parallelism: {expert_parallel: 4, moe_token_dispatcher_type: alltoall_deredundancy}",
        "parallelism.expert_parallel",
        ["4", "npu_nums_per_device 8", "≥"],
    ),
    (
        12,
        "parallelism: {expert_parallel: 12, moe_token_dispatcher_type: alltoall_deredundancy}",
        "parallelism.expert_parallel",
        ["12", "multiple of npu_nums_per_device 8"],
    ),
    (1, f"model: {{{DEEPSEEK}, n_routed_experts: 12}}", "model.n_group", ["8", "12"]),
    (1, f"model: {{{DEEPSEEK}, topk_group: 16}}", "model.topk_group", ["n_group 8"]),
    (1, f"model: {{{DEEPSEEK}, topk_group: 3}}", "model.topk_group", ["num_experts_per_tok 8"]),
    (1, f"model: {{{DEEPSEEK}, n_routed_experts: 8, topk_group: 4}}", "model.topk_group", ["8 / 8 = 1", "Use 8"]),
    (1, f"model: {{{QWEN_MOE}, num_experts: 4}}", "model.num_experts_per_tok", ["≤ num_experts 4"]),
    (8, both("expert_parallel: 8", f"{QWEN_MOE}, num_experts: 12"), "parallelism.expert_parallel", ["num_experts 12"]),
    (1, f"model: {{{DEEPSEEK}, num_experts_per_tok: 512}}", "model.num_experts_per_tok", ["512", "256"]),
    # the model by itself
    (
        1,
        f"model: {{{QWEN}, use_flash_attention: false, {COMPRESSED}}}",
        "model.use_flash_attention",
        [COMPRESSED.split(":")[0]],
    ),
    (1, f"model: {{{QWEN}, chunk_loss_num: 4, calculate_per_token_loss: true}}", "model.chunk_loss_num", ["4"]),
    (1, f"model: {{{DEEPSEEK}, moe_layer_freq: 2}}", "model.moe_layer_freq", ["first_k_dense_replace 3"]),
    (1, f"model: {{{DEEPSEEK}, num_nextn_predict_layers: 2}}", "model.num_nextn_predict_layers", ["≤ 1"]),
    (1, f"model: {{{QWEN}, seq_length: null}}", "model.seq_length", ["must not be null", "qwen3, 4096"]),
    (1, "model: {architectures: Qwen3ForCausalLM}", "model.model_type", ["required"]),
    (1, "model: {model_type: qwen3}", "model.architectures", ["required", "Qwen3ForCausalLM"]),
    (1, "model: {model_type: qwen3, architectures: [Qwen3ForCausalLM]}", "model.architectures", ["text"]),
    # data
    (1, "train_dataset: {dataloader: {shuffle: true}}", "train_dataset.dataloader.type", ["required"]),
    (1, "train_dataset: {dataloader: {type: TFRecord}}", "train_dataset.dataloader.type", ["HFDataLoader"]),
    (1, dataset("data_path: [a, b]"), "train_dataset.dataloader.config.split", ["required"]),
    (
        1,
        dataset('split: "1, 0", data_path: [a], train_data_path: [b]'),
        "train_dataset.dataloader.config.data_path",
        ["excludes train_data_path"],
    ),
    (
        1,
        dataset('split: "1, 0", train_data_path: [b]'),
        "train_dataset.dataloader.config.split",
        ["excludes train_data_path"],
    ),
    (1, dataset('split: "1, 0", data_path: ["1", a, b]'), "train_dataset.dataloader.config.data_path", ["pairs"]),
    (1, dataset('split: "1, -1", data_path: [a]'), "train_dataset.dataloader.config.split", ["weights"]),
    (1, dataset('split: "0, 0", data_path: [a]'), "train_dataset.dataloader.config.split", ["not all 0"]),
    (
        1,
        f"model: {{{QWEN}}}\n" + dataset("seq_length: 2048"),
        "train_dataset.dataloader.config.seq_length",
        ["2048", "4096"],
    ),
    (
        1,
        dataset("create_attention_mask: false", ", column_names: [input_ids, labels]"),
        "train_dataset.dataloader.column_names",
        ["position_ids"],
    ),
    (
        1,
        dataset("create_compressed_eod_mask: true", ", column_names: [input_ids, labels, loss_mask, position_ids]"),
        "train_dataset.dataloader.column_names",
        ["actual_seq_len"],
    ),
    (
        1,
        "train_dataset: {dataloader: {type: BlendedMegatronDatasetDataLoader, datasets_type: GPTDataset, config: {}}}",
        "train_dataset.dataloader.sizes",
        ["three sample counts"],
    ),
    # evaluation
    (1, evaluated('data_path: [a], split: "9, 1"', "samples: 3"), "eval_dataset.interval", ["required"]),
    (1, evaluated('data_path: [a], split: "9, 1"', "interval: 0"), "eval_dataset.interval", ["≥ 1"]),
    (1, evaluated('data_path: [a], split: "9, 1"', "interval: 1, samples: 0"), "eval_dataset.samples", ["≥ 1"]),
    (1, evaluated('data_path: [a], split: "9, 1"', "intervall: 1"), "eval_dataset.intervall", ["interval?"]),
    (1, evaluated('data_path: [a], split: "9"'), "train_dataset.dataloader.config.split", ["98, 2, 0"]),
    (1, evaluated('data_path: [a], split: "9, 0, 1"'), "train_dataset.dataloader.config.split", ["second number"]),
    (1, evaluated("train_data_path: [a]"), "train_dataset.dataloader.config.valid_data_path", ["nothing to read"]),
    (
        1,
        evaluated('data_path: [0.7, a, 0.3, b], split: "9, 1"'),
        "eval_dataset.samples",
        ["required", "have weights", "100"],
    ),
    (1, held_out("seq_length: 16"), "eval_dataset.dataloader.config.valid_data_path", ["data_path", "split"]),
    (
        1,
        held_out("seq_length: 16, test_data_path: [a]"),
        "eval_dataset.dataloader.config.valid_data_path",
        ["nothing to read"],
    ),
    (
        1,
        held_out("seq_length: 8, valid_data_path: [a]"),
        "eval_dataset.dataloader.config.seq_length",
        ["8", "train_dataset", "16"],
    ),
    (
        1,
        held_out("seq_length: 16, valid_data_path: [a], create_compressed_eod_mask: true"),
        "eval_dataset.dataloader.config.create_compressed_eod_mask",
        ["train_dataset, false"],
    ),
    (
        1,
        held_out("seq_length: 16, data_path: [a]"),
        "eval_dataset.dataloader.config.split",
        ["required with data_path", "98, 2, 0"],
    ),
    (
        1,
        held_out("seq_length: 16, valid_data_path: [a]", ", sizes: [1, 2]"),
        "eval_dataset.dataloader.sizes",
        ["three sample counts"],
    ),
    (
        1,
        "eval_dataset: {interval: 5, dataloader: {shuffle: true}}",
        "eval_dataset.dataloader.type",
        ["required"],
    ),
    # optimizer, schedule, checkpoint, profiler, callbacks, adapters
    (1, "optimizer: {betas: [0.9]}", "optimizer.betas", ["two numbers"]),
    (1, "optimizer: {betas: [0.9, 1.0]}", "optimizer.betas", ["< 1"]),
    # PUB2-OPT-01, and the second row of PUB2-OPT-02
    (1, "optimizer: {eps: 0.0}", "optimizer.eps", ["0.0", "0/0", "eps: 1.0e-8"]),
    (1, 'optimizer: {weight_decay: 0.1, weight_decay_exclude: [""]}', "optimizer.weight_decay_exclude", ['""']),
    (1, f"model: {{{DEEPSEEK}, moe_router_bias_update_rate: 1.0e+39}}", "model.moe_router_bias_update_rate", ["≤ 1"]),
    (1, "optimizer: {eps: 0}", "optimizer.eps", ["0/0", "1e-20", "eps: 1.0e-8"]),
    (1, "optimizer: {eps: 1.0e-50}", "optimizer.eps", ["float32"]),
    (1, "optimizer: {eps: -1.0e-8}", "optimizer.eps", ["eps: 1.0e-8"]),
    (1, 'optimizer: {weight_decay_exclude: [""]}', "optimizer.weight_decay_exclude", ['""', "every weight"]),
    (1, 'optimizer: {weight_decay_include: [mlp, ""]}', "optimizer.weight_decay_include", ['""', "every weight"]),
    (1, "optimizer: {type: SGD}", "optimizer.type", ["AdamW", "Muon"]),
    (1, "optimizer: {enable_cpu_offload: true}", "optimizer.enable_cpu_offload", ["cpu_offload"]),
    (1, "lr_scheduler: {learning_rate: 1.0e-3}", "lr_scheduler.type", ["required"]),
    (1, "lr_scheduler: {type: ConstantWarmUpLR}", "lr_scheduler.warmup_steps", ["warmup_ratio"]),
    (1, "lr_scheduler: {type: PolynomialWithWarmUpLR}", "lr_scheduler.warmup_steps", ["warmup_ratio"]),
    (1, "lr_scheduler: {type: ConstantWarmUpLR, warmup_ratio: 2}", "lr_scheduler.warmup_ratio", ["≤ 1"]),
    (1, "checkpoint: {save_max: 2}", "checkpoint.save_path", ["enable_save"]),
    (1, "checkpoint: {save_path: x, save_trainable_only: true}", "checkpoint.save_trainable_only", ["base_load_path"]),
    (1, "profiler: {start_step: 5, end_step: 3}", "profiler.end_step", ["5", "3"]),
    (1, "callbacks: [{type: Nothing}]", "callbacks[0].type", ["MaxLogitsMonitor"]),
    (1, "callbacks: [{type: MaxLogitsMonitor, step_interval: 0}]", "callbacks[0].step_interval", ["≥ 1"]),
    (1, "callbacks: [{step_interval: 2}]", "callbacks[0].type", ["required"]),
    (1, "lora_config: {lora_rank: 4}", "lora_config.target_modules", ["required"]),
    # recomputation and swapping
    (1, "recompute: {mode: some}", "recompute.mode", ["full", "select"]),
    (1, "recompute: {mode: full}", "recompute.full_recompute_layer", ["full"]),
    (1, "recompute: {mode: select}", "recompute.select_module", ["select"]),
    (
        1,
        f"model: {{{QWEN}, num_hidden_layers: 4}}\nrecompute: {{mode: full, full_recompute_layer: [2-4]}}",
        "recompute.full_recompute_layer",
        ["0 to 3", "2-4"],
    ),
    (1, 'recompute: {mode: full, full_recompute_layer: ["3", "1"]}', "recompute.full_recompute_layer", ["upwards"]),
    (1, "recompute: {mode: full, full_recompute_layer: [first]}", "recompute.full_recompute_layer", ["first"]),
    (1, "recompute: {mode: select, select_module: [a]}", "recompute.select_module", ["mapping"]),
    (1, "recompute_comm: {enable: true}", "recompute_comm.select_module", ["enable"]),
    (
        2,
        "parallelism: {pipeline_parallel: 2, pipeline_parallel_layers_per_stage: auto}\nswap: {enable: true}",
        "swap.enable",
        ["pipeline_parallel 2"],
    ),
    (
        1,
        f"model: {{{QWEN}, num_hidden_layers: 4}}\nswap: {{enable: true, default_prefetch: 4}}",
        "swap.default_prefetch",
        ["3"],
    ),
    (
        1,
        f"model: {{{QWEN}, num_hidden_layers: 4}}\nswap: {{enable: true, layer_swap: [{{layers: [0-3]}}]}}",
        "swap.layer_swap[0].layers",
        ["3", "4"],
    ),
    (1, "swap: {enable: true, layer_swap: {layers: [0-3]}}", "swap.layer_swap", ["list"]),
    (1, "run_mode: evaluate", "run_mode", ["train or predict"]),
]


@pytest.mark.parametrize(("world_size", "text", "path", "fragments"), BROKEN)
def test_a_broken_rule_names_field_and_numbers(world_size: int, text: str, path: str, fragments: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        plan(loads(text), world_size)
    (problem,) = caught.value.problems
    assert problem.path == path
    assert problem.suggestion
    assert all(fragment in str(problem) for fragment in fragments)


WORKING: list[tuple[int, str]] = [
    (2, f"parallelism: {{{PIPELINE}, pipeline_parallel_overlap_b_f: true}}"),
    (2, "parallelism: {context_parallel: 2, context_parallel_async: true}"),
    (2, both("context_parallel: 2, context_parallel_order: zigzag", f"{QWEN}, seq_length: 4100, {COMPRESSED}")),
    (2, both("context_parallel: 2", f"{QWEN}, seq_length: 4098, {COMPRESSED}")),
    (4, both("tensor_parallel: 4", f"{QWEN}, num_attention_heads: 8, num_key_value_heads: 2")),
    (4, both("tensor_parallel: 4", f"{QWEN}, vocab_size: 5")),
    (4, both("tensor_parallel: 4", f"{QWEN}, num_attention_heads: 8, num_key_value_heads: 8")),
    (
        8,
        both(
            "tensor_parallel: 2, context_parallel: 4, context_parallel_method: ulysses, context_parallel_async: true",
            f"{QWEN}, num_attention_heads: 8, num_key_value_heads: 8, {COMPRESSED}",
        ),
    ),
    (16, "parallelism: {expert_parallel: 16, moe_token_dispatcher_type: alltoall_deredundancy}"),
    (2, "parallelism: {expert_parallel: 2, npu_nums_per_device: 2, moe_token_dispatcher_type: alltoall_deredundancy}"),
    (8, "training: {global_batch_size: 32, rampup_batch_size: [8, 8, 1000]}"),
    (8, "parallelism: {dense_fsdp_shard_size: 4}"),
    (1, "training: {max_norm: 0}"),
    (1, "training: {max_norm: -1.0}"),
    (1, "optimizer: {weight_decay: 0, eps: 1.0e-20}"),
    (1, "lr_scheduler: {type: CosineWithWarmUpLR}"),
    (1, "checkpoint: {enable_save: false}"),
    (1, "recompute: {mode: None}"),
    (1, f"model: {{{DEEPSEEK}, num_hidden_layers: 4}}\nrecompute: {{mode: full, full_recompute_layer: [0-1, 4]}}"),
    (1, f"model: {{{QWEN}, num_hidden_layers: 4}}\nswap: {{enable: true, layer_swap: [{{layers: [0-2]}}]}}"),
    (1, 'recompute: {mode: select, select_module: {"layers\\\\.mlp": ["0-1", 3]}}'),
    (1, "monitor: {train_state: {local_norm: [attention, mlp], device_norm: true}}"),
    (1, "callbacks: [{type: MaxLogitsMonitor, step_interval: 2}]"),
    (1, dataset('split: "1, 0, 0", data_path: ["0.3", a, 0.7, b]')),
    (1, dataset("train_data_path: [a], valid_data_path: [b]")),
    (
        1,
        dataset(
            "create_compressed_eod_mask: true, create_attention_mask: false",
            ", column_names: [input_ids, labels, loss_mask, position_ids, actual_seq_len]",
        ),
    ),
    (1, "train_dataset: {dataloader: {type: HFDataLoader, path: x, create_compressed_eod_mask: true}}"),
    (1, dataset('split: "1., .5, 0.25", data_path: [a]')),
    (1, f"model: {{{DEEPSEEK}, q_lora_rank: null}}"),
    (
        2,
        f"{CP2}\nmodel: {{{QWEN}}}\n"
        + dataset("seq_length: 4096, create_compressed_eod_mask: true, create_attention_mask: false"),
    ),
    (2, f"{CP2}\nmodel: {{{QWEN}, use_eod_attn_mask_compression: true, apply_rope_fusion: true}}"),
    (1, f"model: {{{QWEN}, apply_rope_fusion: true}}"),
    (
        2,
        (
            f"{CP2}\nmodel: {{{QWEN}, {COMPRESSED}}}\n"
            "train_dataset: {dataloader: {type: HFDataLoader, column_names: [input_ids, labels, position_ids]}}"
        ),
    ),
    (1, "run_mode: train\ninference: {anything: 1}"),
    (1, "eval_dataset: {interval: 5}"),
    (1, evaluated('data_path: [a], split: "9, 1"', "interval: 1, samples: 1, num_parallel_workers: 2")),
    (1, evaluated("train_data_path: [0.7, a, 0.3, b], valid_data_path: [a, b]")),
    (1, held_out("seq_length: 16, valid_data_path: [0.7, a, 0.3, b]", ", sizes: [0, 5, 0]")),
    (
        1,
        held_out('seq_length: 16, data_path: [a], split: "0, 1"', trained='seq_length: 16, data_path: [a], split: "1"'),
    ),
]


@pytest.mark.filterwarnings("ignore:Extensions of this project", "ignore:training.max_norm -1.0 is negative")
@pytest.mark.parametrize(("world_size", "text"), WORKING)
def test_what_is_near_a_rule_but_within_it_works(world_size: int, text: str) -> None:
    assert plan(loads(text), world_size).world_size == world_size


@pytest.mark.parametrize(
    "text",
    [
        "parallelism: {context_parallel_mask_type: full}",
    ],
)
def test_what_is_known_but_not_offered_is_a_not_implemented_error_too(text: str) -> None:
    with pytest.raises(NotImplementedError) as caught:
        loads(text)
    assert isinstance(caught.value, UnsupportedConfigError)
    assert isinstance(caught.value, ConfigError)
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize("world_size", [0, -8, True, 2.0, "8", None])
def test_a_world_size_is_a_positive_integer(world_size: object) -> None:
    with pytest.raises(ConfigError, match="world_size"):
        ParallelPlan.from_degrees(world_size)  # type: ignore[arg-type]


def test_a_world_size_beyond_counting_is_refused() -> None:
    for world_size in (2**31, 10**309):
        with pytest.raises(ConfigError, match="world_size"):
            ParallelPlan.from_degrees(world_size)
    assert ParallelPlan.from_degrees(2**31 - 1).data_parallel == 2**31 - 1


def test_a_degree_of_zero_hides_no_other_fault() -> None:
    problems = examine(read(both("tensor_parallel: 3, context_parallel: 0", QWEN), "run.yaml"), 6).problems
    assert {problem.path for problem in problems} == {"parallelism.tensor_parallel", "parallelism.context_parallel"}


def test_a_default_is_not_laid_to_a_model_type_that_is_not_written() -> None:
    with pytest.raises(ConfigError) as caught:
        ParallelPlan.from_degrees(2, num_hidden_layers=0)
    assert "default" not in str(caught.value)


def test_a_written_null_is_not_the_default() -> None:
    assert loads(f"model: {{{DEEPSEEK}, q_lora_rank: null}}").model.q_lora_rank is None
    assert loads(f"model: {{{DEEPSEEK}}}").model.q_lora_rank == 1536


def test_a_placement_set_from_code_is_used() -> None:
    config = loads(
        f"model: {{{QWEN}, num_hidden_layers: 4}}\n"
        "parallelism: {pipeline_parallel: 2, pipeline_parallel_layers_per_stage: auto}"
    )
    changed = evolve(config.parallelism, pipeline_parallel_layers_per_stage=["0-2", "3"])
    assert plan(evolve(config, parallelism=changed), 2).stage_layers == ((0, 2), (3, 3))


@pytest.mark.parametrize(
    ("world_size", "text", "suggestion"),
    [
        (
            6,
            both("tensor_parallel: 3", f"{QWEN}, num_key_value_heads: 1, intermediate_size: 12, seq_length: 12"),
            "Use tensor_parallel 1 or 2; or num_attention_heads 30 or 33.",
        ),
        (
            12,
            both("tensor_parallel: 3, pipeline_parallel: 2, pipeline_parallel_layers_per_stage: auto", QWEN)
            + "\ntraining: {global_batch_size: 2}",
            "Use tensor_parallel 1 or 2.",  # three ranks cannot share the default's 8 key/value heads
        ),
        (6, both("expert_parallel: 3", DEEPSEEK), "Use expert_parallel 1 or 2; or n_routed_experts 255 or 258."),
        (
            4,
            "parallelism: {expert_parallel: 4, moe_token_dispatcher_type: alltoall_deredundancy}",
            "Use moe_token_dispatcher_type alltoall.",
        ),
        (
            16,
            "parallelism: {expert_parallel: 4, moe_token_dispatcher_type: alltoall_deredundancy}",
            "Use expert_parallel 8, or moe_token_dispatcher_type alltoall.",
        ),
        (
            12,
            both(f"expert_parallel: 4, npu_nums_per_device: 3, {REDUNDANCY_FREE}", f"{DEEPSEEK}, n_routed_experts: 16"),
            "Use moe_token_dispatcher_type alltoall.",  # 16 experts are not shared by 3 or 6 ranks
        ),
        (1, "parallelism: {reshard_after_forward_policy: nevr}", "Did you mean never?"),
    ],
)
def test_only_what_can_work_is_suggested(world_size: int, text: str, suggestion: str) -> None:
    problems = examine(read(text, "run.yaml"), world_size).problems
    assert suggestion in [problem.suggestion for problem in problems]


@pytest.mark.parametrize(
    ("degrees", "path"),
    [
        ({"tensor_parallel": "2"}, "parallelism.tensor_parallel"),
        ({"tensor_parallel": 0}, "parallelism.tensor_parallel"),
        ({"expert_parallel": -1}, "parallelism.expert_parallel"),
        ({"context_parallel_method": "ring"}, "parallelism.context_parallel_method"),
        ({"num_hidden_layers": 0}, "model.num_hidden_layers"),
        ({"local_batch_size": 0}, "training.local_batch_size"),
        ({"global_batch_size": 12}, "training.global_batch_size"),
    ],
)
def test_plain_degrees_are_checked_like_a_file(degrees: dict[str, object], path: str) -> None:
    with pytest.raises(ConfigError) as caught:
        ParallelPlan.from_degrees(8, **degrees)  # type: ignore[arg-type]
    assert [problem.path for problem in caught.value.problems] == [path]
    assert caught.value.problems[0].where == ""


def test_plain_degrees_with_layers_and_batches() -> None:
    found = ParallelPlan.from_degrees(
        16, tensor_parallel=2, context_parallel=2, pipeline_parallel=2, num_hidden_layers=6, local_batch_size=3
    )
    assert found.stage_layers == ((0, 2), (3, 5))
    assert (found.data_parallel, found.global_batch_size, found.num_accumulation_steps) == (2, 6, 1)


@pytest.mark.parametrize(
    ("text", "fragment"),
    [
        ("parallelism: {pipeline_parallel_schedule: gpipe}", "pipeline_parallel_schedule .pipeline_parallel is 1"),
        ("parallelism: {pipeline_parallel_microbatch_size: 4}", "pipeline_parallel_microbatch_size"),
        ("parallelism: {pipeline_parallel_interleave_num: 2}", "pipeline_parallel is 1"),
        ("parallelism: {pipeline_parallel_layers_per_stage: [0-3]}", "pipeline_parallel is 1"),
        ("parallelism: {context_parallel: 2, ulysses_degree_in_cp: 2}", "colossal"),
        ("parallelism: {context_parallel_order: zigzag}", "context_parallel_order .context_parallel is 1"),
        ("parallelism: {context_parallel: 2, context_parallel_order: zigzag}", "MindFormers r2.0.0 refuses: .*zigzag"),
        ("parallelism: {context_parallel: 2, context_parallel_async: true}", "refuses: .*async .*colossal"),
        ("parallelism: {tensor_parallel: 2, sequence_parallel: false}", "cannot be switched off"),
        ("parallelism: {context_parallel: 2, sequence_parallel: true}", "conflicts with context_parallel 2"),
        ("checkpoint: {enable_save: false, load_worker_number: 4}", "checkpoint.load_worker_number"),
        ("profiler: {profiler_level: 3}", "profiler.profiler_level .levels are 0, 1 and 2, and this is 3"),
        ("parallelism: {enable_mc2: true}", "enable_mc2 .tensor_parallel is 1"),
        ("parallelism: {enable_loss_parallel: true}", "enable_loss_parallel .tensor_parallel is 1"),
        ("parallelism: {expert_parallel_async_d2h: true}", "expert_parallel_async_d2h .expert_parallel is 1"),
        ("parallelism: {npu_nums_per_device: 4}", "npu_nums_per_device .moe_token_dispatcher_type is alltoall"),
        ("parallelism: {pipeline_parallel_overlap_b_f: true}", "overlap_b_f .pipeline_parallel is 1"),
        ("parallelism: {pipeline_parallel_zero_bubble: zbv}", "pipeline_parallel_zero_bubble .pipeline_parallel is 1"),
        (f"parallelism: {{{PIPELINE}, pipeline_parallel_zero_bubble: zbh1}}", "refuses: pipeline_.*_zero_bubble zbh1"),
        ("monitor: {health_checkpoint: {global_norm_skip_time: 3}}", "monitor.health_checkpoint"),
        ("extensions: {engine: hyperparallel}", "r2.0.0 ignores: section extensions .engine hyperparallel"),
        ("extensions: {initial_weights: megatron}", "extensions .engine native, initial_weights megatron.."),
        (f"model: {{{QWEN}, num_hiden_layers: 2}}", "did you mean num_hidden_layers, which is 32 now"),
        ("optimizer: {weigth_decay: 0.1}", "did you mean weight_decay"),
        (f"model: {{{DEEPSEEK}, n_routed_expert: 16}}", "did you mean n_routed_experts, which is 256 now"),
    ],
)
def test_what_has_no_effect_is_said_once(text: str, fragment: str) -> None:
    with pytest.warns(ConfigWarning, match=fragment) as caught:
        loads(text)
    assert len(caught) == 1


@pytest.mark.filterwarnings("ignore:Extensions of this project")
def test_initial_weights_that_are_the_same_for_every_file_leave_the_range_without_effect() -> None:
    text = f"model: {{{QWEN}, initializer_range: 0.02}}\nextensions: {{initial_weights: mindformers}}"
    with pytest.warns(
        ConfigWarning, match="without effect: model.initializer_range .extensions.initial_weights is mind"
    ):
        loads(text)


def test_all_fields_without_effect_share_one_warning() -> None:
    text = "parallelism: {pipeline_parallel_schedule: gpipe, pipeline_parallel_enable_dxdw_split: true}"
    with pytest.warns(ConfigWarning, match="dxdw_split.*schedule") as caught:
        loads(text)
    assert len(caught) == 1


def test_a_value_that_is_the_default_needs_no_warning() -> None:
    loads("parallelism: {pipeline_parallel_schedule: 1f1b, data_parallel_shard_strategy: optim_grads_params}")


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ("pipeline_parallel_schedule: GPipe", ("gpipe", 1)),
        ("pipeline_parallel_interleave_num: 2", ("interleaved_1f1b", 2)),
        ("pipeline_parallel_interleave_num: 2, pipeline_parallel_schedule: 1f1b", ("interleaved_1f1b", 2)),
        ("pipeline_parallel_schedule: 1f1b", ("1f1b", 1)),
    ],
)
def test_the_schedule_is_the_file_s_and_interleaved_with_several_chunks(fields: str, expected: tuple[str, int]) -> None:
    found = plan(loads(f"parallelism: {{{PIPELINE}, {fields}}}"), 2)
    assert (found.schedule, found.interleave_num) == expected


def test_interleaving_is_one_without_pipelining() -> None:
    with pytest.warns(ConfigWarning):
        config = loads(both("pipeline_parallel_interleave_num: 2", f"{QWEN}, num_hidden_layers: 3"))
    found = plan(config, 1)
    assert (found.interleave_num, found.stage_layers) == (1, ((0, 2),))


def test_an_uneven_model_gets_a_list_that_works() -> None:
    text = f"""
parallelism: {{pipeline_parallel: 2, pipeline_parallel_interleave_num: 2, PLACEMENT}}
model: {{{QWEN}, num_hidden_layers: 10}}
"""
    auto = text.replace("PLACEMENT", "pipeline_parallel_layers_per_stage: auto")
    with pytest.raises(ConfigError) as caught:
        loads(auto)
    suggestion = caught.value.problems[0].suggestion
    proposed = suggestion[suggestion.index("[") : suggestion.rindex("]") + 1]
    assert "10" in str(caught.value)
    assert "= 4" in str(caught.value)
    explicit = text.replace("PLACEMENT", f"pipeline_parallel_layers_per_stage: {proposed}")
    ranges = plan(loads(explicit), 2).stage_layers
    covered = [layer for first, last in ranges for layer in range(first, last + 1)]
    assert covered == list(range(10))
    assert len(ranges) == 4


@pytest.mark.parametrize(
    ("world_size", "text"),
    [
        (10**15 + 1, "parallelism: {tensor_parallel: 8}"),
        (3, both("tensor_parallel: 3", f"{QWEN}, intermediate_size: 1000000000000000000")),
        (1, f"model: {{{QWEN}, num_hidden_layers: 1000000000000}}"),
        (8, "parallelism: {pipeline_parallel: 100000000, pipeline_parallel_layers_per_stage: x}"),
        (8, "parallelism: {pipeline_parallel_interleave_num: 10000000000, pipeline_parallel: 2}"),
    ],
)
def test_absurd_sizes_are_refused_without_counting_to_them(
    world_size: int, text: str, lines_run: Callable[[Callable[[], object]], int]
) -> None:
    def refused() -> None:
        with pytest.raises(ConfigError):
            plan(loads(text), world_size)

    assert lines_run(refused) < 100_000
