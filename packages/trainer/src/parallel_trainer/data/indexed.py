"""The pair PREFIX.bin, PREFIX.idx of Megatron's data tools: reading it, memory-mapped, and writing it.

PREFIX.bin is the tokens of all sequences, one after the other. PREFIX.idx is, little-endian and without gaps,

    9 bytes   "MMIDIDX" and two NULs
    uint64    version, 1
    uint8     dtype code of the tokens
    uint64    number of sequences n
    uint64    number of document entries d
    int32[n]  tokens of each sequence
    int64[n]  byte offset of each sequence in PREFIX.bin
    int64[d]  first sequence of each document, then n
"""

from __future__ import annotations

import os
import shlex
import struct
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Self

import numpy as np
from attrs import frozen

from parallel_trainer.errors import MissingCorpus, UserError

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
HEADER = struct.Struct("<9sQBQQ")
DTYPE_CODES = {
    1: "uint8",
    2: "int8",
    3: "int16",
    4: "int32",
    5: "int64",
    6: "float64",
    7: "float32",
    8: "uint16",
}
UINT16_VOCABULARY = 65500
"""Vocabularies below this size are written as uint16, the others as int32."""


def token_dtype(vocab_size: int) -> np.dtype:
    """The dtype in which a corpus of `vocab_size` different ids is written."""
    return np.dtype("<u2" if vocab_size < UINT16_VOCABULARY else "<i4")


def corpus_files(prefix: str | Path) -> tuple[Path, Path]:
    """The paths PREFIX.bin and PREFIX.idx. A prefix may hold dots of its own."""
    return Path(f"{prefix}.bin"), Path(f"{prefix}.idx")


@frozen(eq=False)
class IndexedCorpus:
    """A pair of files, opened for reading. Tokens stay on disk until they are asked for.

    lengths:      int32 (sequences,), tokens of each sequence.
    starts:       int64 (sequences + 1,), position of each sequence's first token, then the number of tokens.
    documents:    int64 (documents + 1,), first sequence of each document, then the number of sequences.
    tokens:       the tokens of all sequences, read-only, memory-mapped, in the dtype of the file.
    """

    prefix: str
    lengths: np.ndarray
    starts: np.ndarray
    documents: np.ndarray
    tokens: np.ndarray

    @classmethod
    def open(cls, prefix: str | Path) -> IndexedCorpus:
        """Open PREFIX.bin and PREFIX.idx. UserError where they are missing, damaged or do not match."""
        bin_path, idx_path = corpus_files(prefix)
        for path in (idx_path, bin_path):
            if not path.is_file():
                raise MissingCorpus(
                    f"corpus {prefix}: {path.absolute()} does not exist. A corpus is the two files "
                    "PREFIX.bin and PREFIX.idx, named by PREFIX without extension; relative paths start at "
                    f"the current directory. To make it of text: parallel-train data build --input TEXTS --output "
                    f"{shlex.quote(str(prefix))}"
                )
        try:
            index = _read_index(idx_path)
            size = bin_path.stat().st_size
            _check_bin_size(bin_path, size, index)
            tokens = np.memmap(bin_path, dtype=index.dtype, mode="r") if size else np.empty(0, dtype=index.dtype)
        except OSError as error:
            raise UserError(f"corpus {prefix} cannot be read: {error}") from error
        return cls(str(prefix), index.lengths, index.starts, index.documents, tokens)

    @property
    def dtype(self) -> np.dtype:
        return self.tokens.dtype

    def __len__(self) -> int:
        """Number of sequences."""
        return len(self.lengths)

    def sequence(self, number: int, *, start: int = 0, stop: int | None = None) -> np.ndarray:
        """Tokens `start` … `stop` - 1 of sequence `number`, as a view of the file."""
        first, end = int(self.starts[number]), int(self.starts[number + 1])
        return self.tokens[first + start : end if stop is None else first + stop]

    def document(self, number: int) -> np.ndarray:
        """All tokens of document `number`, as a view of the file. IndexError where there is none."""
        if not 0 <= number < len(self.documents) - 1:
            raise IndexError(f"document {number} of a corpus of {len(self.documents) - 1}")
        return self.tokens[self.starts[self.documents[number]] : self.starts[self.documents[number + 1]]]


