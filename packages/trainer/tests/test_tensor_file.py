"""Files of tensors against the safetensors library, both ways, and every way in which one can be damaged."""

from __future__ import annotations

import json
import math
import os
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
import safetensors.numpy
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from parallel_trainer.checkpoint.tensor_file import DTYPES, TensorFile, TensorFileWriter, from_bfloat16, to_bfloat16
from parallel_trainer.errors import UserError

FILES = settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
NUMPY_DTYPES = [dtype for name, dtype in DTYPES.items() if name != "BF16"]
TENSORS = st.dictionaries(
    st.text(st.characters(exclude_categories=["Cs"]), max_size=8).filter(lambda name: name != "__metadata__"),
    st.sampled_from(NUMPY_DTYPES).flatmap(
        lambda dtype: arrays.arrays(dtype, arrays.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4))
    ),
    max_size=4,
)


def name_of(dtype: np.dtype) -> str:
    return next(name for name, own in DTYPES.items() if own == dtype and name != "BF16")


def same(found: np.ndarray, expected: np.ndarray) -> bool:
    return found.dtype == expected.dtype and found.tobytes() == expected.tobytes()


@FILES
@given(tensors=TENSORS, metadata=st.dictionaries(st.text(max_size=3), st.text(max_size=3), max_size=2))
def test_what_the_library_writes_is_read(tmp_path: Path, tensors: dict[str, np.ndarray], metadata: Any) -> None:
    # An empty metadata would end up in the library's header in a way that is no JSON.
    safetensors.numpy.save_file(tensors, tmp_path / "a.safetensors", metadata or None)
    with TensorFile.open(tmp_path / "a.safetensors") as file:
        assert file.metadata == metadata
        assert file.nbytes == (tmp_path / "a.safetensors").stat().st_size
        assert {name: entry.shape for name, entry in file.entries.items()} == {
            name: value.shape for name, value in tensors.items()
        }
        assert all(same(file.read(file.entries[name]), value) for name, value in tensors.items())


@FILES
@given(tensors=TENSORS, data=st.data())
def test_what_is_written_in_pieces_the_library_reads(
    tmp_path: Path, tensors: dict[str, np.ndarray], data: st.DataObject
) -> None:
    entries = [(name, name_of(value.dtype), value.shape) for name, value in tensors.items()]
    with TensorFileWriter(tmp_path / "a.safetensors", entries, {"format": "pt"}) as writer:
        for name in data.draw(st.permutations(list(tensors))):
            cut = data.draw(st.integers(0, tensors[name].size))
            writer.write(name, tensors[name].reshape(-1)[:cut])
            writer.write(name, tensors[name].reshape(-1)[cut:])
    found = safetensors.numpy.load_file(tmp_path / "a.safetensors")
    assert found.keys() == tensors.keys()
    assert all(same(found[name], value) and found[name].shape == value.shape for name, value in tensors.items())
    with safetensors.safe_open(tmp_path / "a.safetensors", "np") as file:
        assert file.metadata() == {"format": "pt"}
    with TensorFile.open(tmp_path / "a.safetensors") as file:
        assert all(entry.start % entry.itemsize == 0 for entry in file.entries.values())


def test_parts_of_a_tensor_are_read_without_the_rest(tmp_path: Path) -> None:
    values = np.arange(24, dtype=np.int64).reshape(2, 3, 4)
    safetensors.numpy.save_file({"a": np.zeros(5, np.int8), "b": values}, tmp_path / "a.safetensors")
    with TensorFile.open(tmp_path / "a.safetensors") as file:
        entry = file.entries["b"]
        assert (entry.dtype, entry.shape, entry.size, entry.itemsize) == ("I64", (2, 3, 4), 24, 8)
        assert file.read(entry, 5, 9).tolist() == [5, 6, 7, 8]
        assert file.read(entry, 24).tolist() == []
        assert bytes(file.read_bytes(entry, 5, 7)) == struct.pack("<2q", 5, 6)
        assert (tmp_path / "a.safetensors").read_bytes()[entry.start : entry.stop] == values.tobytes()
        for first, last in ((-1, 2), (3, 2), (0, 25)):
            with pytest.raises(ValueError, match=f"elements 0 … 23; asked for {first} … {last - 1}"):
                file.read(entry, first, last)


def nearest_bfloat16(value: float) -> float:
    """From the definition: 8 significant bits, halfway cases to even."""
    if value == 0 or not math.isfinite(value):
        return value
    unit = 2.0 ** (max(math.frexp(value)[1], -125) - 8)
    return round(value / unit) * unit  # round() takes halfway cases to even


@settings(max_examples=300, deadline=None)
@given(st.floats(width=32, allow_nan=False, min_value=-(2.0**127), max_value=2.0**127))
def test_bfloat16_is_rounded_to_nearest_even(value: float) -> None:
    bits = to_bfloat16(np.array([value], np.float32))
    assert float(from_bfloat16(bits)[0]) == nearest_bfloat16(value)


