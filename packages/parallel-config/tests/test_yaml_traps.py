"""What YAML does behind a writer's back, and files that are hardly YAML at all."""

from __future__ import annotations

import pytest
import yaml
from parallel_config import ConfigError, Problem, loads, source


def problems(text: str) -> tuple[Problem, ...]:
    with pytest.raises(ConfigError) as caught:
        loads(text, filename="run.yaml")
    return caught.value.problems


@pytest.mark.parametrize(
    ("text", "line", "fragment"),
    [
        ("", 1, "is empty"),
        ("# only a comment\n", 1, "is empty"),
        ("- a\n- b\n", 1, "not a mapping of sections"),
        ("tensor_parallel\n", 1, "not a mapping of sections"),
        ("parallelism:\n\ttensor_parallel: 2\n", 2, "tab"),
        ("training: {}\n---\nparallelism: {}\n", 2, "more than one YAML document"),
        ("training:\n  steps: *n\n", 2, "anchor that is not defined"),
        ("training:\n  steps: 1\n    seed: 2\n", 3, "indented deeper"),
        ("checkpoint:\n  prefix: @home\n", 2, "reserves"),
        ("checkpoint:\n  prefix: 'open\n", 3, "syntax"),
        ("training: [1, 2\n", 2, "syntax"),
        ("training:\n  steps: 1\x00\n", 2, "control character"),
        ("checkpoint:\n  prefix: \ud800\n", 2, "control character"),
        ("callbacks:\n- x: !!python/object/apply:os.system [true]\n", 2, "is a tag"),
        ("callbacks:\n- x: !secret abc\n", 2, "carries a tag"),
        ("callbacks:\n- 1: 2\n", 2, "is a key that YAML does not read as text"),
        ("callbacks:\n- ? [a, b]\n  : 2\n", 2, "is a key that YAML does not read as text"),
        ("training:\n  steps: " + "9" * 5000 + "\n", 2, "64 bits"),
        ("training:\n  steps: 1:30\n", 2, "base 60"),
        ("training:\n  steps: .nan\n", 2, "must be an integer"),
        ("training:\n  max_norm: .inf\n", 2, "finite"),
    ],
)
def test_trap(text: str, line: int, fragment: str) -> None:
    found = next(problem for problem in problems(text) if fragment in str(problem))
    assert found.file == "run.yaml"
    assert found.line == line
    assert found.suggestion


def test_duplicate_keys_name_both_lines() -> None:
    (problem,) = problems("training:\n  steps: 1\n  seed: 2\n  steps: 3\n")
    assert problem.path == "training.steps"
    assert (problem.line, problem.column) == (4, 3)
    assert "line 2" in str(problem)
    assert "line 4" in problem.suggestion


def test_duplicate_sections() -> None:
    (problem,) = problems("training:\n  steps: 1\nparallelism: {}\ntraining:\n  seed: 3\n")
    assert problem.path == "training"


def test_deep_nesting_stops_early() -> None:
    (problem,) = problems("model:\n  x: " + "[" * 60 + "]" * 60 + "\n")
    assert "levels deep" in str(problem)


def test_absurd_nesting_does_not_crash_the_parser() -> None:
    assert problems("model: " + "[" * 100_000)[0].line == 1


def test_nesting_by_indentation_does_not_crash_the_parser() -> None:
    text = "".join(" " * depth + "a:\n" for depth in range(3000))
    assert problems(text)[0].suggestion


