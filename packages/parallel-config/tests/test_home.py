"""`~` in a path is the home folder, in every field and option that holds a path."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
from attrs import fields, has
from parallel_config import ConfigError, TrainConfig, expand_home, loads, read
from parallel_config.cli import main
from parallel_config.schema.setting import PathText
from parallel_config.structure import Structured, structure

DATASET = """
train_dataset:
  dataloader:
    type: BlendedMegatronDatasetDataLoader
    datasets_type: GPTDataset
    sizes: [12, 0, 0]
    config: {{split: "1, 0, 0", {field}: {value}}}
"""
FIELDS = {
    "checkpoint.save_path": "checkpoint: {{save_path: {path}}}",
    "checkpoint.load_path": "checkpoint: {{load_path: {path}}}",
    "checkpoint.base_load_path": "checkpoint: {{base_load_path: {path}}}",
    "monitor.tensorboard.tensorboard_dir": "monitor: {{tensorboard: {{tensorboard_dir: {path}}}}}",
    "monitor.tensorboard.output_dir": "monitor: {{tensorboard: {{output_dir: {path}}}}}",
    "profiler.output_path": "profiler: {{output_path: {path}}}",
    "train_dataset.dataloader.config.data_path": DATASET.format(field="data_path", value="[{path}]"),
    "train_dataset.dataloader.config.train_data_path": DATASET.format(field="train_data_path", value="[{path}]"),
    "train_dataset.dataloader.config.valid_data_path": DATASET.format(field="valid_data_path", value="[{path}]"),
    "train_dataset.dataloader.config.test_data_path": DATASET.format(field="test_data_path", value="[{path}]"),
    "train_dataset.dataloader.config.path_to_cache": DATASET.format(field="path_to_cache", value="{path} "),
}


@pytest.fixture(autouse=True)
def home(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")


def value_of(config: TrainConfig, field: str) -> object:
    found: object = config
    for name in field.split("."):
        found = getattr(found, name)
    return found[0] if isinstance(found, tuple) else found


def structured(field: str, path: str) -> Structured:
    """What a file with this path in the field gives, whatever other rules say of such a file."""
    return structure(read(FIELDS[field].replace("{{", "{").replace("}}", "}").replace("{path}", path), "run.yaml"))


@pytest.mark.parametrize("field", FIELDS)
def test_pub2_path_01_a_home_folder_is_read_in_every_field(field: str) -> None:
    """PUB2-PATH-01."""
    found = structured(field, "~/nc-ckpt")
    assert found.problems == ()
    assert value_of(found.config, field) == "/home/me/nc-ckpt"


@pytest.mark.parametrize("field", FIELDS)
def test_what_stands_for_no_path_is_refused_in_every_field(field: str) -> None:
    (unknown,) = structured(field, "~no-such-user/x").problems
    assert "~no-such-user/x has no home folder for ~no-such-user. Write ~ for your home folder" in str(unknown)
    (variable,) = structured(field, "$HOME/x").problems
    assert "$HOME/x has a shell variable, which is not replaced here. Write ~ for your home folder" in str(variable)
    assert variable.path.startswith(field)


def parts(kind: Any) -> Iterator[Any]:
    """A type, and those that it is made of."""
    yield kind
    for inner in get_args(kind):
        yield from parts(inner)


def test_no_field_of_a_path_is_plain_text() -> None:
    """Every field whose name says that it is a path or a folder is declared as one."""

    def texts(cls: type, before: str) -> list[str]:
        found = []
        for attribute in fields(cls):
            kind = get_type_hints(cls)[attribute.name]
            inner = list(parts(kind))
            path = f"{before}{attribute.name}"
            if attribute.name.endswith(("_path", "_dir", "_file", "path_to_cache")) and PathText not in inner:
                found.append(path)
            for section in inner:
                if isinstance(section, type) and has(section) and attribute.name != "source":
                    found += texts(section, f"{path}.")
        return found

    assert texts(TrainConfig, "") == []


def test_a_tilde_within_a_path_and_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """YAML's own ~ is null; a path that only holds a tilde, or a dollar within a name, is as it is."""
    assert expand_home("~") == "/home/me"
    assert expand_home("a/~/b~") == "a/~/b~"
    assert expand_home("a$b/c") == "a$b/c"
    assert expand_home("~root/x").endswith("/x")
    assert not expand_home("~root/x").startswith("~")
    with pytest.raises(ConfigError, match="save_path must be text"):
        loads("checkpoint: {save_path: ~}")


def test_the_file_of_the_command_is_found_there(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "run.yaml").write_text("parallelism: {tensor_parallel: 2}\n")
    assert main(["check", "~/run.yaml", "--world-size", "2"]) == 0
    with pytest.raises(SystemExit):
        main(["check", "~no-such-user/run.yaml", "--world-size", "2"])
    assert "has no home folder for ~no-such-user" in capsys.readouterr().err
