"""A corpus of wrong files, each made from a right one: every fault is named and has an edit that works.

The edits are made here again, by other code, on the file itself, and the result is loaded from text.
"""

from __future__ import annotations

import itertools
import json
import re
import statistics
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from attrs import frozen
from parallel_config import ConfigError, ConfigWarning, Edit, LineEdit, Repair, load, loads, plan, read, repair, repairs
from parallel_config.document import Document
from parallel_config.loading import Examination, examine

DATA = Path(__file__).parent / "data"
RIGHT = {"pretrain_deepseek3_1b_8p_pynative.yaml": 8, "qwen3_4d.yaml": 16, "moe_context.yaml": 16}

WRONG_VALUES: dict[str, list[str]] = {
    "data_parallel_shard": ["0", "-2", "3", "64", '"4"', "all"],
    "reshard_after_forward_policy": ["no", "sometimes"],
    "cpu_offload": ['"False"', "maybe"],
    "tensor_parallel": ["0", "3", "5", "32", '"2"', "2.0", "2.5", "True", "02", "null", "[2]"],
    "context_parallel": ["0", "3", "64", "2.5", "yes"],
    "context_parallel_method": ["ring", "no"],
    "ulysses_degree_in_cp": ["4", "3", "None", "0"],
    "context_parallel_mask_type": ["full"],
    "pipeline_parallel": ["0", "3", "7", "-1"],
    "pipeline_parallel_interleave_num": ["0", "5", "1.5"],
    "expert_parallel": ["0", "3", "7", "48", '"8"'],
    "npu_nums_per_device": ["0", "3", "16"],
    "moe_token_dispatcher_type": ["alltoallv", "on"],
    "local_batch_size": ["0", "3", "-1", "1.0"],
    "global_batch_size": ["0", "7", "17", '"8"', "many"],
    "max_norm": ["big", "true", ".nan"],
    "steps": ["-1", "1.5", "1:30"],
    "seq_length": ["0", "63", "33", '"64"'],
    "intermediate_size": ["127", "0"],
    "vocab_size": ["1", "0"],
    "num_hidden_layers": ["0", "three"],
    "num_attention_heads": ["7", "0"],
    "num_key_value_heads": ["3", "0"],
    "n_routed_experts": ["12", "10"],
    "num_experts_per_tok": ["5", "100"],
    "n_group": ["3", "0"],
    "topk_group": ["8", "3"],
    "model_type": ["null", "[a]"],
    "architectures": ["[Qwen3ForCausalLM]"],
    "use_flash_attention": ["1", "flash"],
    "num_nextn_predict_layers": ["2"],
    "betas": ["[0.9]", "[0.9, 1.5]", "0.9"],
    "eps": ["0.0", "-1.0", "1.0e-50"],
    "weight_decay": ["-0.1", "small"],
    "learning_rate": ["-1.0", "fast"],
    "warmup_steps": ["-1", "1.5"],
    "save_path": ['""', "3"],
    "save_max": ["0"],
    "start_step": ["0", "9"],
    "end_step": ["1"],
    "datasets_type": ["BertDataset"],
    "sizes": ["[1, 2]", "8000"],
    "split": ["none", '"0, 0, 0"'],
    "mode": ["every", "select"],
    "create_attention_mask": ["true"],
    "full_recompute_layer": ['["3", "1"]', '["2-9"]', "3"],
}

DEEPSEEK = "pretrain_deepseek3_1b_8p_pynative.yaml"
RIGHT_ALL_THE_SAME = {
    (DEEPSEEK, "pipeline_parallel_interleave_num", "5"),
    (DEEPSEEK, "intermediate_size", "127"),
    (DEEPSEEK, "num_attention_heads", "7"),
    (DEEPSEEK, "vocab_size", "1"),
    (DEEPSEEK, "n_routed_experts", "12"),
}
"""Values of the table that this file can have: it splits data alone (8 ranks, pp 1, tp 1, ep 1, 4 groups)."""


@frozen
class Wrong:
    """A faulty text, the world it is for, and the key and line of its fault."""

    name: str
    text: str
    world_size: int
    key: str | None
    line: int | None


def with_value(text: str, key: str, value: str) -> tuple[str, int] | None:
    """The text with another value for the first such key that stands on one line, and that line's number."""
    match = re.search(rf"^(\s*){key}: .+$", text, re.MULTILINE)
    if match is None:
        return None
    changed = text[: match.start()] + f"{match[1]}{key}: {value}" + text[match.end() :]
    return changed, text.count("\n", 0, match.start(1) + len(match[1])) + 1