def test_exploding_anchors_are_refused() -> None:
    lines = ["model:", "  a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    for level in range(1, 9):
        lines.append(f"  a{level}: &a{level} [{', '.join([f'*a{level - 1}'] * 10)}]")
    (problem,) = problems("\n".join(lines))
    assert "anchors" in str(problem)


def test_exploding_merges_are_refused() -> None:
    lines = ["model:", "  a0: &a0 {}"]
    for level in range(1, 9):
        lines.append(f"  a{level}: &a{level} {{<<: [{', '.join([f'*a{level - 1}'] * 30)}]}}")
    assert problems("\n".join(lines))


def test_an_anchor_inside_itself_is_refused() -> None:
    assert "levels deep" in str(problems("model:\n  x: &x [*x]\n")[0])


def test_anchors_and_merge_keys_work() -> None:
    text = """
model:
  model_type: qwen3
  architectures: X
  common: &common {beta: 1, scale: 2}
  derived: {<<: *common, scale: 3}
"""
    config = loads(text)
    assert config.model.extra["derived"] == {"beta": 1, "scale": 3}


@pytest.mark.parametrize("section", ["parallelism", "training", "model", "monitor", "callbacks"])
def test_empty_section(section: str) -> None:
    (problem,) = problems(f"{section}:\n")
    assert problem.path == section
    assert "empty" in str(problem) or "must be a list" in str(problem)


def test_all_problems_come_at_once_in_the_order_of_the_file() -> None:
    text = """\
training:
  steps: many
parallelism:
  tensor_paralel: 2
  expert_parallel: 0
trainning: {}
"""
    found = problems(text)
    assert [problem.path for problem in found] == [
        "training.steps",
        "parallelism.tensor_paralel",
        "parallelism.expert_parallel",
        "trainning",
    ]
    assert [problem.line for problem in found] == [2, 4, 5, 6]
    assert "4 problems" in str(ConfigError(found))


@pytest.mark.parametrize(
    ("text", "path", "hint"),
    [
        ("parallelism: {tensor_paralel: 2}", "parallelism.tensor_paralel", "Did you mean tensor_parallel?"),
        ("paralelism: {}", "paralelism", "Did you mean parallelism?"),
        ("lora: {}", "lora", "Did you mean lora_config?"),
        ("parallelism: {global_batch_size: 2}", "parallelism.global_batch_size", "section training"),
        ("tensor_parallel: 2", "tensor_parallel", "section parallelism"),
        ("monitor: {tensorbord: {}}", "monitor.tensorbord", "Did you mean tensorboard?"),
        ("training: {lr: 1}", "training.lr", "Remove it"),
    ],
)
def test_unknown_keys(text: str, path: str, hint: str) -> None:
    (problem,) = problems(text)
    assert problem.path == path
    assert hint in problem.suggestion


def test_a_failed_field_causes_no_further_problems() -> None:
    text = """
parallelism: {tensor_parallel: two, context_parallel: 2}
model: {model_type: qwen3, architectures: Qwen3ForCausalLM, num_attention_heads: 3, use_attn_mask_compression: true}
"""
    assert [problem.path for problem in problems(text)] == ["parallelism.tensor_parallel"]


def test_each_callback_has_its_own_problems() -> None:
    text = """
callbacks:
- 3
- {type: MaxLogitsMonitor, step_interval: x}
- {type: Nothing}
- {type: MaxLogitsMonitor, step_interval: 0}
"""
    paths = [problem.path for problem in problems(text)]
    assert paths == ["callbacks[0]", "callbacks[1].step_interval", "callbacks[2].type", "callbacks[3].step_interval"]


def test_a_number_for_a_text_is_quoted_as_it_is_written() -> None:
    (problem,) = problems("checkpoint: {save_path: x, prefix: 1e5}")
    assert problem.suggestion == "Quote it: '1e5'."


def test_a_number_too_large_for_one_stays_text() -> None:
    config = loads(
        "model: {model_type: qwen3, architectures: X, revision: 5e1234567, other: 5.0e+1234567, scale: 2e-1}"
    )
    assert config.model.extra == {"revision": "5e1234567", "other": "5.0e+1234567", "scale": 0.2}
    (problem,) = problems("training: {max_norm: 5e1234567}")
    assert problem.path == "training.max_norm"


@pytest.mark.parametrize(
    ("text", "line", "column"),
    [
        ("parallelism:\n\ttensor_parallel: 2\n", 2, 1),
        ("training:\n  steps: 1\n  steps: 2\n", 3, 3),
        ("parallelism: {tensor_parallel: two}\n", 1, 32),
        ("training: {}\n---\nmodel: {}\n", 2, 1),
    ],
)
def test_places_are_the_same_without_the_c_parser(
    text: str, line: int, column: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_c = problems(text)[0]
    monkeypatch.setattr(source, "_Loader", yaml.SafeLoader)
    without_c = problems(text)[0]
    assert (with_c.line, with_c.column) == (without_c.line, without_c.column) == (line, column)


def test_deep_nesting_without_the_c_parser(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source, "_Loader", yaml.SafeLoader)
    assert "deep" in str(problems("model: " + "[" * 5000)[0])


def test_exponents_are_numbers_without_the_c_parser(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source, "_Loader", yaml.SafeLoader)
    assert loads("training: {max_norm: 1e-5}").training.max_norm == 1e-5
