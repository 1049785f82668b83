"""Files of MindFormers' graph mode become files that pass the check; right values were computed by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from parallel_config import Document, plan, read
from parallel_config.cli import main
from parallel_config.loading import examine
from parallel_config.migrate import HuggingFace, Kind, Migration, migrate
from parallel_config.migrate.memory import _dealt_out
from parallel_config.paths import as_keys, with_value, without

FOLDER = Path(__file__).parent / "data" / "graph_mode"
TINY = HuggingFace(
    {
        "model_type": "qwen3",
        "architectures": ["Qwen3ForCausalLM"],
        "vocab_size": 256,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "rope_theta": 1000000,
        "rope_scaling": None,
        "torch_dtype": "bfloat16",
        "compute_dtype": "float32",
        "brand_new": 1,
    },
    "config.json",
)
ARGUMENTS: dict[str, dict[str, Any]] = {
    "qwen3": {},
    "qwen3_moe": {},
    "deepseek_v3": {},
    "lora": {"completing": TINY, "steps": 12},
    "data_parallel": {"world_size": 4},
}


def old(name: str) -> Document:
    return read((FOLDER / f"{name}.yaml").read_text(encoding="utf-8"), f"{name}.yaml")


def made(name: str) -> Migration:
    return migrate(old(name), **ARGUMENTS.get(name, {}))


def edited(name: str, **changes: Any) -> Document:
    """A file with values set, by path with __ for each dot; None takes a value out."""
    document = old(name)
    values: Any = document.values
    for path, value in changes.items():
        keys = as_keys(path.replace("__", "."), values)
        values = without(values, keys) if value is None else with_value(values, keys, value)
    return read(yaml.safe_dump(values, sort_keys=False), f"{name}.yaml")


def new(migration: Migration) -> dict[str, Any]:
    """The fields of the new file by path, as it reads."""
    document = read(migration.text, "new.yaml")
    assert not document.problems
    return flat(document.values)


def flat(values: Any, path: str = "") -> dict[str, Any]:
    if not isinstance(values, dict) or not values:
        return {path: values}
    return {
        inner: value for key, item in values.items() for inner, value in flat(item, f"{path}.{key}".strip(".")).items()
    }


def single_values(values: Any, path: str = "") -> list[str]:
    """Each value of a file: lists count as one unless mappings are in them. Written apart from the code under test."""
    if isinstance(values, dict) and values:
        return [leaf for key, item in values.items() for leaf in single_values(item, f"{path}.{key}".strip("."))]
    if isinstance(values, list) and [item for item in values if isinstance(item, dict)]:
        return [leaf for index, item in enumerate(values) for leaf in single_values(item, f"{path}[{index}]")]
    return [path]


def assert_nothing_is_lost(document: Document, migration: Migration) -> None:
    """Each value of the old file is carried or left, never both, and what is carried stands in the new file."""
    carried = [source for item in migration.carried for source in item.sources]
    left = [item.path for item in migration.left]
    for leaf in single_values(document.values):
        within = [
            [path for path in paths if f"{leaf}.".replace("[", ".[").startswith(f"{path}.".replace("[", ".["))]
            for paths in (carried, left)
        ]
        assert bool(within[0]) != bool(within[1]), (leaf, within)
    values = read(migration.text, "new.yaml").values
    for item in migration.carried:
        found: Any = values
        for key in item.path.split("."):
            found = found[key]
        assert found == item.value
    for item in migration.left:
        assert f"#   {item.path}" in migration.text


@pytest.mark.parametrize("name", sorted(ARGUMENTS))
def test_each_file_becomes_one_that_passes_the_check_and_nothing_is_lost(name: str) -> None:
    migration = made(name)
    assert migration.refused == ()
    assert migration.unfit == ()
    assert_nothing_is_lost(old(name), migration)
    assert [item.path for item in migration.left if "not known" in item.why] == (
        ["config.json: brand_new"] if name == "lora" else []
    )
    plan(examine(read(migration.text, "new.yaml"), None).config, migration.degrees.world_size)


def test_a_dense_model_over_a_pipeline() -> None:
    migration = made("qwen3")
    values = new(migration)
    assert migration.degrees.world_size == 4 * 2 * 2
    expected = {
        "parallelism.tensor_parallel": 2,
        "parallelism.sequence_parallel": True,  # cannot be off here
        "parallelism.pipeline_parallel": 2,
        "parallelism.data_parallel_shard": 2,  # groups of optimizer_weight_shard_size
        "parallelism.reshard_after_forward_policy": "always",
        "parallelism.pipeline_parallel_layers_per_stage": ["0-3", "4-6"],  # 7 // 2 + offset [1, 0]
        "training.local_batch_size": 2,
        "training.global_batch_size": 2 * 4 * 8,
        "training.steps": 2 * (1000 // 64),
        "training.max_norm": 0.5,
        "training.seed": 7,
        "training.deterministic": True,
        "optimizer.type": "AdamW",
        "optimizer.betas": [0.9, 0.999],
        "optimizer.weight_decay": 0.0,
        "lr_scheduler.type": "CosineWithWarmUpLR",
        "lr_scheduler.warmup_ratio": 0.1,
        "lr_scheduler.lr_end": 1e-5,
        "model.model_type": "qwen3",
        "model.architectures": "Qwen3ForCausalLM",
        "model.num_hidden_layers": 7,
        "model.num_attention_heads": 4,
        "model.num_key_value_heads": 2,
        "model.head_dim": 16,
        "model.hidden_act": "silu",
        "model.tie_word_embeddings": True,
        "model.params_dtype": "float32",
        "model.rope_theta": 1000000,
        "recompute.mode": "full",
        "recompute.full_recompute_layer": ["0-1", "4"],  # the first 2 of 0-3, the first 1 of 4-6
        "checkpoint.save_path": "./runs/checkpoint",
        "checkpoint.save_interleaved_steps": 50,
        "checkpoint.save_max": 5,
        "train_dataset.dataloader.column_names": ["input_ids", "labels", "loss_mask", "position_ids"],
        "train_dataset.dataloader.config.seq_length": 64,
        "train_dataset.num_parallel_workers": 4,
        "context.device_target": "Ascend",
    }
    assert {path: values.get(path) for path in expected} == expected
    kinds = {item.path: item.kind for item in migration.left}
    assert kinds["optimizer.swap"] is Kind.COST
    assert kinds["recompute_config.select_recompute"] is Kind.COST
    assert kinds["runner_config.gradient_accumulation_steps"] is Kind.NOTHING  # with a pipeline it has no effect


def test_experts_without_a_pipeline() -> None:
    migration = made("qwen3_moe")
    values = new(migration)
    assert migration.degrees.world_size == 2 * 2 * 2
    expected = {
        "parallelism.context_parallel": 2,
        "parallelism.context_parallel_method": "ulysses",
        "parallelism.expert_parallel": 8,
        "parallelism.data_parallel_shard": 2,  # 8 divides shard · 2 · 2 with all of data_parallel alone
        "training.global_batch_size": 1 * 2 * 4,  # without a pipeline gradient_accumulation_steps counts
        "training.steps": 20,  # stop_step, before 3 · (130 // 8) = 48
        "training.seed": 1,
        "training.max_norm": 1.0,
        "lr_scheduler.warmup_steps": 500,  # half of total_steps 1000
        "model.num_experts": 16,
        "model.num_experts_per_tok": 2,
        "model.head_dim": 64 // 8,
        "model.seq_length": 64,
        "model.moe_router_load_balancing_type": "global_aux_loss",
        "train_dataset.dataloader.column_names": [
            *("input_ids", "labels", "loss_mask", "position_ids", "actual_seq_len"),
        ],
        "checkpoint.save_path": "./saved",
        "checkpoint.save_interleaved_steps": 1,
        "checkpoint.no_save_optim": True,
        "checkpoint.load_path": "./output/checkpoint",
        "checkpoint.no_load_optim": False,
        "recompute.full_recompute_layer": ["1"],  # with swapping, layers and not numbers of them
        "swap.layer_swap": [{"layers": ["0"]}],
        "swap.op_swap": [{"op_name": r".*\.flash_attention", "layers": ["0-1"]}],
        "monitor.train_state.local_norm": True,
        "profiler.enable_profiling": True,
        "profiler.end_step": 4,
    }
    assert {path: values.get(path) for path in expected} == expected
    changed = {item.path for item in migration.left if item.kind is Kind.TRAINED}
    assert changed == {"model.model_config.hidden_dropout"}  # not written, 0.1 in graph mode


def test_two_chunks_on_each_stage() -> None:
    migration = made("deepseek_v3")
    values = new(migration)
    assert migration.degrees.world_size == 4 * 4 * 2
    expected = {
        # 9 // 4 = 2 layers each and one more on stage 0 of chunk 0, in the order chunk 0, then chunk 1
        "parallelism.pipeline_parallel_layers_per_stage": ["0-2, 5-6", "3-4, 7-8"],
        "parallelism.pipeline_parallel_interleave_num": 2,
        "parallelism.data_parallel_shard": 4,
        "training.global_batch_size": 64,
        "training.steps": 640 // 64,
        "training.max_norm": 0.0,  # a wrapper without use_clip_grad clips nothing
        "lr_scheduler.type": "ConstantWarmUpLR",
        "lr_scheduler.warmup_steps": 10,
        "recompute.full_recompute_layer": ["3", "7"],  # two layers of stage 1, one in each chunk
        "model.scaling_factor": 40,
        "model.mtp_loss_scaling_factor": 0.3,
        "model.n_group": 1,
        "model.topk_group": 1,
        "model.moe_router_bias_update_rate": 0.0,  # nothing moves biases without TopkBiasBalanceCallback
        "checkpoint.enable_save": False,
    }
    assert {path: values.get(path) for path in expected} == expected
    changed = {item.path for item in migration.left if item.kind is Kind.TRAINED}
    assert "grouped_lr_schedule.grouped[1]" in changed
    assert "grouped_lr_schedule.grouped[0]" not in changed  # its schedule is the one of all
    assert "model.model_config.fp32_residual_connection" in changed
    assert "runner_wrapper.scale_sense.type" in changed
    with_callback = migrate(edited("deepseek_v3", callbacks=[{"type": "TopkBiasBalanceCallback"}]))
    assert new(with_callback)["model.moe_router_bias_update_rate"] == 0.001


def test_adapters_on_a_model_that_its_folder_describes() -> None:
    values = new(made("lora"))
    expected = {
        "model.num_hidden_layers": 3,
        "model.compute_dtype": "bfloat16",  # what the file writes wins over config.json
        "lora_config.lora_rank": 16,
        "lora_config.lora_dropout": 0.01,
        "lora_config.target_modules": ".*linear_qkv",
        "training.steps": 12,
        "training.max_norm": 0.0,
        "lr_scheduler.type": "ConstantWarmUpLR",
        "lr_scheduler.learning_rate": 1e-5,
        "checkpoint.load_path": "/weights/tiny-qwen3",
        "checkpoint.no_load_optim": True,
        "train_dataset.dataloader.path": "json",
    }
    assert {path: values.get(path) for path in expected} == expected
    assert len(values["train_dataset.dataloader.handler"]) == 2
    left = {item.path: item.kind for item in made("lora").left}
    assert left["model.model_config.pet_config.lora_a_init"] is Kind.TRAINED
    assert left["config.json: torch_dtype"] is Kind.NOTHING


def test_a_data_parallel_file_is_for_the_ranks_that_are_named() -> None:
    values = new(made("data_parallel"))
    assert values["training.global_batch_size"] == 4 * 4  # accumulation has no effect in this mode
    assert values["training.steps"] == 80 // 16
    (problem,) = migrate(old("data_parallel")).refused
    assert "--world-size N" in problem.suggestion
    (problem,) = migrate(old("qwen3"), world_size=8).refused
    assert "16" in problem.rule
    alone = migrate(edited("data_parallel", use_parallel=False))
    assert (alone.degrees.world_size, new(alone)["training.global_batch_size"]) == (1, 4)


@pytest.mark.parametrize(
    ("name", "path", "words"),
    [
        (
            "glm4",
            "model.model_config.type",
            "ChatGLM2Config names a model that does not exist here. The models are qwen3",
        ),
        ("telechat3", "model.model_config.model_type", "telechat3_moe names a model that does not exist here"),
        ("predict", "run_mode", "run_mode predict trains nothing"),
    ],
)
def test_what_cannot_be_converted_is_refused_for_one_reason_with_its_place(name: str, path: str, words: str) -> None:
    (problem,) = migrate(old(name)).refused
    assert problem.path == path
    assert problem.line is not None
    assert words in str(problem)


@pytest.mark.parametrize(
    ("changes", "path", "words"),
    [
        ({"parallel_config__data_parallel": 3}, "parallel.dataset_strategy", "must begin with data_parallel 3"),
        ({"parallel_config__expert_parallel": 3}, "parallel_config.expert_parallel", "· context_parallel 1 = 8"),
        ({"parallel_config__model_parallel": "two"}, "parallel_config.model_parallel", "whole number ≥ 1"),
        ({"parallel_config__pipeline_stage": 0}, "parallel_config.pipeline_stage", "whole number ≥ 1"),
        ({"parallel_config__pipeline_stage": 8}, "parallel_config.pipeline_stage", "more than num_layers 7"),
        ({"parallel_config__model_parallel": 2**31}, "parallel_config", "2147483647"),
        ({"model__model_config__offset": 0}, "model.model_config.offset", "must add up to 1"),
        ({"model__model_config__offset": [1, 0, 0]}, "model.model_config.offset", "a list of 2"),
        ({"model__model_config__offset": [4, -3]}, "model.model_config.offset", "without layers"),
        ({"model__model_config__num_hidden_layers": 7}, "model.model_config.num_hidden_layers", "another name"),
        ({"model__model_config__tie_word_embeddings": False}, None, "contradicts tie_word_embeddings False"),
        ({"recompute_config__recompute": [1]}, "recompute_config.recompute", "for each stage"),
        ({"runner_config__batch_size": 1.5}, "runner_config.batch_size", "whole number"),
        ({"train_dataset__data_loader__sizes": [10, 0, 0]}, "train_dataset.data_loader.sizes", "there is no step"),
        ({"train_dataset__data_loader__type": None}, "train_dataset.data_loader", "what to train on"),
        ({"lr_schedule": None}, "lr_schedule", "optimizer.learning_rate"),
        ({"parallel__parallel_mode": 7}, "parallel.parallel_mode", "0, 1, 2 or 3"),
        ({"use_parallel": "yes please"}, "use_parallel", "true or false"),
        ({"parallel__parallel_optimizer_config__optimizer_weight_shard_size": 3}, None, "must divide data_parallel 4"),
        ({"pretrained_model_dir": "/weights"}, "pretrained_model_dir", "config.json"),
        ({"model__model_config__pet_config": {"pet_type": "ptuning2"}}, None, "must be lora"),
    ],
)
def test_a_broken_old_file_is_refused_at_the_field(changes: dict[str, Any], path: str | None, words: str) -> None:
    document = edited("qwen3", **changes)
    migration = migrate(document)
    assert migration.text == ""
    found = [problem for problem in migration.refused if words in problem.rule or words in problem.suggestion]
    assert found, [str(problem) for problem in migration.refused]
    assert path in (None, found[0].path)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("parallel_config: [1\n", "syntax"),
        ("", "empty"),
        ("- parallel_config\n", "mapping of sections"),
        ("parallelism: {tensor_parallel: 2}\n", "nothing to convert"),
        ("parallel_config: {data_parallel: 1}\nparallelism: {tensor_parallel: 2}\n", "one of the two"),
        ("parallel_config: {data_parallel: 010}\n", "octal"),
        ("parallel_config: 3\n", ""),
        ("model: {model_config: x}\n", ""),
        ("runner_config:\n", ""),
    ],
)
def test_what_is_no_such_file_is_refused(text: str, words: str) -> None:
    migration = migrate(read(text, "f.yaml"))
    assert migration.text == ""
    assert migration.refused
    assert words in str(migration.refused[0])


def test_a_field_that_no_rule_knows_is_listed_as_one_that_may_change_training() -> None:
    sections = ("parallel_config", "runner_wrapper", "optimizer", "lr_schedule", "model.model_config", "")
    for section in sections:
        document = edited("qwen3", **{f"{section}__zzz".replace(".", "__").strip("_"): 3})
        migration = migrate(document)
        (unknown,) = [item for item in migration.left if item.path == f"{section}.zzz".strip(".")]
        assert unknown.kind is Kind.TRAINED
        assert_nothing_is_lost(document, migration)


ODD_VALUES: list[Any] = [None, "x", -1, 0, True, 1.5, [], {}, [{}], {"a": 1}, [[1]]]


@pytest.mark.parametrize("first", [0, 5])
def test_any_value_in_any_place_is_refused_or_accounted_for(first: int) -> None:
    document = old("qwen3")
    places = [leaf for leaf in single_values(document.values) if not leaf.startswith("train_dataset_task.")]
    for number, leaf in enumerate(places, first):
        value = ODD_VALUES[number % len(ODD_VALUES)]
        values = with_value(document.values, as_keys(leaf, document.values), value)
        changed = read(yaml.safe_dump(values, sort_keys=False), "f.yaml")
        migration = migrate(changed)
        if not migration.refused:
            assert_nothing_is_lost(changed, migration)


def test_a_pipeline_without_chunks_and_one_with_a_v() -> None:
    pipeline = {"parallel__pipeline_config": {"pipeline_interleave": True, "pipeline_scheduler": "zero_bubble_v"}}
    v = migrate(
        edited(
            "qwen3", **pipeline, model__model_config__pp_interleave_num=2, model__model_config__offset=[[1, 1], [0, 1]]
        )
    )
    # 7 // 4 = 1: stage 0 has 2, stage 1 has 2, then upwards stage 1 has 2 and stage 0 has 1
    assert new(v)["parallelism.pipeline_parallel_layers_per_stage"] == ["0-1, 6", "2-3, 4-5"]
    assert new(v)["parallelism.pipeline_parallel_zero_bubble"] == "zbv"
    assert v.unfit == ()
    ignored = migrate(edited("qwen3", model__model_config__pp_interleave_num=2))
    assert "parallelism.pipeline_parallel_interleave_num" not in new(ignored)
    even = migrate(edited("qwen3", model__model_config__num_layers=8, model__model_config__offset=0))
    assert new(even)["parallelism.pipeline_parallel_layers_per_stage"] == "auto"


@pytest.mark.parametrize(
    ("value", "layers"),
    [
        (True, ["0-6"]),
        ([4, 0], ["0-3"]),
        ([9, True], ["0-3", "4-6"]),
        ([[1, 2]], ["0", "4-5"]),
        ([[False, True]], ["4-6"]),
        (False, None),
        ([0, 0], None),
    ],
)
def test_recomputed_layers(value: Any, layers: list[str] | None) -> None:
    values = new(migrate(edited("qwen3", recompute_config__recompute=value)))
    assert values.get("recompute.full_recompute_layer") == layers
    assert values.get("recompute.mode", "None") == ("full" if layers else "None")


def test_a_new_file_that_does_not_pass_the_check_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    document = edited("qwen3", model__model_config__num_heads=3, model__model_config__n_kv_heads=3)
    (problem, *_) = migrate(document).unfit
    assert "tensor_parallel" in str(problem)
    file = tmp_path / "old.yaml"
    file.write_text(document.text)
    assert main(["migrate", str(file)]) == 2
    assert "does not pass the check yet" in capsys.readouterr().err


def test_the_command_writes_a_file_once_and_reports(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "new.yaml"
    assert main(["migrate", str(FOLDER / "qwen3.yaml"), "--output", str(target)]) == 0
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "for --world-size 16" in shown.err
    assert "optimizer.swap true (line 21)" in shown.err
    assert main(["check", str(target), "--world-size", "16"]) == 0
    capsys.readouterr()
    assert main(["migrate", str(FOLDER / "qwen3.yaml"), "--output", str(target)]) == 2
    assert "File exists" in capsys.readouterr().err
    assert main(["migrate", str(FOLDER / "qwen3.yaml")]) == 0
    assert capsys.readouterr().out == target.read_text()
    assert main(["migrate", str(tmp_path / "nowhere.yaml")]) == 2
    assert main(["migrate", str(FOLDER / "qwen3.yaml"), "--steps", "0"]) == 2
    assert main(["migrate", str(FOLDER / "qwen3.yaml"), "--steps", "5"]) == 2  # the file says how many


def test_the_command_reads_the_models_own_configuration(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lora = str(FOLDER / "lora.yaml")
    assert main(["migrate", lora]) == 2
    shown = capsys.readouterr().err
    assert "--hf-config PATH" in shown
    assert "--steps N" in shown
    (tmp_path / "config.json").write_text(json.dumps(dict(TINY.values)))
    assert main(["migrate", lora, "--steps", "12", "--hf-config", str(tmp_path)]) == 0
    assert new(migrate(old("lora"), completing=TINY, steps=12)) == flat(read(capsys.readouterr().out, "f").values)
    for content in ("[1]", "{", ""):
        (tmp_path / "config.json").write_text(content)
        assert main(["migrate", lora, "--steps", "12", "--hf-config", str(tmp_path)]) == 2
        assert "config.json" in capsys.readouterr().err
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    assert main(["migrate", lora, "--steps", "12", "--hf-config", str(tmp_path)]) == 2
    assert "llama names a model that does not exist here" in capsys.readouterr().err


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -0.5, 2])
@pytest.mark.parametrize("field", ["decay_ratio", "warmup_ratio"])
def test_a_share_that_is_none_is_refused(field: str, value: float) -> None:
    found = migrate(edited("qwen3", **{f"lr_schedule__{field}": value, "lr_schedule__total_steps": 5}))
    assert any(problem.path == f"lr_schedule.{field}" for problem in found.refused)


def test_layers_beyond_any_model_are_dealt_out_at_once() -> None:
    """In turns: of 4 layers the first of two chunks that hold 1 and 5 gets 1, the second 3."""
    assert _dealt_out([4], {(0, 0): 1, (1, 0): 5}, 2) == {(0, 0): 1, (1, 0): 3}
    assert _dealt_out([5, 0], {(0, 0): 3, (1, 0): 3, (0, 1): 3, (1, 1): 3}, 2) == {
        (0, 0): 3, (1, 0): 2, (0, 1): 0, (1, 1): 0,
    }  # fmt: skip
    many = 50_000_000
    assert _dealt_out([many + 1], {(0, 0): many, (1, 0): many}, 2) == {(0, 0): many // 2 + 1, (1, 0): many // 2}


def test_a_folder_of_the_model_that_is_empty_text_is_none() -> None:
    assert not migrate(edited("qwen3", pretrained_model_dir="")).refused


def test_a_home_folder_is_read_for_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "w").mkdir()
    (tmp_path / "w" / "config.json").write_text(json.dumps(TINY.values), encoding="utf-8")
    path = tmp_path / "old.yaml"
    path.write_text((FOLDER / "lora.yaml").read_text(encoding="utf-8"), encoding="utf-8")
    values = dict(read(path.read_text(encoding="utf-8"), "old.yaml").values) | {"pretrained_model_dir": "~/w"}
    path.write_text(yaml.safe_dump(values), encoding="utf-8")
    assert main(["migrate", str(path), "--steps", "12", "--output", str(tmp_path / "new.yaml")]) == 0


def test_a_key_with_a_dot_is_listed_and_not_carried() -> None:
    config: Any = dict(old("qwen3").values["train_dataset"]["data_loader"]["config"]) | {"a": 1, "a.b": 2}
    found = migrate(edited("qwen3", train_dataset__data_loader__config=config))
    assert not found.refused
    assert any(item.path.endswith("a.b") for item in found.left)