def value_faults() -> list[Wrong]:
    found = []
    for file, world_size in RIGHT.items():
        text = (DATA / file).read_text()
        for key, values in WRONG_VALUES.items():
            for value in values:
                changed = with_value(text, key, value)
                if changed is not None and (file, key, value) not in RIGHT_ALL_THE_SAME:
                    found.append(Wrong(f"{file}: {key}: {value}", changed[0], world_size, key, None))
    return found


MISWRITTEN_KEYS = (
    ("  tensor_parallel:", "  tensor_paralel:", "tensor_paralel"),
    ("  context_parallel:", "  contex_parallel:", "contex_parallel"),
    ("  expert_parallel:", "  expert_paralell:", "expert_paralell"),
    ("  global_batch_size:", "  global_batchsize:", "global_batchsize"),
    ("  seed: ", "  sed: ", "sed"),
    ("  start_step:", "  start_steps:", "start_steps"),
    ("\nparallelism:", "\nparalelism:", "paralelism"),
    ("\ntraining:", "\ntrainning:", "trainning"),
    ("\nmodel:", "\nmodels:", "models"),
    ("\ntrain_dataset:", "\ntrain_datasets:", "train_datasets"),
    ("\nrecompute:", "\nre_compute:", "re_compute"),
    ("\nparallelism:", "\nparallelism:\n  learning_rate: 0.1", "learning_rate"),
    ("\ntraining:", "\nvocab_size: 3\ntraining:", "vocab_size"),
)
"""What a right file has, what stands there instead, and the key at fault."""


def key_faults() -> list[Wrong]:
    """Keys misspelt in sections that take no others, whole sections misspelt, fields in the wrong section."""
    found = []
    for file, world_size in RIGHT.items():
        text = (DATA / file).read_text()
        for right, wrong, key in MISWRITTEN_KEYS:
            if right in text:
                found.append(Wrong(f"{file}: {key}", text.replace(right, wrong, 1), world_size, key, None))
    return found


def yaml_faults() -> list[Wrong]:
    """Files that YAML itself refuses, or silently reads as something else."""
    found = []
    for file, world_size in RIGHT.items():
        text = (DATA / file).read_text()
        lines = text.split("\n")
        number = next(at for at, line in enumerate(lines, 1) if line.startswith("  tensor_parallel:"))
        line = lines[number - 1]

        def changed(new: str, at: int = number, lines: list[str] = lines) -> str:
            return "\n".join([*lines[: at - 1], new, *lines[at:]])

        for name, content, where in (
            ("a tab", changed("\t" + line.strip()), number),
            ("a key twice", changed(line + "\n" + line), number + 1),
            ("no space after the colon", changed(line.replace(": ", ":")), None),
            ("an open quote", changed("  reshard_after_forward_policy: 'always"), None),
            ("an open bracket", changed(line.replace(": ", ": [")), None),
            ("too deep", changed("      " + line), None),
            ("a reserved sign", changed("  context_parallel_method: @colossal"), None),
            ("a control character", changed(line + "\x07"), number),
            ("a tag", changed(line.replace(": ", ": !degree ")), number),
            ("two documents", text + "---\nmore: 1\n", None),
            ("an unknown anchor", changed(line.split(":")[0] + ": *degree"), number),
        ):
            found.append(Wrong(f"{file}: {name}", content, world_size, None, where))
    return found


def double_faults() -> list[Wrong]:
    """Two independent faults in one file; the second is checked by its own key."""
    found = []
    pairs = [("steps", "-1"), ("max_norm", "big"), ("weight_decay", "-0.1"), ("expert_parallel", "0"), ("seed", "-3")]
    for file, world_size in RIGHT.items():
        text = (DATA / file).read_text()
        for first, (key, value) in itertools.pairwise(pairs):
            one = with_value(text, *first)
            two = with_value(one[0], key, value) if one else None
            if two is not None:
                found.append(Wrong(f"{file}: {first} and {key}: {value}", two[0], world_size, key, None))
    return found


