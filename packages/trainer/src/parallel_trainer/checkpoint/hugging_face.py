"""Folders that Hugging Face's libraries read and write: config.json, safetensors files, their index.

Reading takes the parts of a weight that are asked for, from whichever files they are in; writing takes weights piece by
piece. So memory never holds more than the piece.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any, Self

import numpy as np
from attrs import evolve, frozen

from parallel_trainer.checkpoint.hugging_face_config import HuggingFaceConfig, read_config, write_config
from parallel_trainer.checkpoint.hugging_face_files import INDEX, SINGLE, open_files, read_json
from parallel_trainer.checkpoint.hugging_face_names import Stored, copies, stacked, stored
from parallel_trainer.checkpoint.index import shortened
from parallel_trainer.checkpoint.tensor_file import DTYPES, Entry, TensorFile, TensorFileWriter
from parallel_trainer.errors import UserError
from parallel_trainer.kernels import kernels
from parallel_trainer.models import build_model
from parallel_trainer.models.config import DeepseekV3Config, ModelConfig
from parallel_trainer.parallel.weights import Weight

FLOATS: Mapping[str, str] = {"float32": "F32", "bfloat16": "BF16", "float16": "F16", "float64": "F64"}
"""By the name of a dtype, what it is called in a file."""

_COMPARED = 1 << 22


def declared(config: ModelConfig) -> dict[str, Weight]:
    """A model's weights by name."""
    return {weight.name: weight for weight in build_model(config, kernels("cpu")).weights}


