"""Files of MindFormers' graph mode, of models that do not exist here, and of neither: one problem, and no edits."""

from __future__ import annotations

import json

import pytest
from parallel_config import ConfigError, load, loads, read, repairs
from parallel_config.cli import main
from parallel_config.formats import model_type_of
from parallel_config.loading import examine

GRAPH_MODE = """\
seed: 42
run_mode: {run_mode}
trainer: {{type: CausalLanguageModelingTrainer, model_name: {model}}}
runner_config: {{epochs: 2, batch_size: 1}}
parallel_config: {{data_parallel: 2, model_parallel: 2}}
model:
  model_config:
    hidden_size: 64
"""

# PUB2-YAML-01: the fields that were judged by rules of another model, or by their type, as that file has them.
DEEPSEEK_V4 = """\
training: {steps: 300, local_batch_size: 1, global_batch_size: 8}
optimizer:
  type: Muon
  ns_coefficients: [[[3.4445, -4.7750, 2.0315 ], 8], [[2.0, -1.5, 0.5], 2]]
parallelism: {expert_parallel: 8}
model:
  model_type: deepseek_v4
  architectures: DeepseekV4ForCausalLM
  num_hidden_layers: 43
  n_routed_experts: 256
  num_experts_per_tok: 6
  n_group: 0
"""


def only_problem(text: str, name: str = "old.yaml"):
    """The one problem of a file, of which there are no repairs."""
    document = read(text, name)
    (problem,) = examine(document, 8).problems
    assert repairs(document, 8) == ()
    return problem


def test_a_graph_mode_file_is_one_problem_that_names_the_section_its_line_and_the_command() -> None:
    problem = only_problem(GRAPH_MODE.format(run_mode="train", model="qwen3"), "my old.yaml")
    assert (problem.path, problem.line, problem.column) == ("runner_config", 4, 1)
    assert "graph-mode" in problem.rule
    assert "parallel_config, line 5" in problem.rule
    assert "parallel-config migrate 'my old.yaml' --output NEW.yaml" in problem.suggestion


@pytest.mark.parametrize(
    "section",
    ["parallel_config", "runner_config", "runner_wrapper", "train_dataset_task", "recompute_config"],
)
def test_each_tell_tale_section_is_enough(section: str) -> None:
    problem = only_problem(f"seed: 1\n{section}: {{type: X}}\n")
    assert (problem.path, problem.line) == (section, 2)
    nested = only_problem("model:\n  model_config: {type: Qwen3Config}\n")
    assert (nested.path, nested.line, nested.column) == ("model.model_config", 2, 3)


def test_a_graph_mode_file_that_cannot_be_converted_is_not_sent_to_the_command() -> None:
    glm = str(only_problem(GRAPH_MODE.format(run_mode="finetune", model="glm4_9b")))
    assert "glm4_9b (trainer.model_name, line 3), does not exist here" in glm
    assert "The models are qwen3, qwen3_moe and deepseek_v3." in glm
    predict = str(only_problem(GRAPH_MODE.format(run_mode="predict", model="qwen3")))
    assert "run_mode predict (run_mode, line 2) trains nothing" in predict
    assert "migrate" not in glm + predict


def test_sections_of_both_formats_are_one_problem() -> None:
    problem = only_problem("parallel_config: {data_parallel: 2}\nparallelism: {tensor_parallel: 2}\n")
    assert (problem.path, problem.line) == ("parallel_config", 1)
    assert "parallelism, line 2" in problem.rule