CASES: list[tuple[str, int, str, str]] = [
    ("PUB-CFG-01 a", 8, "parallelism: {tensor_parallel: 2, pipeline_parallel: 3}", "pipeline_parallel"),
    ("PUB-CFG-01 c", 2, "parallelism: {tensor_parallel: 4}", "tensor_parallel"),
    ("PUB-CFG-01 d", 24, "parallelism: {tensor_parallel: 4, pipeline_parallel: 4}", "pipeline_parallel"),
    ("PUB-CFG-01 h", 12, "parallelism: {tensor_parallel: 2, expert_parallel: 8}", "expert_parallel"),
    ("PUB-CFG-01 i", 8, "parallelism: {tensor_parallel: 4, expert_parallel: 16}", "expert_parallel"),
    ("PUB-CFG-02 g", 12, "parallelism: {data_parallel_shard: 8}", "data_parallel_shard"),
    ("PUB-CFG-02 h", 8, "parallelism: {tensor_parallel: 2, data_parallel_shard: 8}", "data_parallel_shard"),
    ("PUB-CFG-02 i", 8, "parallelism: {data_parallel_shard: 3}", "data_parallel_shard"),
    ("PUB-CFG-02 j", 8, "parallelism: {data_parallel_shard: 0}", "data_parallel_shard"),
    ("PUB-CFG-02 k", 8, "parallelism: {data_parallel_shard: -2}", "data_parallel_shard"),
    ("PUB-CFG-03 b", 4, "training: {local_batch_size: 2, global_batch_size: 20}", "global_batch_size"),
    ("PUB-CFG-03 c", 4, "training: {local_batch_size: 4, global_batch_size: 8}", "global_batch_size"),
    *(
        (
            f"chunks of a zero-bubble schedule, {name}",
            2,
            (
                f"parallelism: {{pipeline_parallel: 2, pipeline_parallel_layers_per_stage: {placement}, {fields}}}\n"
                "model: {model_type: qwen3, architectures: Qwen3ForCausalLM, num_hidden_layers: 10}"
            ),
            "pipeline_parallel_zero_bubble",
        )
        for name, placement, fields in (
            ("a", "auto", "pipeline_parallel_zero_bubble: zbv"),
            ("b", "[0-3, 4-9]", "pipeline_parallel_zero_bubble: zbv"),
            ("c", '["0-1, 7-9", "2, 3-6"]', "pipeline_parallel_interleave_num: 2, pipeline_parallel_zero_bubble: zbh1"),
            ("d", "[0-3, 4-9]", "pipeline_parallel_zero_bubble: zb_h1"),
        )
    ),
    ("PUB-YAML-01 e", 1, "parallelism: {ulysses_degree_in_cp: None}", "ulysses_degree_in_cp"),
    ("PUB-YAML-01 g", 2, 'parallelism: {tensor_parallel: "2"}', "tensor_parallel"),
    ("PUB-YAML-01 i", 2, "parallelism: {tensor_parallel: 2.5}", "tensor_parallel"),
    ("PUB-YAML-01 j", 2, "parallelism: {tensor_parallel: True}", "tensor_parallel"),
    ("PUB-YAML-01 m", 2, "parallelism: {reshard_after_forward_policy: no}", "reshard_after_forward_policy"),
]


def placement_cases() -> list[Wrong]:
    """PUB-PP-01 and PUB-PP-02: layers that do not divide, and lists that lose, repeat or invent layers."""
    key, found = "pipeline_parallel_layers_per_stage", []
    for name, layers, pp, chunks, placement in (
        ("PUB-PP-01 c", 30, 4, 1, "auto"),
        ("PUB-PP-01 d", 40, 8, 2, "auto"),
        ("PUB-PP-01 e", 8, 2, 1, "null"),
        ("PUB-PP-01 g", 2, 4, 1, "auto"),
        ("PUB-PP-02 d", 10, 2, 2, '["0-1, 4-8", "2-3, 10"]'),
        ("PUB-PP-02 e", 10, 2, 2, '["0-2, 4-8", "2-3, 9"]'),
        ("PUB-PP-02 f", 10, 2, 2, "[0-4, 5-9]"),
        ("PUB-PP-02 g", 10, 2, 1, "[0-3, 4-6, 7-9]"),
        ("PUB-PP-02 h", 10, 2, 1, "[1-4, 5-9]"),
        ("PUB-PP-02 i", 10, 2, 1, "[0-4, 5-8]"),
        ("PUB-PP-02 j", 10, 2, 1, "[4-0, 5-9]"),
    ):
        text = f"""
parallelism:
  pipeline_parallel: {pp}
  pipeline_parallel_interleave_num: {chunks}
  {key}: {placement}
model:
  model_type: qwen3
  architectures: Qwen3ForCausalLM
  num_hidden_layers: {layers}
"""
        found.append(Wrong(name, text, pp, key, None))
    return found


CORPUS = [
    *value_faults(),
    *key_faults(),
    *yaml_faults(),
    *double_faults(),
    *placement_cases(),
    *(Wrong(name, text, world_size, key, None) for name, world_size, text, key in CASES),
]


