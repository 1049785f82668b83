"""Checkpoints that somebody else made: whatever their index says, they are used or refused in words."""

from __future__ import annotations

import copy
import json
import os
import re
import shutil
import zlib
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from device_mesh import connect
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from parallel_trainer.checkpoint.check import damages
from parallel_trainer.checkpoint.hugging_face import HuggingFaceFolder, declared, write_folder
from parallel_trainer.checkpoint.hugging_face_checkpoint import export_folder, import_folder
from parallel_trainer.checkpoint.index import INDEX, Checkpoint
from parallel_trainer.checkpoint.load import check_model, load_arrays
from parallel_trainer.checkpoint.reshard import reshard
from parallel_trainer.checkpoint.tensor_file import TensorFileWriter
from parallel_trainer.cli import main
from parallel_trainer.errors import UserError
from parallel_trainer.models.config import Qwen3Config
from test_checkpoint import SHAPES, Run, layout, loaded
from test_checkpoint import values as right_values

HOSTILE = (None, True, -1, 0, 1, 7, 2**31, 2**63 - 1, 2**63, 10**400, 0.5, 1e300, "", "..", "/etc/passwd", "\x1b[2J",
           "\udc80", [], [[]], [-1], [2**62, 2**62], ["a"], {}, {"a": 1}, {"../x": 4})  # fmt: skip


def checksum(body: dict[str, Any]) -> int:
    text = json.dumps(body, ensure_ascii=False, sort_keys=True)
    return zlib.crc32(text.encode(errors="surrogatepass"))


def forge(folder: Path, body: dict[str, Any]) -> None:
    """Write an index with the checksum that belongs to it."""
    body = {name: value for name, value in body.items() if name != "checksum"}
    (folder / INDEX).write_text(json.dumps({**body, "checksum": checksum(body)}), encoding="utf-8")


def read(folder: Path) -> dict[str, Any]:
    return json.loads((folder / INDEX).read_text())


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint whose tensors are split along a dimension, in files of six ranks."""
    folder = tmp_path_factory.mktemp("whole")
    run = Run(folder / "ck", 0, {})
    with run.saver:
        run.to(1).saver.finish(1)
    of_six = layout(dp_shard=2, tp=3)
    return reshard(
        Checkpoint.open(folder / "ck" / "iteration_00000001"), folder / "new", of_six, plan="", config=""
    ).folder


@pytest.fixture
def forged(whole: Path, tmp_path: Path) -> Path:
    """A copy to spoil."""
    return Path(shutil.copytree(whole, tmp_path / "forged"))


def use_all(folder: Path, scratch: Path) -> None:
    """Everything that reads a checkpoint. What loads must have the right values."""
    checkpoint = Checkpoint.open(folder)
    main(["checkpoint", "show", str(folder)])
    list(damages(checkpoint))
    check_model(checkpoint, SHAPES, what="weights")
    for name, found in loaded(folder, layout()).items():
        np.testing.assert_array_equal(found, right_values(name, step=1))
    reshard(checkpoint, scratch, layout(tp=2), plan="", config="")


def judge(folder: Path, scratch: Path) -> bool:
    """Whether a checkpoint was taken; refused it must be in words that name it, and by no other error."""
    said = None
    try:
        with redirect_stdout(StringIO()):
            use_all(folder, scratch)
    except UserError as error:
        said = str(error)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    assert said is None or str(folder) in said
    return said is None


def leaves(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The place of everything in a JSON value, sections included."""
    yield path
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in inside:
        yield from leaves(item, (*path, key))


def with_value(body: Any, path: tuple[Any, ...], value: Any) -> Any:
    changed = copy.deepcopy(body)
    place = changed
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    return changed


def test_every_leaf_of_an_index_replaced_by_what_is_hostile_is_taken_or_refused(forged: Path, tmp_path: Path) -> None:
    body = read(forged)
    places = [
        path
        for path in leaves(body)
        if path
        and path[0] != "checksum"
        and (len(path) < 2 or path[1] == "table" or path[0] != "tensors")
        and (len(path) < 4 or path[3] < 2)
    ]
    refused = 0
    for path in places:
        for value in HOSTILE:
            forge(forged, with_value(body, path, value))
            refused += not judge(forged, tmp_path / "scratch")
    forge(forged, body)
    assert judge(forged, tmp_path / "scratch")
    assert refused > len(places) * len(HOSTILE) // 2


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=5,
)


@given(data=st.data(), value=VALUES)
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_anything_in_the_place_of_anything_is_taken_or_refused(
    forged: Path, whole: Path, tmp_path: Path, data: st.DataObject, value: Any
) -> None:
    body = read(whole)
    places = [path for path in leaves(body) if path and path[0] != "checksum"]
    forge(forged, with_value(body, data.draw(st.sampled_from(places)), value))
    judge(forged, tmp_path / "scratch")