@frozen(eq=False)
class _Index:
    dtype: np.dtype
    lengths: np.ndarray
    starts: np.ndarray
    documents: np.ndarray


def _read_index(path: Path) -> _Index:
    size = path.stat().st_size
    with path.open("rb") as file:
        header = file.read(HEADER.size)
    if len(header) < HEADER.size:
        raise _damaged(path, f"it has {size} bytes and the header alone takes {HEADER.size}")
    magic, version, code, n_sequences, n_entries = HEADER.unpack(header)
    if magic != MAGIC:
        raise UserError(
            f"{path} is not the index of a corpus: it starts with {magic!r} instead of {MAGIC!r}. "
            "Name the prefix of a pair that `parallel-train data build` or Megatron's preprocess_data.py made"
        )
    if version != VERSION:
        raise UserError(f"{path} has format version {version}; version {VERSION} is the one that can be read")
    dtype = _dtype_of(path, code)
    wanted = HEADER.size + n_sequences * (4 + 8) + n_entries * 8
    if n_sequences and size == wanted + n_sequences:
        raise UserError(
            f"{path} has one mode for each of its {n_sequences} sequences, which multimodal corpora have: "
            "GPTDataset reads text, so write the corpus without modes"
        )
    if size != wanted:
        raise _damaged(
            path,
            f"it has {size} bytes; {n_sequences} sequences and {n_entries} document entries take {wanted}",
        )
    lengths = np.fromfile(path, dtype="<i4", count=n_sequences, offset=HEADER.size)
    offsets = np.fromfile(path, dtype="<i8", count=n_sequences, offset=HEADER.size + 4 * n_sequences)
    documents = np.fromfile(path, dtype="<i8", count=n_entries, offset=HEADER.size + 12 * n_sequences)
    _check_documents(path, documents, n_sequences)
    return _Index(dtype, lengths, _starts(path, lengths, offsets, dtype.itemsize), documents)


def _dtype_of(path: Path, code: int) -> np.dtype:
    if code not in DTYPE_CODES:
        raise _damaged(path, f"its dtype code is {code}; the codes are 1 to {max(DTYPE_CODES)}")
    dtype = np.dtype(DTYPE_CODES[code]).newbyteorder("<")
    if dtype.kind == "f":
        raise UserError(f"{path} holds {DTYPE_CODES[code]} numbers; token ids must have an integer dtype")
    return dtype


def _check_documents(path: Path, documents: np.ndarray, n_sequences: int) -> None:
    if len(documents) == 0 or documents[0] != 0 or documents[-1] != n_sequences:
        ends = f"{documents[0]} … {documents[-1]}" if len(documents) else "empty"
        raise _damaged(path, f"its document entries are {ends}; they must run from 0 to {n_sequences}")
    if np.any(documents[1:] < documents[:-1]):
        entry = int(np.flatnonzero(documents[1:] < documents[:-1])[0])
        raise _damaged(
            path,
            f"document entry {entry + 1} is {documents[entry + 1]}, less than {documents[entry]} before it",
        )


def _starts(path: Path, lengths: np.ndarray, offsets: np.ndarray, itemsize: int) -> np.ndarray:
    """Positions in tokens, after checking that the sequences lie one after the other."""
    if np.any(lengths < 0):
        number = int(np.flatnonzero(lengths < 0)[0])
        raise _damaged(path, f"sequence {number} has {lengths[number]} tokens")
    starts = np.zeros(len(lengths) + 1, dtype=np.int64)
    np.cumsum(lengths, out=starts[1:])
    wrong = np.flatnonzero(offsets != starts[:-1] * itemsize)
    if wrong.size:
        number = int(wrong[0])
        raise _damaged(
            path,
            f"sequence {number} is said to start at byte {offsets[number]}, but the {starts[number]} tokens "
            f"of {itemsize} bytes before it end at byte {starts[number] * itemsize}",
        )
    return starts