def test_every_bfloat16_survives_float32() -> None:
    bits = np.arange(2**16, dtype=np.uint16)
    values = from_bfloat16(bits)
    number = ~np.isnan(values)
    assert np.array_equal(to_bfloat16(values)[number], bits[number])
    assert np.isnan(from_bfloat16(to_bfloat16(values[~number]))).all()


def test_bfloat16_on_disk_is_what_the_library_writes_and_reads(tmp_path: Path) -> None:
    values = np.array([[1.0, -2.5, 3.140625], [0.0, np.inf, 1e-40]], np.float32)
    with TensorFileWriter(tmp_path / "a.safetensors", [("w", "BF16", (2, 3))]) as writer:
        writer.write("w", values)
    [(name, found)] = safetensors.deserialize((tmp_path / "a.safetensors").read_bytes())
    assert (name, found["dtype"], list(found["shape"])) == ("w", "BF16", [2, 3])
    # The upper halves of the float32 numbers; 1e-40 is 71362 of 2^-149, which is 1.09 of the last place of BF16.
    assert bytes(found["data"]) == bytes.fromhex("803f 20c0 4940 0000 807f 0100")
    with TensorFile.open(tmp_path / "a.safetensors") as file:
        assert file.read(file.entries["w"]).tolist() == [1.0, -2.5, 3.140625, 0.0, np.inf, 2.0**-133]


@pytest.mark.parametrize("dtype", ["F32", "F16", "BF16"])
def test_floats_are_rounded_to_the_dtype_of_the_file(tmp_path: Path, dtype: str) -> None:
    values = np.array([1 / 3, -np.inf, np.nan])
    with TensorFileWriter(tmp_path / "a.safetensors", [("w", dtype, (3,))]) as writer:
        writer.write("w", values)
    with TensorFile.open(tmp_path / "a.safetensors") as file:
        found = file.read(file.entries["w"])
    bits = {"F32": 24, "F16": 11, "BF16": 8}[dtype]
    assert float(found[0]) == round(2 ** (bits + 1) / 3) / 2 ** (bits + 1)
    assert found[1] == -np.inf
    assert np.isnan(found[2])


@pytest.mark.parametrize(("dtype", "value"), [("F32", 1e39), ("F16", -1e5), ("BF16", 3.4e38), ("BF16", 1e39)])
def test_a_number_that_would_become_infinite_is_not_written(tmp_path: Path, dtype: str, value: float) -> None:
    with (
        pytest.raises(UserError, match=rf"w holds .*, which {dtype} cannot: use a wider dtype"),
        TensorFileWriter(tmp_path / "a.safetensors", [("w", dtype, (2,))]) as writer,
    ):
        writer.write("w", np.array([np.inf, value]))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("dtype", "array"), [("F32", np.zeros(2, np.int32)), ("I64", np.zeros(2, np.int32)), ("I8", np.zeros(2)),
                         ("BF16", np.zeros(2, np.uint16))]
)  # fmt: skip
def test_elements_of_another_type_are_not_written(tmp_path: Path, dtype: str, array: np.ndarray) -> None:
    with (
        pytest.raises(ValueError, match=f"w has dtype {dtype}; got elements of type {array.dtype}"),
        TensorFileWriter(tmp_path / "a.safetensors", [("w", dtype, (2,))]) as writer,
    ):
        writer.write("w", array)
    assert list(tmp_path.iterdir()) == []


def test_a_file_with_missing_or_too_many_elements_does_not_stay(tmp_path: Path) -> None:
    entries = [("a", "F32", (2, 2)), ("b", "F32", (1,))]
    with (
        pytest.raises(ValueError, match=r"a \(3 of 4 elements\), b \(0 of 1 elements\)"),
        TensorFileWriter(tmp_path / "a.safetensors", entries) as writer,
    ):
        writer.write("a", np.zeros(3, np.float32))
    with (
        pytest.raises(ValueError, match="b has 1 elements; got 0 and then 2"),
        TensorFileWriter(tmp_path / "a.safetensors", entries) as writer,
    ):
        writer.write("b", np.zeros(2, np.float32))
    assert list(tmp_path.iterdir()) == []


def test_a_writer_refuses_what_the_format_does_not_have(tmp_path: Path) -> None:
    for entries, message in (
        ([("a", "F31", (2,))], "a has dtype 'F31'; use one of F64, F32"),
        ([("a", "F32", (2,)), ("a", "F32", (3,))], "a is the name of another part"),
        ([("__metadata__", "F32", (2,))], "__metadata__ is the name of another part"),
    ):
        with pytest.raises(ValueError, match=message):
            TensorFileWriter(tmp_path / "a.safetensors", entries)
    with pytest.raises(UserError, match=r"missing/a\.safetensors cannot be written: No such file"):
        TensorFileWriter(tmp_path / "missing" / "a.safetensors", [])


