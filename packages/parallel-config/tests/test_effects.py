"""What the schema declares of its fields, and what `check` and `fields` tell of that."""

from __future__ import annotations

from pathlib import Path

import pytest
from parallel_config import fields_without_effect, loads
from parallel_config.cli import main
from parallel_config.effects import all_fields
from parallel_config.reference import markdown

QWEN = "model_type: qwen3, architectures: Qwen3ForCausalLM"


def test_every_field_has_a_meaning_in_a_sentence() -> None:
    assert len(all_fields()) > 250
    for field in all_fields().values():
        assert field.effect.about[0].isupper(), field.path
        assert field.effect.about.endswith("."), field.path
        assert "  " not in field.type, field.path


@pytest.mark.parametrize(
    ("path", "kind", "default", "allowed", "acts"),
    [
        ("parallelism.tensor_parallel", "integer", "1", "≥ 1", "both engines"),
        ("parallelism.pipeline_parallel_p2p_transport", "text", "plain", "plain or auto", "hyperparallel"),
        ("parallelism.dense_fsdp_shard_size", "integer or null", "null", "≥ 1", "hyperparallel"),
        ("parallelism.pipeline_parallel_microbatch_size", "integer", "1", "", "reserved"),
        ("model.v_head_dim", "integer or null", "of the model", "≥ 1", "both engines; deepseek_v3"),
        ("train_dataset.dataloader.shuffle", "true or false", "false", "", "both engines"),
        ("eval_dataset.dataloader.shuffle", "true or false", "false", "", "nothing"),
        ("optimizer.betas", "list of number", "[0.9, 0.95]", "", "both engines"),
        ("swap.layer_swap[].layers", "list of layers", "[]", "", "nothing"),
    ],
)
def test_what_a_field_is(path: str, kind: str, default: str, allowed: str, acts: str) -> None:
    field = all_fields()[path]
    assert (field.type, field.default, field.allowed, field.acts) == (kind, default, allowed, acts)


@pytest.mark.parametrize(
    ("text", "native", "hyperparallel"),
    [
        ("parallelism: {dense_fsdp_shard_size: 2}", ["parallelism.dense_fsdp_shard_size"], []),
        ("recompute: {mode: full, full_recompute_layer: ['0-1', '3']}", ["recompute"], []),
        ("parallelism: {pipeline_parallel_p2p_transport: auto}", ["parallelism.pipeline_parallel_p2p_transport"], []),
        ("swap: {enable: false, default_prefetch: 2}", ["swap"], ["swap.default_prefetch"]),
        ("callbacks: [{type: MaxLogitsMonitor, step_interval: 2}]", ["callbacks"], None),
        ("training: {steps: 3}", [], None),
        (f"model: {{{QWEN}, softmax_compute_dtype: float32}}", ["model.softmax_compute_dtype"], None),
        (f"model: {{{QWEN}, kv_lora_rank: 8, use_qk_norm: true}}", ["model.kv_lora_rank"], None),
        (f"model: {{{QWEN}, rope_scaling: {{type: yarn, factor: 2}}}}", [], None),
        (f"model: {{{QWEN}, moe_pad_tokens: 1}}", ["model.moe_pad_tokens"], None),
        ("parallelism: {}", [], None),
        ("optimizer: {ns_coefficients: [[[1, 2, 3], 4], [[1, 2, 3], 5]]}", ["optimizer.ns_coefficients"], None),
        ("context: {mode: 1}\ntraining: {steps: 1}", ["context"], None),
    ],
)
def test_fields_without_effect_by_engine(text: str, native: list[str], hyperparallel: list[str] | None) -> None:
    config = loads(text)
    assert list(fields_without_effect(config)) == native
    expected = native if hyperparallel is None else hyperparallel
    assert list(fields_without_effect(config, "hyperparallel")) == expected


def test_the_file_s_engine_decides_where_none_is_given() -> None:
    with pytest.warns(match="section extensions"):
        config = loads("extensions: {engine: hyperparallel}\nrecompute: {mode: full, full_recompute_layer: ['0']}")
    assert fields_without_effect(config) == ()
    assert fields_without_effect(config, "native") == ("recompute",)


def test_check_says_once_what_has_no_effect(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "two.yaml"
    path.write_text(
        "parallelism: {cpu_offload: true, expert_parallel_use_safe_tokens: false, enable_mc2: true}\n"
        "recompute: {mode: None}\n"
    )
    assert main(["check", str(path), "--world-size", "2"]) == 0
    said = capsys.readouterr().err
    assert "native: parallelism.cpu_offload, parallelism.expert_parallel_use_safe_tokens, recompute." in said
    assert said.count("enable_mc2") == 1  # without effect for another reason: tensor_parallel is 1
    assert main(["check", str(path), "--world-size", "2", "--engine", "hyperparallel"]) == 0
    assert "with engine hyperparallel: parallelism.expert_parallel_use_safe_tokens." in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "status", "told"),
    [
        (["parallelism.tensor_parallel"], 0, "acted on by: both engines"),
        (["recompute_comm"], 0, "recompute_comm.select_module"),
        (["callbacks"], 0, "callbacks[].type"),
        (["swap.layer_swap"], 0, "swap.layer_swap[].layers"),
        ([], 0, "lr_scheduler.learning_rate"),
        (["parallelism.tensor_paralel"], 2, "Did you mean parallelism.tensor_parallel?"),
        (["warmup_steps"], 2, "Did you mean lr_scheduler.warmup_steps?"),
        (["qqq"], 2, "parallel-config fields lists all of them"),
    ],
)
def test_fields_in_the_terminal(
    arguments: list[str], status: int, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["fields", *arguments]) == status
    captured = capsys.readouterr()
    assert told in (captured.err if status else captured.out)


def test_the_page_has_a_row_for_each_field() -> None:
    page = markdown()
    rows = [line for line in page.splitlines() if line.startswith("| `")]
    assert len(rows) == len(all_fields())
    assert all(row.count("|") == 7 for row in rows)


@pytest.mark.parametrize("written", ["parallelism", "training", "swap"])
def test_an_empty_section_gets_an_edit_that_works(
    written: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "empty.yaml"
    path.write_text(f"{written}:\n")
    assert main(["check", str(path), "--world-size", "2"]) == 2
    said = capsys.readouterr().err
    assert f"1. {written}: {{}}" in said
    assert "remove" not in said  # an empty file is refused, too
    path.write_text(f"{written}: {{}}\n")
    assert main(["check", str(path), "--world-size", "2"]) == 0


@pytest.mark.parametrize(
    "text",
    [
        "parallelism: {pipeline_parallel: 2, pipeline_parallel_layers_per_stage: ['0-1', '2-1234567890']}",
        "recompute: {mode: full, full_recompute_layer: ['0-1234567890']}",
        f"recompute: {{mode: full, full_recompute_layer: ['{'9' * 5000}']}}",
    ],
)
def test_a_layer_of_ten_digits_or_more_is_called_what_it_is(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "far.yaml"
    path.write_text(text)
    assert main(["check", str(path), "--world-size", "2"]) == 2
    said = capsys.readouterr().err
    assert "must list layers of at most 9 digits" in said
    assert "neither" not in said
