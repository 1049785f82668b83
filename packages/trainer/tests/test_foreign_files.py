"""Files of another format, or of a model that does not exist here, are one message of each command."""

from __future__ import annotations

from pathlib import Path

import pytest
from parallel_trainer.cli import main

GRAPH_MODE = "run_mode: train\nrunner_config: {epochs: 2}\nparallel_config: {data_parallel: 2}\n"
# PUB2-YAML-01: from mindformers 2.1.0, configs/deepseek4/pretrain_deepseek4_flash.yaml.
DEEPSEEK_V4 = (
    "training: {global_batch_size: 8}\n"
    "optimizer: {type: Muon, ns_coefficients: [[[3.4445, -4.7750, 2.0315 ], 8], [[2.0, -1.5, 0.5], 2]]}\n"
    "model: {model_type: deepseek_v4, architectures: DeepseekV4ForCausalLM, n_group: 0, n_routed_experts: 256}\n"
)


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        (GRAPH_MODE, 2, ["graph-mode", "parallel-config migrate"]),
        (DEEPSEEK_V4, 3, ["deepseek_v4", "qwen3, qwen3_moe and deepseek_v3"]),
    ],
)
@pytest.mark.parametrize(
    "command", [["plan", "--world-size", "8"], ["run", "--nproc", "8"], ["verify", "--nproc", "8"]]
)
def test_pub2_yaml_01_one_message_with_its_place(
    command: list[str], text: str, line: int, words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "old.yaml"
    file.write_text(text)
    name, *options = command
    assert main([name, str(file), *options]) == 2
    (message,) = capsys.readouterr().err.splitlines()
    assert message.startswith(f"{file}:{line}:")
    assert all(word in message for word in words)
    assert "n_group" not in message
