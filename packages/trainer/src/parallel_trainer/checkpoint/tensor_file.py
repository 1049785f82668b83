"""A file of named tensors in the safetensors format, read and written in pieces.

The format (https://huggingface.co/docs/safetensors) is, little-endian,

    uint64    number of bytes of the header n, at most 100,000,000
    n bytes   JSON: {"NAME": {"dtype": "F32", "shape": [2, 3], "data_offsets": [start, stop]}, ...,
              "__metadata__": {"KEY": "TEXT"}}; spaces after it, up to a multiple of 8
    data      each tensor's elements in C order; offsets count from here, without gaps

The `safetensors` library writes a file from tensors that are all in memory, and its NumPy side knows no BF16. Here
memory holds the piece that is being read or written.
"""

from __future__ import annotations

import json
import math
import os
import stat
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any, Self

import numpy as np
from attrs import evolve, frozen

from parallel_trainer.checkpoint.untrusted import parse_object
from parallel_trainer.errors import UserError

DTYPES: Mapping[str, np.dtype] = MappingProxyType(
    {
        "F64": np.dtype("<f8"),
        "F32": np.dtype("<f4"),
        "F16": np.dtype("<f2"),
        "BF16": np.dtype("<u2"),
        "I64": np.dtype("<i8"),
        "I32": np.dtype("<i4"),
        "I16": np.dtype("<i2"),
        "I8": np.dtype("i1"),
        "U64": np.dtype("<u8"),
        "U32": np.dtype("<u4"),
        "U16": np.dtype("<u2"),
        "U8": np.dtype("u1"),
        "BOOL": np.dtype("?"),
    }
)
"""By the format's name, what an element is on disk; BF16, which NumPy does not have, by its bits."""

FLOATS = ("F64", "F32", "F16", "BF16")
_LENGTH = struct.Struct("<Q")
_LARGEST_HEADER = 100_000_000
_METADATA = "__metadata__"


@frozen
class Entry:
    """One tensor of a file: what it is and at which bytes of the file it lies, `start` … `stop` - 1.

    dtype: a name in `DTYPES`.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return DTYPES[self.dtype].itemsize


@frozen(eq=False)
class TensorFile:
    """A file opened for reading. Only its header is in memory; close it, or use it as a context manager.

    entries:  tensors by name, in the order of the header.
    metadata: texts that the writer put beside them.
    nbytes:   size of the file.
    """

    path: Path
    entries: Mapping[str, Entry]
    metadata: Mapping[str, str]
    nbytes: int
    _descriptor: int

    @classmethod
    def open(cls, path: str | Path) -> TensorFile:
        """Read the header of a file and check that the data it describes is there.

        Raises UserError for a file that is missing, cut off, not of this format or of element types not in `DTYPES`.
        """
        path = Path(path)
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # a pipe would be waited for
        except OSError as error:
            raise _unreadable(path, error) from error
        try:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise _foreign(path, "it is no regular file")
            nbytes = status.st_size
            entries, metadata = _parse(path, *_read_header(path, descriptor, nbytes), nbytes)
        except OSError as error:
            os.close(descriptor)
            raise _unreadable(path, error) from error
        except BaseException:
            os.close(descriptor)
            raise
        return cls(path, MappingProxyType(entries), MappingProxyType(metadata), nbytes, descriptor)

    def read_bytes(self, entry: Entry, first: int, last: int) -> memoryview:
        """The bytes of elements `first` … `last` - 1 of a tensor as they are in the file."""
        return self._elements(entry, first, last).view(np.uint8).data

    def read(self, entry: Entry, first: int = 0, last: int | None = None) -> np.ndarray:
        """Elements `first` … `last` - 1 of a tensor, flat; BF16 as the same numbers in float32."""
        elements = self._elements(entry, first, entry.size if last is None else last)
        return from_bfloat16(elements) if entry.dtype == "BF16" else elements

    def _elements(self, entry: Entry, first: int, last: int) -> np.ndarray:
        if not 0 <= first <= last <= entry.size:
            raise ValueError(f"{entry.name} has elements 0 … {entry.size - 1}; asked for {first} … {last - 1}")
        elements = np.empty(last - first, DTYPES[entry.dtype])
        into, offset = elements.view(np.uint8).data, entry.start + first * entry.itemsize
        while into:  # one call, but for pieces above the 2 GiB that Linux reads at once
            try:
                found = os.preadv(self._descriptor, [into], offset)
            except OSError as error:
                raise _unreadable(self.path, error) from error
            if not found:
                raise UserError(
                    f"{self.path} was cut off while it was read: it ends at byte {offset} inside {entry.name}"
                )
            into, offset = into[found:], offset + found
        return elements

    def close(self) -> None:
        """Give the file back; reading it ends here."""
        os.close(self._descriptor)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _read_header(path: Path, descriptor: int, nbytes: int) -> tuple[bytes, int]:
    """The header's JSON, and the byte at which data starts."""
    if nbytes < _LENGTH.size:
        raise _foreign(path, f"it has {nbytes} bytes and the length of the header alone takes {_LENGTH.size}")
    (length,) = _LENGTH.unpack(os.pread(descriptor, _LENGTH.size, 0))
    if length > _LARGEST_HEADER:
        raise _foreign(
            path, f"its first {_LENGTH.size} bytes give the header {length} bytes; the most is {_LARGEST_HEADER}"
        )
    if _LENGTH.size + length > nbytes:
        raise _foreign(path, f"its header takes bytes {_LENGTH.size} to {_LENGTH.size + length}, and it has {nbytes}")
    return os.pread(descriptor, length, _LENGTH.size), _LENGTH.size + length


