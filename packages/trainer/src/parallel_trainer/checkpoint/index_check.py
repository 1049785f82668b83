"""Whether an index can be that of a checkpoint, whoever wrote it: types, names of files, and numbers that fit together.

What passes can be read without a surprise: every index lies within its tensor, every tensor within the files.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import cattrs
from cattrs.v import format_exception

from parallel_trainer.checkpoint.tensor_file import DTYPES, FLOATS
from parallel_trainer.checkpoint.untrusted import is_file_name

if TYPE_CHECKING:
    from parallel_trainer.checkpoint.index import Checkpoint, Piece, StoredTensor

_LARGEST = 2**63 - 1
_BLOCK_BYTES = range(8, (1 << 30) + 1)


def _whole_number(value: Any, _: Any) -> int:
    if type(value) is not int or not 0 <= value <= _LARGEST:
        raise ValueError(f"{_shown(value)} is no whole number from 0 to {_LARGEST}")
    return value


def _text(value: Any, _: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{_shown(value)} is no text")
    return value


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _strict() -> cattrs.Converter:
    """Takes values as they are: 3.5 and true are no integers, and a text is no list of its letters."""
    converter = cattrs.Converter()
    converter.register_structure_hook(int, _whole_number)
    converter.register_structure_hook(str, _text)
    converter.register_structure_hook(Path, lambda value, _: value)
    return converter


CONVERTER = _strict()


def first_fault(error: BaseException) -> str:
    """What `CONVERTER` could not take, and where it is."""
    return cattrs.transform_error(error, format_exception=_in_words)[0]


def _in_words(error: BaseException, kind: type | None) -> str:
    return str(error) if isinstance(error, ValueError) else format_exception(error, kind)


def faults(checkpoint: Checkpoint) -> Iterator[str]:
    """What cannot be, in sentences; the files themselves are not looked at."""
    for name in checkpoint.files:
        if not is_file_name(name):
            yield f"{name!r} is not the name of a file in the folder"
    if checkpoint.block_bytes not in _BLOCK_BYTES:
        yield f"block_bytes {checkpoint.block_bytes} must be from {_BLOCK_BYTES.start} to {_BLOCK_BYTES.stop - 1}"
    if not checkpoint.state.global_batch_size:
        yield "state.global_batch_size must be at least 1"
    for what, text in (("plan", checkpoint.plan), *checkpoint.versions.items()):
        if not f"{what}{text}".isprintable():
            yield f"{what!r} {text!r} has characters that cannot be shown"
    held = sum(checkpoint.files.values())
    for name, tensor in checkpoint.tensors.items():
        fault = _of_tensor(tensor, held) if name.isprintable() else "its name has characters that cannot be shown"
        if fault:
            yield f"tensor {name!r}: {fault}"
            continue
        for piece in tensor.pieces:
            fault = _of_piece(piece, tensor, checkpoint.files, checkpoint.block_bytes)
            if fault:
                yield f"tensor {name!r}, piece in {piece.file!r}: {fault}"


def _of_tensor(tensor: StoredTensor, held: int) -> str | None:
    if tensor.dtype not in FLOATS:
        return f"its type {tensor.dtype!r} must be one of {', '.join(FLOATS)}"
    # Before an empty dimension there may be numbers of any size, which would be counted all the same.
    if math.prod(max(size, 1) for size in tensor.shape) * DTYPES[tensor.dtype].itemsize > max(held, 8):
        return f"its shape {list(tensor.shape)} takes more than the {held:,} bytes of all files"
    if tensor.split_dim is not None and tensor.split_dim >= len(tensor.shape):
        return f"split_dim {tensor.split_dim} is no dimension of {list(tensor.shape)}"
    return None


def _of_piece(piece: Piece, tensor: StoredTensor, files: Mapping[str, int], block_bytes: int) -> str | None:
    if piece.file not in files:
        return "the index has no such file"
    size = tensor.size
    if tensor.split_dim is not None:
        along, end = tensor.shape[tensor.split_dim], 0
        for first, last in piece.ranges:
            if not end <= first <= last <= along:
                return f"ranges {list(piece.ranges)} must be ascending within 0 to {along}"
            end = last
        size = sum(last - first for first, last in piece.ranges) * (size // along if along else 0)
    if not piece.start <= piece.stop <= size:
        return f"elements {piece.start} to {piece.stop} must be ascending within 0 to {size}"
    blocks = -(-piece.size // (block_bytes // tensor.itemsize)) if block_bytes in _BLOCK_BYTES else 0
    if block_bytes in _BLOCK_BYTES and len(piece.checksums) != blocks:
        return f"it has {len(piece.checksums)} checksums and must have {blocks}"
    return None
