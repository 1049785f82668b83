"""What is allowed and hardly ever meant: said when a file is checked, and nothing else is."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
from parallel_config import ConfigWarning, loads
from parallel_config.cli import main
from parallel_config.schema import TrainConfig

COSINE = "lr_scheduler: {type: CosineWithWarmUpLR, learning_rate: 0.001, "


def said(text: str) -> list[str]:
    """The warnings of a file, one each time it is loaded."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert isinstance(loads(text), TrainConfig)
    assert all(warning.category is ConfigWarning for warning in caught)
    return [str(warning.message) for warning in caught]


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        # PUB2-LR-01, rows a and b: rates of 0.0009 and 0.00045 in the last step.
        ("training: {steps: 10}\n" + COSINE + "warmup_steps: 10}", ["warmup_steps 10", "steps 10", "0.001", "0.0009"]),
        ("training: {steps: 10}\n" + COSINE + "warmup_steps: 20}", ["warmup_steps 20", "steps 10", "0.001", "0.00045"]),
        ("training: {steps: 10}\n" + COSINE + "warmup_ratio: 1.0}", ["warmup_ratio 1.0", "10 steps", "0.0009"]),
        ("training: {steps: 10}\n" + COSINE + "warmup_ratio: 1, warmup_steps: 0}", ["warmup_ratio 1", "0.0009"]),
        ("training: {steps: 10}\n" + COSINE + "warmup_steps: 10, warmup_lr_init: 0.002}", ["0.001", "0.0011"]),
        ("training: {steps: 100}\n" + COSINE + "decay_steps: 50, lr_end: 0.25}", ["decay_steps 50", "lr_end 0.25"]),
        ("training: {steps: 100}\n" + COSINE + "decay_steps: 200}", ["decay_steps 200", "100", "no effect"]),
        ("training: {max_norm: -1.0}", ["max_norm -1.0", "switches clipping off", "0"]),
        (
            COSINE.replace("0.001", "2.0") + "}\noptimizer: {weight_decay: 1.5}",
            ["learning_rate 2.0", "weight_decay 1.5", "1 - 3"],
        ),
    ],
)
def test_it_is_said_once(text: str, parts: list[str]) -> None:
    (sentence,) = said(text)
    assert [part for part in parts if part not in sentence] == []


@pytest.mark.parametrize(
    "text",
    [
        "training: {steps: 10}\n" + COSINE + "warmup_steps: 9}",
        "training: {steps: 10}\n" + COSINE + "warmup_ratio: 0.99, warmup_steps: 50}",
        "training: {steps: 10}\n" + COSINE + "warmup_steps: 20, warmup_lr_init: 0.001}",
        "training: {steps: 10}\n" + COSINE + "decay_steps: 10}",
        "training: {steps: 10}\nlr_scheduler: {type: ConstantWarmUpLR, warmup_steps: 0, decay_steps: 5}",
        "training: {steps: 0}\n" + COSINE + "warmup_steps: 5}",
        "training: {max_norm: 0}",
        COSINE + "}\noptimizer: {weight_decay: 999.0}",
    ],
)
def test_what_is_meant_is_not_commented_on(text: str) -> None:
    assert said(text) == []


def data(ids: str, evaluated: str = "") -> str:
    loader = "dataloader: {type: BlendedMegatronDatasetDataLoader, datasets_type: GPTDataset, "
    loader += "sizes: [1, 1, 1], config: "
    config = 'data_path: [corpus], split: "1, 1, 0", seq_length: 8, create_attention_mask: false, '
    config += "create_compressed_eod_mask: false, "
    text = f"train_dataset: {{{loader}{{{config}{ids}}}}}}}"
    return f"{text}\neval_dataset: {{interval: 1, {loader}{{{config}{evaluated}}}}}}}" if evaluated else text


@pytest.mark.filterwarnings("ignore:Extensions of this project")
def test_one_id_for_padding_and_ends_is_named_once() -> None:
    """PUB2-DATA-01: what follows from it for samples is in the trainer's tests."""
    both = "config.pad and eod are both 5"
    for text, where in (
        (data("eod: 5, pad: 5"), "train_dataset"),
        (data("eod: 5, pad: 5", "eod: 5, pad: 5"), "train_dataset"),
        (data("eod: 5, pad: 1", "eod: 5, pad: 5"), "eval_dataset"),
    ):
        (sentence,) = [sentence for sentence in said(text) if "Extensions" not in sentence]
        assert sentence.startswith(f"{where}.dataloader.{both}")
    for ids in ("eod: 5, pad: 6", "eod: -1, pad: -1", "eod: 5"):
        assert said(data(ids)) == []


def test_check_warns_and_succeeds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "file.yaml"
    file.write_text("training: {steps: 10, max_norm: -0.5}\n" + COSINE + "warmup_steps: 20}", encoding="utf-8")
    assert main(["check", str(file), "--world-size", "1"]) == 0
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("warning: ")]
    assert len(lines) == 2
    assert "max_norm -0.5" in " ".join(lines)
    assert "warmup_steps 20" in " ".join(lines)