def _parse(path: Path, text: bytes, data: int, nbytes: int) -> tuple[dict[str, Entry], dict[str, str]]:
    """Entries in the order of the header, and metadata."""
    try:
        header = parse_object(text)
    except ValueError as error:
        raise _foreign(path, f"its header is not the JSON of one: {error}") from error
    metadata = header.pop(_METADATA, None) or {}
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise _foreign(path, f"{_METADATA} in its header is not a text for each key")
    entries = {name: _entry(path, name, fields, data) for name, fields in header.items()}
    _check_layout(path, entries, data, nbytes)
    return entries, metadata


def _entry(path: Path, name: str, fields: Any, data: int) -> Entry:
    match fields:
        case {"dtype": str(dtype), "shape": list(shape), "data_offsets": [start, stop]} if all(
            type(number) is int and number >= 0 for number in (*shape, start, stop)
        ):
            pass
        case _:
            raise _foreign(path, f"{name} has no dtype, shape and two data_offsets in its header")
    if dtype not in DTYPES:
        raise UserError(f"{path}: {name} has dtype {dtype}, which cannot be read here; what can is {', '.join(DTYPES)}")
    entry = Entry(name, dtype, tuple(shape), data + start, data + stop)
    if stop - start != entry.size * entry.itemsize:
        raise _damaged(
            path,
            f"{name} has data_offsets {start} to {stop}, but {dtype} {shape} takes {entry.size * entry.itemsize} bytes",
        )
    return entry


def _check_layout(path: Path, entries: Mapping[str, Entry], data: int, nbytes: int) -> None:
    """That tensors lie one after the other and end where the file does."""
    end, before = data, "the header"
    for entry in sorted(entries.values(), key=lambda entry: (entry.start, entry.stop)):
        if entry.start != end:
            kind = "overlaps" if entry.start < end else "leaves a gap after"
            raise _damaged(path, f"{entry.name} starts at byte {entry.start} and {kind} {before}, which ends at {end}")
        end, before = entry.stop, entry.name
    if nbytes != end:
        raise _damaged(path, f"it has {nbytes} bytes and its tensors end at byte {end}")