@given(garbage=st.binary(max_size=40), at=st.floats(0, 1), cut=st.integers(0, 40))
@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_bytes_of_an_index_or_of_a_file_replaced_are_taken_or_refused(
    forged: Path, whole: Path, tmp_path: Path, garbage: bytes, at: float, cut: int
) -> None:
    for path in [*sorted(whole.iterdir())[:2], whole / INDEX]:
        data = path.read_bytes()
        place = int(at * len(data))
        (forged / path.name).write_bytes(data[:place] + garbage + data[place + cut :])
        judge(forged, tmp_path / "scratch")
        shutil.copy(path, forged / path.name)


def tensor(**changes: Any) -> Callable[[dict[str, Any]], None]:
    return lambda body: body["tensors"]["table"].update(changes)


def piece(**changes: Any) -> Callable[[dict[str, Any]], None]:
    return lambda body: body["tensors"]["table"]["pieces"][0].update(changes)


def renamed(name: str) -> Callable[[dict[str, Any]], None]:
    def change(body: dict[str, Any]) -> None:
        first = body["tensors"]["table"]["pieces"][0]["file"]
        body["files"][name] = body["files"].pop(first)
        for found in body["tensors"].values():
            for part in found["pieces"]:
                part["file"] = name if part["file"] == first else part["file"]

    return change


FORGERIES: dict[str, tuple[Callable[[dict[str, Any]], None], str]] = {
    "file above the folder": (renamed("../elsewhere.safetensors"), "'../elsewhere.safetensors' is not the name of a"),
    "file by its whole path": (renamed("/etc/passwd"), "'/etc/passwd' is not the name of a file in the folder"),
    "the folder above": (renamed(".."), "'..' is not the name of a file"),
    "terminal codes": (renamed("\x1b[2J"), r"'\\x1b\[2J' is not the name of a file"),
    "huge shape": (tensor(shape=[10**12, 4]), r"shape \[1000000000000, 4\] takes more than the [\d,]+ bytes"),
    "huge shape before an empty dimension": (tensor(shape=[10**15, 0], split_dim=1), "takes more than"),
    "negative dimension": (tensor(shape=[-7, 4]), "-7 is no whole number"),
    "dimension as a float": (tensor(shape=[7.0, 4]), "7.0 is no whole number"),
    "dimension as a truth value": (tensor(shape=[True, 4]), "True is no whole number"),
    "unknown type": (tensor(dtype="F8"), "type 'F8' must be one of F64, F32, F16, BF16"),
    "type of no weight": (tensor(dtype="I64"), "type 'I64' must be one of"),
    "a dimension that is not there": (tensor(split_dim=2), r"split_dim 2 is no dimension of \[7, 4\]"),
    "ranges outside": (piece(ranges=[[0, 70]]), r"must be ascending within 0 to 7"),
    "ranges that overlap": (piece(ranges=[[0, 2], [1, 3]]), "must be ascending within 0 to 7"),
    "elements outside": (piece(start=0, stop=10**9), "elements 0 to 1000000000 must be ascending within 0 to"),
    "too few checksums": (piece(checksums=[]), "has 0 checksums and must have 1"),
    "too many checksums": (piece(checksums=[1, 2]), "has 2 checksums and must have 1"),
    "file that is not listed": (piece(file="other.safetensors"), "the index has no such file"),
    "blocks of nothing": (lambda body: body.update(block_bytes=0), "block_bytes 0 must be from 8 to"),
    "huge blocks": (lambda body: body.update(block_bytes=2**60), "block_bytes 1152921504606846976 must be from 8"),
    "no versions": (lambda body: body.update(version=2, versions=[]), "which is not named"),
}


@pytest.mark.parametrize("case", FORGERIES)
def test_an_index_that_no_checkpoint_has_is_refused(forged: Path, case: str) -> None:
    change, message = FORGERIES[case]
    body = read(forged)
    change(body)
    forge(forged, body)
    with pytest.raises(UserError, match=message) as error:
        Checkpoint.open(forged)
    assert str(forged / INDEX) in str(error.value)