def test_the_corpus_is_large_and_its_originals_are_right() -> None:
    assert len(CORPUS) >= 200
    assert len({wrong.text for wrong in CORPUS}) == len(CORPUS)
    for file, world_size in RIGHT.items():
        assert plan(load(DATA / file), world_size).world_size == world_size
        assert repairs(read((DATA / file).read_text(), file), world_size) == ()


@pytest.mark.parametrize("wrong", CORPUS, ids=lambda wrong: wrong.name)
def test_every_fault_is_named_and_has_an_edit_that_works(wrong: Wrong) -> None:
    document = read(wrong.text, "run.yaml")
    found = examine(document, wrong.world_size).problems
    assert found
    if wrong.key is not None:
        named = [problem.path.rpartition(".")[2].split("[")[0] for problem in found]
        assert wrong.key in named or any(f"{wrong.key} " in problem.rule for problem in found)
    if wrong.line is not None:
        assert wrong.line in {problem.line for problem in found}
    offered = repairs(document, wrong.world_size)
    assert 1 <= len(offered) <= 5
    for each in offered:
        assert plan_of(repaired(wrong.text, each), wrong.world_size) == wrong.world_size


def repaired(text: str, repair: Repair) -> str:
    """The file with the edits of a repair made in it."""
    lines: list[str | None] = list(text.split("\n"))
    for edit in repair.edits:
        if isinstance(edit, LineEdit):
            lines[edit.line - 1] = edit.content
    values: Any = read("\n".join(line for line in lines if line is not None), "run.yaml").values
    for edit in repair.edits:
        if isinstance(edit, LineEdit):
            continue
        *parents, name = re.findall(r"[^.\[\]]+", edit.path)
        section = values
        for key in parents:
            section = section[int(key)] if isinstance(section, list) else section.setdefault(key, {})
        place: Any = int(name) if isinstance(section, list) else name
        if edit.action == "set":
            section[place] = edit.value
        elif edit.action == "remove":
            del section[place]
        elif edit.action == "move":
            values.setdefault(edit.value, {})[name] = section.pop(place)
        else:
            section[edit.value] = section.pop(place)
    return json.dumps(values)


def plan_of(text: str, world_size: int) -> int:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConfigWarning)
        return plan(loads(text), world_size).world_size


def test_a_file_takes_little_work(lines_run: Callable[[Callable[[], object]], int]) -> None:
    """A hundred thousand lines of Python are 10 ms or so."""
    work = [lines_run(lambda wrong=wrong: look_for_repairs(wrong)) for wrong in CORPUS]
    *_, high = statistics.quantiles(work, n=20)
    assert high < 100_000
    assert max(work) < 300_000


def test_few_edits_are_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = 0

    def counted(document: Document, world_size: int | None) -> Examination:
        nonlocal tried
        tried += 1
        return examine(document, world_size)

    monkeypatch.setattr(repair, "examine", counted)
    for wrong in CORPUS:
        tried = 0
        repairs(read(wrong.text, "run.yaml"), wrong.world_size)
        assert tried <= 15, wrong.name


def look_for_repairs(wrong: Wrong) -> None:
    document = read(wrong.text, "run.yaml")
    examine(document, wrong.world_size)
    repairs(document, wrong.world_size)


def test_a_misplaced_or_misspelt_key_keeps_its_value() -> None:
    for wrong in key_faults():
        own_section_has_it = wrong.text.count(f"{wrong.key}: ") > 1
        first, *_ = repairs(read(wrong.text, "run.yaml"), wrong.world_size)
        keeps = any(isinstance(edit, Edit) and edit.action in {"rename", "move"} for edit in first.edits)
        assert keeps != own_section_has_it, wrong.name


def test_the_nearest_edit_comes_first() -> None:
    first, *_ = repairs(read("parallelism: {tensor_parallel: 3}", "run.yaml"), 8)
    assert [str(edit) for edit in first.edits] == ["parallelism.tensor_parallel: 4"]


def test_one_edit_is_preferred_to_two() -> None:
    text = "parallelism: {tensor_parallel: 3, expert_parallel: 3}"
    assert [len(repair.edits) for repair in repairs(read(text, "run.yaml"), 9)] == []
    found = repairs(read("parallelism: {tensor_parallel: 3, pipeline_parallel: 5}", "run.yaml"), 8)
    assert found
    assert all(len(repair.edits) >= 2 for repair in found)


def test_a_hopeless_file_has_no_repair() -> None:
    with pytest.raises(ConfigError):
        loads("")
    assert repairs(read("", "run.yaml"), 8) == ()