def file_bytes(header: Any, data: bytes = b"", *, length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def tensor(start: int, stop: int, shape: list[int] | None = None, dtype: str = "I8") -> dict[str, Any]:
    return {"dtype": dtype, "shape": [stop - start] if shape is None else shape, "data_offsets": [start, stop]}


BAD = {
    "empty": (b"", "no whole safetensors file: it has 0 bytes"),
    "a short length": (b"\x08\x00", "it has 2 bytes and the length of the header alone takes 8"),
    "another format": (b"PK\x03\x04" + b"x" * 60, "give the header [0-9]{19} bytes; the most is 100000000"),
    "a cut header": (file_bytes({"a": tensor(0, 2)}, b"12")[:30], "its header takes bytes 8 to 68, and it has 30"),
    "no JSON": (file_bytes(b"{'a': 1}"), "not the JSON of one"),
    "no UTF-8": (file_bytes(b'{"\xff": 1}'), "not the JSON of one"),
    "deep JSON": (file_bytes(b"[" * 100_000), "not the JSON of one"),
    "a list": (file_bytes([1]), "no JSON object"),
    "a name twice": (file_bytes(b'{"a": 1, "a": 2}'), "'a' comes twice"),
    "metadata": (file_bytes({"__metadata__": {"a": 1}}), "__metadata__ in its header is not a text for each key"),
    "no offsets": (file_bytes({"a": {"dtype": "I8", "shape": [1]}}), "a has no dtype, shape and two data_offsets"),
    "a negative shape": (file_bytes({"a": tensor(0, 1, [-1])}, b"1"), "a has no dtype, shape and two data_offsets"),
    "a shape of true": (file_bytes({"a": tensor(0, 1, [True])}, b"1"), "a has no dtype, shape and two data_offsets"),
    "three offsets": (
        file_bytes({"a": {"dtype": "I8", "shape": [1], "data_offsets": [0, 1, 2]}}),
        "a has no dtype, shape and two data_offsets",
    ),
    "another dtype": (file_bytes({"a": tensor(0, 2, dtype="F8_E4M3")}, b"12"), "a has dtype F8_E4M3, which cannot be"),
    "another size": (file_bytes({"a": tensor(0, 2, [3])}, b"12"), r"0 to 2, but I8 \[3\] takes 3 bytes"),
    "backward offsets": (file_bytes({"a": tensor(2, 0, [2])}, b"12"), r"2 to 0, but I8 \[2\] takes 2 bytes"),
    "an overlap": (
        file_bytes({"a": tensor(0, 3), "b": tensor(2, 4)}, b"1234"),
        r"b starts at byte 130 and overlaps a, which ends at 131",
    ),
    "a gap": (
        file_bytes({"a": tensor(0, 1), "b": tensor(2, 4)}, b"1234"),
        "b starts at byte 130 and leaves a gap after a, which ends at 129",
    ),
    "a late start": (file_bytes({"a": tensor(1, 2)}, b"12"), "leaves a gap after the header"),
    "cut data": (file_bytes({"a": tensor(0, 2)}, b"1"), "it has 69 bytes and its tensors end at byte 70"),
    "more data": (file_bytes({"a": tensor(0, 2)}, b"123"), "it has 71 bytes and its tensors end at byte 70"),
    "more than there can be": (file_bytes({"a": tensor(0, 2**70)}, b"12"), "its tensors end at byte"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_a_damaged_file_is_refused_with_what_is_wrong(tmp_path: Path, case: str) -> None:
    content, message = BAD[case]
    (tmp_path / "a.safetensors").write_bytes(content)
    with pytest.raises(UserError, match=rf"a\.safetensors.*{message}"):
        TensorFile.open(tmp_path / "a.safetensors")
    if case != "another dtype":
        with pytest.raises(safetensors.SafetensorError):
            safetensors.deserialize(content)


def test_a_file_that_is_missing_or_shrinks_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"a\.safetensors cannot be read: No such file"):
        TensorFile.open(tmp_path / "a.safetensors")
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path, tmp_path / "pipe"):  # a pipe is not waited for
        with pytest.raises(UserError, match="it is no regular file"):
            TensorFile.open(path)
    safetensors.numpy.save_file({"a": np.zeros(4)}, tmp_path / "a.safetensors")
    with TensorFile.open(tmp_path / "a.safetensors") as file:
        (tmp_path / "a.safetensors").write_bytes(b"")
        with pytest.raises(UserError, match=r"a\.safetensors was cut off while it was read: .* inside a"):
            file.read(file.entries["a"])


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(place=st.integers(0), value=st.integers(0, 255))
def test_a_changed_byte_is_refused_or_read_never_a_crash(tmp_path: Path, place: int, value: int) -> None:
    content = bytearray(file_bytes({"a": tensor(0, 2), "b": tensor(2, 8, [3], "BF16")}, b"12345678"))
    content[place % len(content)] = value
    (tmp_path / "a.safetensors").write_bytes(content)
    try:
        with TensorFile.open(tmp_path / "a.safetensors") as file:
            assert sum(file.read(entry).size * entry.itemsize for entry in file.entries.values()) == 8
    except UserError:
        return