TEXTS = {
    "not UTF-8": (b'{"format": "\xff"}', "is no JSON"),
    "NaN": (b'{"format": NaN}', "NaN is no number in JSON"),
    "a key that comes twice": (b'{"format": 1, "format": 2}', "'format' comes twice"),
    "nested too deeply": (b'{"format": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "nested too deeply"),
    "a list": (b"[]", "no JSON object"),
    "a number of many digits": (b'{"format": ' + b"9" * 5000 + b"}", "is no JSON"),
}


@pytest.mark.parametrize("case", TEXTS)
def test_an_index_that_is_no_proper_json_is_refused_like_that_of_a_hugging_face_folder(
    forged: Path, tmp_path: Path, case: str
) -> None:
    text, message = TEXTS[case]
    (forged / INDEX).write_bytes(text)
    with pytest.raises(UserError, match=re.escape(str(forged / INDEX)) + f"(?s:.*){message}"):
        Checkpoint.open(forged)
    (tmp_path / "config.json").write_bytes(text)
    with pytest.raises(UserError, match=f"(?s)config.json.*{message}"):
        HuggingFaceFolder.open(tmp_path)


def test_a_link_out_of_the_folder_is_refused_and_one_within_is_not(forged: Path, tmp_path: Path) -> None:
    name = sorted(read(forged)["files"])[0]
    (forged / name).rename(forged / "renamed")
    (forged / name).symlink_to("renamed")
    assert judge(forged, tmp_path / "scratch")
    (forged / "renamed").rename(tmp_path / "outside")
    (forged / name).unlink()
    (forged / name).symlink_to(tmp_path / "outside")
    with pytest.raises(UserError, match=f"{name} is a link to {tmp_path / 'outside'}, out of the folder"):
        Checkpoint.open(forged)


def test_a_pipe_in_the_place_of_a_file_is_not_waited_for(forged: Path) -> None:
    name = sorted(read(forged)["files"])[0]
    (forged / name).unlink()
    os.mkfifo(forged / name)
    with pytest.raises(UserError, match="is missing"):
        Checkpoint.open(forged)


def test_a_file_whose_elements_have_another_type_than_the_index_says_is_refused(forged: Path) -> None:
    """Of the same size, so that only the type tells; its checksums are right."""
    body = read(forged)
    name, length = "norm", 5
    data = np.arange(length, dtype=np.int64)
    with TensorFileWriter(forged / "other.safetensors", [(name, "I64", [length])]) as writer:
        writer.write(name, data)
    part = {"file": "other.safetensors", "ranges": [[0, 0]], "start": 0, "stop": length}
    body["files"]["other.safetensors"] = (forged / "other.safetensors").stat().st_size
    body["tensors"][name]["pieces"] = [part | {"checksums": [zlib.crc32(data.tobytes())]}]
    forge(forged, body)
    with pytest.raises(
        UserError, match="norm is 5 elements of type I64, and the index has it with 5 elements of type F64"
    ):
        loaded(forged, layout())


def test_elements_twice_do_not_make_up_for_others_that_are_missing(forged: Path) -> None:
    """As many elements as there should be: a count alone does not tell."""
    body = read(forged)
    pieces = body["tensors"]["norm"]["pieces"]
    first, second = (part for part in pieces if part["stop"] > part["start"])
    pieces[pieces.index(second)] = first | {"stop": first["start"] + second["stop"] - second["start"]}
    body["tensors"]["norm"]["pieces"] = pieces
    forge(forged, body)
    checkpoint = Checkpoint.open(forged)
    arrays = {name: np.full(np.prod(shape), np.nan) for name, shape in SHAPES.items()}
    held = layout().stored(0)
    with pytest.raises(UserError, match=r"(?s)does not hold each element exactly once: .*norm: elements"):
        load_arrays(checkpoint, arrays, lambda name, _: held[name].runs, connect("single"), list(SHAPES),
                    dtype=np.dtype(np.float64))  # fmt: skip


def test_exporting_a_configuration_that_somebody_else_wrote_is_refused_in_words(tmp_path: Path) -> None:
    config = Qwen3Config(vocab_size=11, hidden_size=8, intermediate_size=12, num_hidden_layers=1,
                         num_attention_heads=2, num_key_value_heads=1, head_dim=4)  # fmt: skip
    values = ((name, [np.zeros(weight.size)]) for name, weight in declared(config).items())
    write_folder(tmp_path / "hf", config, values)
    with HuggingFaceFolder.open(tmp_path / "hf") as folder:
        made = import_folder(folder, tmp_path / "ck").folder
    body = read(made)
    deep = "a: " + "[" * 5000
    for text in (
        "",
        "a: [",
        "\x00",
        "model: 5",
        "model: {model_type: gpt}",
        deep,
        "&a [*a]",
        body["config"] + "\nx: 1",
    ):
        forge(made, body | {"config": text})
        with pytest.raises(UserError, match=str(made)):
            export_folder(Checkpoint.open(made), tmp_path / "out")
    forge(made, body)
    export_folder(Checkpoint.open(made), tmp_path / "out")