class TensorFileWriter:
    """Writes a file whose tensors come in pieces.

    As a context manager the file stays when the block ends well and every element was written; else it is removed.
    """

    def __init__(
        self,
        path: str | Path,
        entries: Sequence[tuple[str, str, Sequence[int]]],
        metadata: Mapping[str, str] | None = None,
    ) -> None:
        """Create the file with its header.

        entries: name, dtype (a name in `DTYPES`) and shape of each tensor.
        Raises UserError where it cannot be written, ValueError for a dtype that does not exist or a name given twice.
        """
        self.path = Path(path)
        header, self.entries = _lay_out(entries, metadata or {})
        self._written = dict.fromkeys(self.entries, 0)
        try:
            self._descriptor = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
        except OSError as error:
            raise _unwritable(self.path, error) from error
        try:
            self._put(memoryview(header), 0)
        except BaseException:
            self._discard()
            raise

    def write(self, name: str, array: np.ndarray) -> None:
        """Append elements, in C order, to a tensor. The pieces of different tensors may come in any order.

        Floating-point numbers are rounded to the tensor's dtype, halfway cases to even (float64 to BF16 by way of
        float32, as PyTorch does); other types have to be the tensor's own.

        Raises UserError for a number that the dtype rounds to infinity and where the file cannot be written,
        ValueError for a type that does not fit and for more elements than the tensor has.
        """
        entry, first = self.entries[name], self._written[name]
        elements = np.ascontiguousarray(array).reshape(-1)
        if first + elements.size > entry.size:
            raise ValueError(f"{name} has {entry.size} elements; got {first} and then {elements.size}")
        self._put(_encoded(elements, entry).view(np.uint8).data, entry.start + first * entry.itemsize)
        self._written[name] += elements.size

    def _put(self, data: memoryview, offset: int) -> None:
        while data:
            try:
                done = os.pwrite(self._descriptor, data, offset)
            except OSError as error:
                raise _unwritable(self.path, error) from error
            data, offset = data[done:], offset + done

    def close(self) -> None:
        """Finish the file: what it holds is on the disk when this returns.

        Raises ValueError, and removes the file, where elements are missing.
        """
        missing = [
            f"{name} ({written} of {self.entries[name].size} elements)"
            for name, written in self._written.items()
            if written < self.entries[name].size
        ]
        if missing:
            self._discard()
            raise ValueError(f"{self.path} was closed before it was written: {', '.join(missing)}")
        try:
            os.fsync(self._descriptor)
        except OSError as error:
            self._discard()
            raise _unwritable(self.path, error) from error
        os.close(self._descriptor)

    def _discard(self) -> None:
        os.close(self._descriptor)
        self.path.unlink(missing_ok=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        else:
            self._discard()


def _lay_out(
    tensors: Sequence[tuple[str, str, Sequence[int]]], metadata: Mapping[str, str]
) -> tuple[bytes, dict[str, Entry]]:
    """The header with its length, and where tensors lie: those with wide elements first, so that all are aligned."""
    for name, dtype, _ in tensors:
        if dtype not in DTYPES:
            raise ValueError(f"{name} has dtype {dtype!r}; use one of {', '.join(DTYPES)}")
    header: dict[str, Any] = {_METADATA: dict(metadata)} if metadata else {}
    entries: list[Entry] = []
    offset = 0
    for name, dtype, shape in sorted(tensors, key=lambda tensor: -DTYPES[tensor[1]].itemsize):
        if name in header or name == _METADATA:
            raise ValueError(f"{name} is the name of another part of the file")
        entry = Entry(name, dtype, tuple(shape), offset, offset + math.prod(shape) * DTYPES[dtype].itemsize)
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [entry.start, entry.stop]}
        entries.append(entry)
        offset = entry.stop
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > _LARGEST_HEADER:
        raise ValueError(f"the header takes {len(text)} bytes; the most is {_LARGEST_HEADER}: use several files")
    data = _LENGTH.size + len(text)
    moved = (evolve(entry, start=entry.start + data, stop=entry.stop + data) for entry in entries)
    return _LENGTH.pack(len(text)) + text, {entry.name: entry for entry in moved}


def _encoded(elements: np.ndarray, entry: Entry) -> np.ndarray:
    """Elements as they are on disk."""
    own = DTYPES[entry.dtype]
    if entry.dtype not in FLOATS or elements.dtype.kind != "f":
        if entry.dtype == "BF16" or elements.dtype.newbyteorder("=") != own.newbyteorder("="):
            raise ValueError(f"{entry.name} has dtype {entry.dtype}; got elements of type {elements.dtype}")
        return elements.astype(own, copy=False)
    with np.errstate(over="ignore", invalid="ignore"):
        encoded = to_bfloat16(elements) if entry.dtype == "BF16" else elements.astype(own, copy=False)
    if own.itemsize < elements.itemsize and (overflown := _overflown(elements, encoded, entry.dtype)) is not None:
        raise UserError(f"{entry.name} holds {overflown}, which {entry.dtype} cannot: use a wider dtype")
    return encoded


def _overflown(elements: np.ndarray, encoded: np.ndarray, dtype: str) -> float | None:
    """A finite number that became infinite."""
    infinite = (encoded & 0x7FFF) == 0x7F80 if dtype == "BF16" else np.isinf(encoded)
    if not infinite.any():
        return None
    lost = np.flatnonzero(infinite & np.isfinite(elements))
    return float(elements[lost[0]]) if lost.size else None


def from_bfloat16(bits: np.ndarray) -> np.ndarray:
    """Bits of BF16 numbers, uint16, as the same numbers in float32."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def to_bfloat16(values: np.ndarray) -> np.ndarray:
    """Floating-point numbers rounded to BF16, halfway cases to even, as their bits in uint16. NaN stays NaN."""
    wide = values.astype(np.float32)
    bits = wide.view(np.uint32)
    rounded = ((bits + (0x7FFF + ((bits >> 16) & 1))) >> 16).astype(np.uint16)
    return np.where(np.isnan(wide), np.uint16(0x7FC0), rounded)


def _foreign(path: Path, fact: str) -> UserError:
    return UserError(f"{path} is no whole safetensors file: {fact}. Copy it again, or name another file")


def _damaged(path: Path, fact: str) -> UserError:
    return UserError(f"{path} is damaged: {fact}. Copy it again")


def _unreadable(path: Path, error: OSError) -> UserError:
    return UserError(f"{path} cannot be read: {error.strerror}")


def _unwritable(path: Path, error: OSError) -> UserError:
    return UserError(f"{path} cannot be written: {error.strerror}")