@frozen(eq=False)
class HuggingFaceFolder:
    """A folder opened for reading; close it, or use it as a context manager.

    config:  what its config.json says.
    weights: of the model, by name.
    """

    path: Path
    config: HuggingFaceConfig
    weights: Mapping[str, Weight]
    _parts: Mapping[str, tuple[Stored, ...]]
    _where: Mapping[str, tuple[TensorFile, Entry]]
    _files: ExitStack

    @classmethod
    def open(cls, path: str | Path) -> HuggingFaceFolder:
        """Read config.json and the headers of all files, and check that together they are a model.

        Raises UserError for what is missing, too much or of another shape, for a model that does not exist here, for
        two complete sets of weights, and for a table that is there twice with different values.
        """
        path = Path(path)
        try:
            config = read_config(read_json(path / "config.json"))
        except UserError as error:
            raise UserError(f"{path / 'config.json'}: {error}") from error
        with ExitStack() as files:
            opened, notes = open_files(path, files)
            where = {name: (file, entry) for file in opened for name, entry in file.entries.items()}
            config = _without_missing_prediction(evolve(config, notes=(*config.notes, *notes)), where)
            weights = declared(config.model)
            parts = {name: _parts_of(weight, where) for name, weight in weights.items()}
            repeated = copies(weights.values(), layers=config.model.num_hidden_layers)
            _check_tensors(path, [part for found in parts.values() for part in found], repeated, where)
            folder = cls(path, config, weights, parts, where, files.pop_all())
        try:
            folder._check_copies(repeated)
        except BaseException:
            folder.close()
            raise
        return folder

    def read(self, name: str, first: int = 0, last: int | None = None) -> np.ndarray:
        """Elements `first` … `last` - 1 of a weight in C order, flat, in the type that `dtype` names."""
        last, dtype = self.weights[name].size if last is None else last, DTYPES[self.dtype(name)]
        pieces = [piece.astype(dtype, copy=False) for piece in self._pieces(self._parts[name], first, last)]
        return pieces[0] if len(pieces) == 1 else np.concatenate([np.empty(0, dtype), *pieces])

    def dtype(self, name: str) -> str:
        """The type that `read` gives a weight, a name in `tensor_file.DTYPES`."""
        dtypes = {self._where[part.name][1].dtype for part in self._parts[name]}
        return "F64" if "F64" in dtypes else "F32"

    def _pieces(self, parts: tuple[Stored, ...], first: int, last: int) -> Iterator[np.ndarray]:
        size = parts[0].size  # the matrices of experts are all of one size
        for number in range(first // size, -(-last // size)):
            file, entry = self._where[parts[number].name]
            yield file.read(entry, max(first - number * size, 0), min(last - number * size, size))

    def _check_copies(self, repeated: Mapping[str, Weight]) -> None:
        """Compare tables that are in the folder twice."""
        for name, weight in repeated.items():
            if name not in self._where:
                continue
            for first in range(0, weight.size, _COMPARED):
                last = min(first + _COMPARED, weight.size)
                [values] = self._pieces((Stored(name, weight.shape),), first, last)
                if not np.array_equal(values, self.read(weight.name, first, last), equal_nan=True):
                    raise UserError(
                        f"{self.path}: {name} differs from {weight.name}, and the model of its config.json has them "
                        "once. If they are two tables, tie_word_embeddings has to be false"
                    )

    def close(self) -> None:
        """Give the files back."""
        self._files.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _without_missing_prediction(config: HuggingFaceConfig, where: Mapping[str, Any]) -> HuggingFaceConfig:
    """The configuration without a further prediction that it announces and that no file has, as transformers saves."""
    model = config.model
    layer = f"model.layers.{model.num_hidden_layers}."
    if not isinstance(model, DeepseekV3Config) or any(name.startswith(layer) for name in where):
        return config
    if not model.num_nextn_predict_layers:
        return config
    note = (
        "config.json announces a layer that predicts one token further, and no file has it: the model is read without, "
        "num_nextn_predict_layers 0."
    )
    return evolve(config, model=evolve(model, num_nextn_predict_layers=0), notes=(*config.notes, note))


def _parts_of(weight: Weight, where: Mapping[str, Any]) -> tuple[Stored, ...]:
    """The tensors of a weight: stacked if the folder has it so, else as released checkpoints have them."""
    return (stacked(weight),) if weight.name in where else stored(weight)


def _check_tensors(
    path: Path,
    needed: Iterable[Stored],
    repeated: Mapping[str, Weight],
    where: Mapping[str, tuple[TensorFile, Entry]],
) -> None:
    shapes = {part.name: part.shape for part in needed}
    allowed = shapes | {name: weight.shape for name, weight in repeated.items()}
    problems = []
    for kind, names in (("missing", shapes.keys() - where.keys()), ("too much", where.keys() - allowed.keys())):
        if names:
            problems.append(f"{len(names)} tensors are {kind}: {', '.join(shortened(sorted(names)))}")
    wrong, other = [], []
    for name in sorted(where.keys() & allowed.keys()):
        entry = where[name][1]
        if entry.shape != allowed[name]:
            wrong.append(f"{name} has shape {list(entry.shape)}, and the model {list(allowed[name])}")
        if entry.dtype not in FLOATS.values():
            other.append(f"{name} has dtype {entry.dtype}, and a weight one of {', '.join(FLOATS.values())}")
    problems += shortened(wrong) + shortened(other)
    if problems:
        raise UserError(f"{path} is not the model of its config.json:", problems)


def write_folder(
    folder: str | Path,
    config: ModelConfig,
    values: Iterable[tuple[str, Iterable[np.ndarray]]],
    *,
    dtype: str = "float32",
    others: Mapping[str, Any] = MappingProxyType({}),
    max_shard_bytes: int = 5_000_000_000,
) -> None:
    """Write a model as a folder that transformers loads. It appears when it is complete, or not at all.

    values: each weight's name and its elements in C order, in any number of pieces; weights in any order.
    dtype:  a name in `FLOATS`, in which weights are written; the biases of routers stay float32 at least.
    others: a `model` section's other fields, of which config.json gets max_position_embeddings and token ids.
    max_shard_bytes: size of tensors above which a further file is begun.

    Raises UserError for a folder that is there and not empty, for a model that transformers cannot compute and for a
    number that `dtype` cannot hold; ValueError for weights that are not the model's.
    """
    folder = Path(folder)
    if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        raise UserError(f"{folder} exists and is not an empty folder: name a new one, or remove it")
    config_json = write_config(config, dtype=dtype, others=others)
    weights, zeros = declared(config), {}
    if isinstance(config, DeepseekV3Config):  # its routers there always have a bias
        there = declared(evolve(config, moe_router_enable_expert_bias=True))
        weights, zeros = there, {name: there[name] for name in there.keys() - weights.keys()}
    shards = _shards(weights.values(), FLOATS[dtype], max_shard_bytes)
    partial = folder.with_name(f"{folder.name}.partial-{os.getpid()}")
    try:
        partial.mkdir(parents=True)
        with ExitStack() as files:
            writers = _writers(partial, shards, files)
            _write_values(weights, values, writers)
            _write_values(weights, ((name, [np.zeros(weight.size)]) for name, weight in zeros.items()), writers)
        if len(shards) > 1:
            _write_index(partial, writers)
        _write_json(partial / "config.json", config_json)
        partial.replace(folder)
    except OSError as error:
        raise UserError(f"{folder} cannot be written: {error.strerror}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _shards(weights: Iterable[Weight], dtype: str, max_bytes: int) -> list[list[tuple[str, str, tuple[int, ...]]]]:
    """The tensors of each file with their dtypes and shapes, in the order in which the model uses them."""
    shards: list[list[tuple[str, str, tuple[int, ...]]]] = [[]]
    held = 0
    for weight in weights:
        own = "F32" if weight.name.endswith("e_score_correction_bias") and DTYPES[dtype].itemsize < 4 else dtype
        for part in stored(weight):
            nbytes = part.size * DTYPES[own].itemsize
            if held and held + nbytes > max_bytes:
                shards.append([])
                held = 0
            shards[-1].append((part.name, own, part.shape))
            held += nbytes
    return shards


def _writers(
    folder: Path, shards: list[list[tuple[str, str, tuple[int, ...]]]], files: ExitStack
) -> dict[str, TensorFileWriter]:
    """By the name of a tensor, the file that it goes to."""
    writers: dict[str, TensorFileWriter] = {}
    for number, tensors in enumerate(shards, start=1):
        name = SINGLE if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        # transformers reads only files that say so.
        writer = files.enter_context(TensorFileWriter(folder / name, tensors, {"format": "pt"}))
        writers.update((tensor, writer) for tensor, *_ in tensors)
    return writers


def _write_values(
    weights: Mapping[str, Weight],
    values: Iterable[tuple[str, Iterable[np.ndarray]]],
    writers: Mapping[str, TensorFileWriter],
) -> None:
    for name, pieces in values:
        if name not in weights:
            raise ValueError(f"{name} is no weight of the model")
        parts = ((part.name, part.size) for part in stored(weights[name]))
        part, room = next(parts)
        for piece in pieces:
            elements = piece.reshape(-1)
            while elements.size:
                if not room:
                    part, room = next(parts, ("", elements.size))
                    if not part:
                        raise ValueError(f"{name} has {weights[name].size} elements; got more")
                writers[part].write(part, elements[:room])
                room, elements = max(room - elements.size, 0), elements[room:]


def _write_index(folder: Path, writers: Mapping[str, TensorFileWriter]) -> None:
    total = sum(entry.stop - entry.start for writer in set(writers.values()) for entry in writer.entries.values())
    files = {name: writer.path.name for name, writer in sorted(writers.items())}
    _write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": files})


def _write_json(path: Path, values: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