def test_pub2_yaml_01_a_model_that_does_not_exist_is_refused_first_and_alone(tmp_path, capsys) -> None:
    problem = only_problem(DEEPSEEK_V4)
    assert (problem.path, problem.value, problem.line) == ("model.model_type", "deepseek_v4", 7)
    assert problem.suggestion == "The models are qwen3, qwen3_moe and deepseek_v3."
    file = tmp_path / "pretrain_deepseek4_flash.yaml"
    file.write_text(DEEPSEEK_V4)
    assert main(["check", str(file), "--world-size", "8"]) == 2
    shown = capsys.readouterr().err
    assert "deepseek_v4" in shown
    assert "n_group" not in shown
    assert "Edits" not in shown
    with pytest.raises(ConfigError) as caught:
        load(file)
    assert str(caught.value).startswith(f"{file}:7:")
    assert main(["check", str(file), "--world-size", "8", "--json", "--explain"]) == 2
    report = json.loads(capsys.readouterr().out)
    assert report["repairs"] == []
    assert [found["path"] for found in report["problems"]] == ["model.model_type"]


def test_the_model_is_refused_before_faults_of_yaml_and_of_other_fields() -> None:
    assert (
        only_problem("model: {model_type: glm4, num_hidden_layers: 010}\nparalelism: {}\n").path == "model.model_type"
    )


def test_another_spelling_of_a_model_is_not_replaced_but_named() -> None:
    assert "Did you mean qwen3_moe?" in only_problem("model: {model_type: qwen3_mo}").suggestion
    assert "Did you mean deepseek_v3?" in only_problem("model: {model_type: DeepseekV3}").suggestion
    assert model_type_of("Qwen3-MoE") == "qwen3_moe"
    assert [model_type_of(name) for name in ("deepseek_v4", "qwen2", "glm4_moe", "")] == [None] * 4


def test_a_file_of_other_sections_altogether_is_one_problem() -> None:
    problem = only_problem("llama:\n  input_path:\nglm:\n  input_path:\nqwen:\n  dtype:\n")
    assert (problem.path, problem.line) == ("llama", 1)
    assert "llama, glm, qwen" in problem.rule
    assert "parallelism" in problem.suggestion


def test_misspelt_and_misplaced_sections_keep_their_edits() -> None:
    for text in (
        "paralelism: {tensor_parallel: 2}\nmodle: {}\n",
        "tensor_parallel: 2\ncontext_parallel: 2\n",
        "a: 1\n",
    ):
        assert repairs(read(text, "f.yaml"), 8) or "a: 1" in text
        assert len(examine(read(text, "f.yaml"), 8).problems) == text.count("\n")


SEGMENTS = [[[3.4445, -4.775, 2.0315], 8], [[2.0, -1.5, 0.5], 2]]


def test_muons_coefficients_come_in_segments_too() -> None:
    config = loads(f"optimizer: {{type: Muon, ns_coefficients: {SEGMENTS}}}")
    assert config.optimizer.ns_coefficients == (((3.4445, -4.775, 2.0315), 8), ((2.0, -1.5, 0.5), 2))
    assert loads("optimizer: {type: Muon, ns_coefficients: [3, -4, 2]}").optimizer.ns_coefficients == (3.0, -4.0, 2.0)
    assert loads("optimizer: {type: Muon}").optimizer.ns_coefficients == (3.4445, -4.775, 2.0315)


@pytest.mark.parametrize(
    "value",
    [
        *("[1, 2]", "[1, 2, 3, 4]", "[[[1, 2, 3], 0]]", "[[[1, 2, 3], true]]", "[[[1, 2], 3]]", "[]", "5", "null"),
        *("[[1, 2, 3], [1, 2, 3]]", "[a, b, c]", "[[[1, 2, .nan], 2]]", "{a: 1}"),
    ],
)
def test_other_shapes_of_coefficients_are_refused_with_the_two_that_exist(value: str) -> None:
    (problem,) = examine(read(f"optimizer: {{type: Muon, ns_coefficients: {value}}}", "f.yaml"), 1).problems
    assert problem.path == "optimizer.ns_coefficients"
    assert "segments" in problem.rule
    assert "[[[3.4445, -4.775, 2.0315], 8], [[2.0, -1.5, 0.5], 2]]" in problem.suggestion