def _check_bin_size(path: Path, size: int, index: _Index) -> None:
    wanted = int(index.starts[-1]) * index.dtype.itemsize
    if size != wanted:
        raise UserError(
            f"{path} has {size} bytes, but {path.with_suffix('.idx').name} describes {index.starts[-1]} "
            f"tokens of {index.dtype.itemsize} bytes = {wanted}: one file is cut off, or they come from "
            "different runs. Copy both again or build the corpus again"
        )


def _damaged(path: Path, fact: str) -> UserError:
    return UserError(f"{path} is damaged: {fact}. Copy it again or build the corpus again")


class IndexedWriter:
    """Writes a pair of files, one sequence a document, through temporary files beside them.

    As a context manager: the pair appears, or replaces an older one, when the block ends well; when it
    ends with an exception nothing of it is left and an older pair is untouched.
    """

    def __init__(self, prefix: str | Path, *, vocab_size: int) -> None:
        """Ids to be written are 0 … vocab_size - 1. The folder of `prefix` is made if it does not exist."""
        self.dtype = token_dtype(vocab_size)
        self._vocab_size = vocab_size
        self._paths = corpus_files(prefix)
        self._partial = tuple(path.with_name(f"{path.name}.partial-{os.getpid()}") for path in self._paths)
        self._lengths: list[int] = []
        self._bin: BinaryIO | None = None

    def __enter__(self) -> Self:
        try:
            self._paths[0].parent.mkdir(parents=True, exist_ok=True)
            self._bin = self._partial[0].open("wb")
        except OSError as error:
            raise UserError(f"{self._paths[0]} cannot be written: {error}") from error
        return self

    def add_document(self, tokens: np.ndarray) -> None:
        """Append one document, integer (tokens,). ValueError for ids outside the vocabulary."""
        assert self._bin is not None, "used outside its with-block"
        tokens = np.asarray(tokens)
        if tokens.size and not (tokens.min() >= 0 and tokens.max() < self._vocab_size):
            raise ValueError(
                f"document {len(self._lengths)} has token ids {tokens.min()} … {tokens.max()}; "
                f"a vocabulary of {self._vocab_size} has 0 … {self._vocab_size - 1}"
            )
        if len(tokens) > np.iinfo(np.int32).max:
            raise UserError(
                f"document {len(self._lengths)} has {len(tokens)} tokens; the format holds at most "
                f"{np.iinfo(np.int32).max} in one: split the text into several files"
            )
        try:
            self._bin.write(tokens.astype(self.dtype).tobytes())
        except OSError as error:
            raise UserError(f"{self._paths[0]} cannot be written: {error}") from error
        self._lengths.append(len(tokens))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._bin is not None
        try:
            self._bin.close()
            if kind is None:
                self._write_index()
                self._publish()
        except OSError as failure:
            raise UserError(f"{self._paths[0]} cannot be written: {failure}") from failure
        finally:
            for path in self._partial:
                path.unlink(missing_ok=True)

    def _write_index(self) -> None:
        lengths = np.asarray(self._lengths, dtype="<i4")
        offsets = (np.cumsum(lengths, dtype=np.int64) - lengths) * self.dtype.itemsize
        code = next(code for code, name in DTYPE_CODES.items() if name == self.dtype.name)
        with self._partial[1].open("wb") as file:
            file.write(HEADER.pack(MAGIC, VERSION, code, len(lengths), len(lengths) + 1))
            file.write(lengths.tobytes())
            file.write(offsets.astype("<i8").tobytes())
            file.write(np.arange(len(lengths) + 1, dtype="<i8").tobytes())

    def _publish(self) -> None:
        # The index goes first and comes last: whoever opens the prefix meanwhile finds a missing file,
        # never the index of one corpus beside the tokens of another.
        self._paths[1].unlink(missing_ok=True)
        self._partial[0].replace(self._paths[0])
        self._partial[1].replace(self._paths[1])
