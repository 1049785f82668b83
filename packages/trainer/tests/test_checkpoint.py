"""Checkpoints on one rank: what is written, what is found again, and what becomes of damaged ones."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import zlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from threading import Event
from types import SimpleNamespace
from typing import Any, Protocol

import numpy as np
import pytest
from attrs import evolve
from device_mesh import ParallelMesh, connect
from parallel_config import ConfigWarning, loads
from parallel_config.schema import Checkpoint as Section
from parallel_trainer.checkpoint import index, resume, save, tensor_file, write
from parallel_trainer.checkpoint.check import damages
from parallel_trainer.checkpoint.index import FIRST_MOMENT, INDEX, Checkpoint, State, resolve
from parallel_trainer.checkpoint.load import check_model, load_arrays
from parallel_trainer.checkpoint.reshard import reshard
from parallel_trainer.checkpoint.resume import begins_from_nothing
from parallel_trainer.checkpoint.save import Array, Saver, Snapshot
from parallel_trainer.checkpoint.schedule_notes import schedule_notes
from parallel_trainer.cli import main
from parallel_trainer.errors import UserError
from parallel_trainer.models.config import model_config
from parallel_trainer.parallel.layout import Holding, ModelLayout
from parallel_trainer.parallel.weights import Normal, Weight
from safetensors.numpy import load_file

SHAPES = {"table": (7, 4), "output": (4, 6), "norm": (5,)}


def layout(**sizes: int) -> ModelLayout:
    degrees = dict.fromkeys(("pp", "dp_replicate", "dp_shard", "cp", "tp", "ep"), 1) | sizes
    splits = {"table": {"tp_dim": 0}, "output": {"tp_dim": 1, "tp_block": 2}, "norm": {}}
    weights = {
        name: Weight(name, shape, init=Normal(1.0), **splits[name])  # type: ignore[arg-type]
        for name, shape in SHAPES.items()
    }
    return ModelLayout(weights, ParallelMesh(SimpleNamespace(**degrees)), dict.fromkeys(SHAPES, (0,)))


def values(name: str, step: int = 0) -> np.ndarray:
    """Every element another number."""
    first = {"table": 0, "output": 100, "norm": 200}[name.removeprefix(FIRST_MOMENT)]
    moment = 0.5 if name.startswith(FIRST_MOMENT) else 0.0
    shape = SHAPES[name.removeprefix(FIRST_MOMENT)]
    return first + moment + 1000 * step + np.arange(np.prod(shape), dtype=np.float64)


def snapshot(step: int) -> Snapshot:
    stored = layout().stored(0)
    return Snapshot(
        State(step=step, consumed_samples=8 * step, global_batch_size=8, optimizer_steps=step),
        weights={name: Array(held, values(name, step)) for name, held in stored.items()},
        moments={
            f"{FIRST_MOMENT}{name}": Array(held, values(f"{FIRST_MOMENT}{name}", step)) for name, held in stored.items()
        },
        config="training:\n  steps: 3\n",
        plan="one rank",
        data={"samples": 20},
    )


class Run:
    """A run that stands at a step, and saves."""

    def __init__(self, folder: Path, step: int, fields: dict[str, Any]) -> None:
        self.step = step
        section = Section(save_path=str(folder), **({"save_interleaved_steps": 1} | fields))
        self.saver = Saver(section, connect("single"), lambda: snapshot(self.step), step=step)

    def end(self) -> None:
        """Let go of the folder, as the end of the process does."""
        self.saver.__exit__()

    def to(self, last: int) -> Run:
        while self.step < last:
            self.step += 1
            self.saver.after_step(self.step)
        return self


class Runs(Protocol):
    def __call__(self, folder: Path, *, step: int = 0, **fields: Any) -> Run: ...


@pytest.fixture
def run() -> Iterator[Runs]:
    """Begins a run that saves into a folder; all end with the test."""
    with ExitStack() as stack:

        def begin(folder: Path, *, step: int = 0, **fields: Any) -> Run:
            found = Run(folder, step, fields)
            stack.enter_context(found.saver)
            return found

        yield begin


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """Checkpoints of steps 1 and 2."""
    done = Run(tmp_path / "ck", 0, {})
    with done.saver:
        done.to(2).saver.finish(2)
    return tmp_path / "ck" / "iteration_00000002"


def loaded(path: Path, of: ModelLayout, rank: int = 0) -> dict[str, np.ndarray]:
    """What a rank of a plan gets, as one rank that reads everything."""
    checkpoint = Checkpoint.open(path)
    held = {name: holding for name in of.weights if (holding := of.holding(name, rank))}
    arrays = {name: np.zeros(holding.size) for name, holding in held.items()}
    load_arrays(
        checkpoint, arrays, lambda name, _: held[name].runs, connect("single"), list(SHAPES), dtype=np.dtype(np.float64)
    )
    return arrays


def test_what_is_saved_is_found_again_and_other_programs_can_read_it(saved: Path) -> None:
    found = loaded(saved, layout())
    for name in SHAPES:
        np.testing.assert_array_equal(found[name], values(name, step=2))
    file = load_file(saved / "checkpoint-model-0000000-0000001.safetensors")
    np.testing.assert_array_equal(file["output"], values("output", step=2))
    checkpoint = Checkpoint.open(resolve(saved.parent))
    assert (checkpoint.state.step, checkpoint.state.consumed_samples) == (2, 16)
    assert checkpoint.config == "training:\n  steps: 3\n"
    assert list(damages(checkpoint)) == []


@pytest.mark.parametrize("sizes", [{"tp": 2}, {"dp_shard": 3}, {"dp_shard": 2, "tp": 3}, {"dp_replicate": 2, "cp": 5}])
def test_another_plan_gets_its_part_and_a_resharded_file_holds_it(
    saved: Path, tmp_path: Path, sizes: dict[str, int]
) -> None:
    """Values are the numbers of elements: cutting them says what each rank must get."""
    other = layout(**sizes)
    new = reshard(Checkpoint.open(saved), tmp_path / "new", other, plan="other", config="x: 1\n")
    assert list(damages(Checkpoint.open(new.folder))) == []
    for rank in range(other.mesh.world_size):
        got = loaded(saved, other, rank)
        for name, holding in other.stored(rank).items():
            whole = values(name, step=2).reshape(SHAPES[name])
            expected = whole[holding.part.index].reshape(-1)[holding.start :][: holding.size]
            np.testing.assert_array_equal(got[name], expected)
            file = load_file(new.folder / f"checkpoint-model-{rank:07d}-{other.mesh.world_size:07d}.safetensors")
            np.testing.assert_array_equal(file[name], expected)
    moments = Checkpoint.open(new.folder).tensors[f"{FIRST_MOMENT}table"]
    assert moments.shape == SHAPES["table"]
    assert moments.gaps() is None


def test_blocks_are_small_parts_of_big_tensors(
    run: Runs, saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(index, "BLOCK_BYTES", 40)
    run(tmp_path / "small").to(1)
    checkpoint = Checkpoint.open(tmp_path / "small" / "iteration_00000001")
    assert [block.last - block.first for block in checkpoint.blocks(["table"])] == [5, 5, 5, 5, 5, 3]
    found = loaded(checkpoint.folder, layout(tp=2), 1)
    # Three heads of two columns: the second rank has the last, in rows of six.
    assert found["output"].tolist() == [1104, 1105, 1110, 1111, 1116, 1117, 1122, 1123]
    assert list(damages(reshard(checkpoint, tmp_path / "new", layout(dp_shard=3), plan="", config=""))) == []


def test_the_newest_are_kept_of_those_this_run_wrote(run: Runs, tmp_path: Path) -> None:
    run(tmp_path).to(1).end()
    run(tmp_path, step=1, save_max=2).to(5)
    assert sorted(path.name for path in tmp_path.glob("iter*")) == [f"iteration_{step:08d}" for step in (1, 4, 5)]


def test_one_that_the_user_deleted_does_not_end_the_run(run: Runs, tmp_path: Path) -> None:
    going = run(tmp_path, save_max=1).to(1)
    shutil.rmtree(tmp_path / "iteration_00000001")
    going.to(3)
    assert [path.name for path in tmp_path.glob("iter*")] == ["iteration_00000003"]


def test_what_killed_runs_left_is_deleted_and_written_over(run: Runs, tmp_path: Path) -> None:
    """An unfinished folder of another step; one whose deletion had begun; and one that is somebody else's."""
    for name in (".iteration_00000007.writing", "iteration_00000002", "iteration_00000003"):
        (tmp_path / name).mkdir()
    (tmp_path / "iteration_00000002" / "checkpoint-model-0000000-0000002.safetensors").write_text("")
    (tmp_path / "iteration_00000003" / "notes.txt").write_text("")
    going = run(tmp_path)
    assert not (tmp_path / ".iteration_00000007.writing").exists()
    assert resolve(going.to(2).saver.folder).name == "iteration_00000002"
    with pytest.raises(UserError, match=r"iteration_00000003 exists, .*: move it away"):
        going.to(3)
    assert (tmp_path / "iteration_00000003" / "notes.txt").exists()


def test_a_file_system_without_locks_is_said_once_and_saved_to(
    run: Runs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none(*_: Any) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(save.fcntl, "flock", none)
    with pytest.warns(ConfigWarning, match="file system without locks .*nothing keeps another run"):
        run(tmp_path).to(1)
    assert resolve(tmp_path).name == "iteration_00000001"


def test_steps_between_are_not_saved_and_the_last_one_is(run: Runs, tmp_path: Path) -> None:
    run(tmp_path, save_interleaved_steps=3, no_save_optim=True).to(4).saver.finish(4)
    assert sorted(path.name for path in tmp_path.glob("iter*")) == ["iteration_00000003", "iteration_00000004"]


def test_an_asynchronous_save_has_the_values_of_the_step_it_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The arrays change while the file is being written."""
    go_on, arrays = Event(), {name: values(name) for name in SHAPES}
    real = write.TensorFileWriter.write

    def slow(self: Any, name: str, array: np.ndarray) -> None:
        assert go_on.wait(120)
        real(self, name, array)

    monkeypatch.setattr(write.TensorFileWriter, "write", slow)
    stored = layout().stored(0)

    def take() -> Snapshot:
        weights = {name: Array(held, arrays[name]) for name, held in stored.items()}
        return Snapshot(State(1, 8, 8, 1), weights, {}, "", "", {})

    section = Section(save_path=str(tmp_path), save_interleaved_steps=1, async_save=True)
    with Saver(section, connect("single"), take, step=0) as saver:
        saver.after_step(1)
        assert not (tmp_path / "iteration_00000001").exists()
        for array in arrays.values():
            array += 7
        go_on.set()
        saver.finish(1)
    assert loaded(tmp_path / "iteration_00000001", layout())["norm"].tolist() == values("norm").tolist()


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-3] ^= 0x10
    path.write_bytes(data)


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 8)


DAMAGES: list[tuple[Callable[[Path], None], str]] = [
    (flip, r"is damaged: .* has other values in elements 0 to \d+ .*\(checksum [0-9a-f]{8}\)"),
    (cut, r"checkpoint-model-0000000-0000001.safetensors has \d+ bytes, and had \d+"),
    (Path.unlink, "checkpoint-model-0000000-0000001.safetensors is missing"),
]


@pytest.mark.parametrize(("damage", "message"), DAMAGES, ids=["bit", "truncated", "missing"])
def test_a_damaged_file_is_refused_with_what_can_be_loaded_instead(
    saved: Path, damage: Callable[[Path], None], message: str
) -> None:
    damage(saved / "checkpoint-model-0000000-0000001.safetensors")
    with pytest.raises(UserError, match=message) as error:
        loaded(saved, layout())
    assert f"checkpoint.load_path: {saved.parent / 'iteration_00000001'}" in str(error.value)


def test_verify_names_every_damaged_block_and_exits_with_1(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["checkpoint", "verify", str(saved)]) == 0
    assert "is whole: 6 tensors with 114 elements" in capsys.readouterr().out
    for kind in ("model", "opt"):
        flip(saved / f"checkpoint-{kind}-0000000-0000001.safetensors")
    assert main(["checkpoint", "verify", str(saved)]) == 1
    assert "2 faults" in capsys.readouterr().out


def test_verify_says_once_that_a_file_cannot_be_read(saved: Path) -> None:
    path = saved / "checkpoint-model-0000000-0000001.safetensors"
    path.write_bytes(b"\xff" * path.stat().st_size)
    (said,) = damages(Checkpoint.open(saved))
    assert "no whole safetensors file" in said


def edited(path: Path, **changes: Any) -> None:
    """The index with other values, and the checksum that belongs to them."""
    body = json.loads(path.read_text())
    del body["checksum"]
    body |= changes
    body["checksum"] = zlib.crc32(json.dumps(body, ensure_ascii=False, sort_keys=True).encode())
    path.write_text(json.dumps(body))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"version": 2}, "has version 2, and this parallel-trainer reads version 1"),
        ({"format": "other"}, "is no index of a checkpoint"),
        ({"state": {"step": 3}}, "is damaged"),
        ({"tensors": 5}, "is damaged"),
    ],
)
def test_an_index_that_cannot_be_read_is_refused(saved: Path, changes: dict[str, Any], message: str) -> None:
    edited(saved / INDEX, **changes)
    with pytest.raises(UserError, match=message):
        Checkpoint.open(saved)


def test_a_changed_index_is_noticed(saved: Path) -> None:
    text = (saved / INDEX).read_text()
    (saved / INDEX).write_text(text.replace('"consumed_samples":16', '"consumed_samples":17'))
    with pytest.raises(UserError, match="does not have the checksum that it names"):
        Checkpoint.open(saved)
    (saved / INDEX).write_text(text[:-20])
    with pytest.raises(UserError, match="is damaged"):
        Checkpoint.open(saved)


def test_elements_that_no_file_holds_or_two_do_are_found(saved: Path) -> None:
    tensors = json.loads((saved / INDEX).read_text())["tensors"]
    piece = tensors["table"]["pieces"][0]
    for start, stop, missing in ((0, 27, 27), (1, 28, 0)):
        changed = tensors | {"table": tensors["table"] | {"pieces": [piece | {"start": start, "stop": stop}]}}
        edited(saved / INDEX, tensors=changed)
        message = f"elements {missing} to {missing} of 28 are in none"
        assert re.search(message, "\n".join(damages(Checkpoint.open(saved))))
    edited(saved / INDEX, tensors=tensors | {"table": tensors["table"] | {"pieces": [piece, piece]}})
    assert "are there twice" in "\n".join(damages(Checkpoint.open(saved)))


def test_loading_does_not_leave_elements_as_they_were(saved: Path) -> None:
    tensors = json.loads((saved / INDEX).read_text())["tensors"]
    for pieces in ([], 2 * tensors["table"]["pieces"]):
        edited(saved / INDEX, tensors=tensors | {"table": tensors["table"] | {"pieces": pieces}})
        with pytest.raises(UserError, match=r"does not hold each element exactly once: .*checkpoint verify"):
            loaded(saved, layout())


class SecondRank:
    """Rank 1 of two, to which rank 0 says these texts in turn."""

    rank, size = 1, 2

    def __init__(self, *texts: Any) -> None:
        self._texts = iter([json.dumps(text).encode() for text in texts])
        self._text = b""

    def all_gather(self, x: np.ndarray, *, sizes: list[int] | None = None) -> np.ndarray:
        if sizes is None:
            self._text = next(self._texts)
            return np.append(len(self._text), x)
        return np.append(np.frombuffer(self._text, np.uint8), x)


def test_all_ranks_load_what_rank_0_found_newest(saved: Path) -> None:
    """Another run may save, or delete, while they look."""
    older = saved.with_name("iteration_00000001")
    second: Any = SecondRank(None, str(older), None)
    assert resume.opened(saved.parent, second).folder == older
    second = SecondRank("there is none", None, None)
    with pytest.raises(UserError, match="there is none"):
        resume.opened(saved.parent, second)


def test_going_on_with_other_data_or_another_type_is_said(saved: Path) -> None:
    config = {"seed": 1, "data_path": ("b",), "train_data_path": None, "split": "1, 0, 0"}
    dataloader = SimpleNamespace(config=SimpleNamespace(**config), shuffle=False)
    job: Any = SimpleNamespace(
        plan=SimpleNamespace(global_batch_size=4),
        dtype=np.dtype(np.float32),
        dataset=range(20),
        seq_length=8,
        config=SimpleNamespace(train_dataset=SimpleNamespace(dataloader=dataloader)),
    )
    checkpoint = evolve(Checkpoint.open(saved), data=resume.data_of(job) | {"data_path": ["a"]})
    batch, dtype, data = resume.notes(checkpoint, job, 4)
    assert "The global batch was 8 samples and is 4: of the 16 samples read this makes step 4" in batch
    assert dtype == "The checkpoint has F64, and this run keeps weights and moments in float32."
    assert "data_path was ['a'], is ['b']" in data


MODEL = """
model: {model_type: qwen3, architectures: Qwen3ForCausalLM, vocab_size: 8, seq_length: 8, hidden_size: 8,
        intermediate_size: 8, num_hidden_layers: 1, num_attention_heads: 2, num_key_value_heads: 2, head_dim: 4,
        initializer_range: 0.02, rope_theta: 10000.0}
"""


def test_a_model_that_computes_something_else_with_the_weights_is_said(saved: Path) -> None:
    """Shapes do not show it; how a model is trained is the new file's to say."""
    checkpoint = evolve(Checkpoint.open(saved), config=MODEL)
    other = MODEL.replace("10000.0", "500000.0").replace("0.02", "0.01")
    (said,) = resume.model_notes(checkpoint, model_config(loads(other).model))
    assert said.endswith(": rope_theta was 10000.0, is 500000.0.")
    assert list(resume.model_notes(checkpoint, model_config(loads(MODEL).model))) == []
    assert list(resume.model_notes(evolve(checkpoint, config="model: {"), model_config(loads(MODEL).model))) == []


RUN = """
training: {{steps: {steps}}}
lr_scheduler: {{type: {type}, learning_rate: 1.0e-3, warmup_steps: 0{more}}}
"""


def test_other_steps_on_going_on_are_said_with_what_the_learning_rate_does() -> None:
    def said(before: tuple[int, str, str], now: tuple[int, str, str]) -> list[str]:
        files = [loads(RUN.format(steps=steps, type=kind, more=more)) for steps, kind, more in (before, now)]
        return list(schedule_notes(files[0], files[1], 4))

    linear, constant = "LinearWithWarmUpLR", "ConstantWarmUpLR"
    assert said((10, linear, ""), (10, linear, "")) == []
    # By the definition: 1e-3 · (1 - t/T), the fifth step being t = 4, the last t = T - 1.
    (longer,) = said((10, linear, ""), (20, linear, ""))
    assert longer == (
        "training.steps was 10 and is 20: the learning rate of step 5 is 0.0008, and was to be 0.0006; that of the "
        "last step, 20, is 5e-05."
    )
    assert said((20, constant, ""), (10, constant, "")) == [
        "training.steps was 20 and is 10: the learning rate of the steps that both have is the same."
    ]
    (other,) = said((10, linear, ""), (10, constant, ""))
    assert other.startswith("lr_scheduler is not as it was: the learning rate of step 5 is 0.001, and was to be 0.0006")
    assert list(schedule_notes(None, loads(RUN.format(steps=1, type=linear, more="")), 0)) == []


CRASHES = {
    "data": (write.TensorFileWriter, "write"),
    "end of a file": (write.TensorFileWriter, "close"),
    "index": (Checkpoint, "write"),
    "name": (write.os, "rename"),
    "rotation": (Path, "unlink"),
}


@pytest.mark.parametrize("point", CRASHES)
def test_a_process_that_dies_while_saving_leaves_a_whole_checkpoint(run: Runs, saved: Path, point: str) -> None:
    """It is killed before each thing that saving does to files; the next run takes the newest whole one and goes on."""
    died = subprocess.run([sys.executable, __file__, str(saved.parent), point], timeout=60)
    assert died.returncode == -signal.SIGKILL
    newest = resolve(saved.parent)
    assert newest.name == ("iteration_00000004" if point == "rotation" else "iteration_00000002")
    assert list(damages(Checkpoint.open(newest))) == []
    step = Checkpoint.open(newest).state.step
    run(saved.parent, step=step).to(step + 1)
    assert resolve(saved.parent).name == f"iteration_{step + 1:08d}"
    assert not list(saved.parent.glob(".iter*"))


def die_at(folder: Path, point: str) -> None:
    """Be the process that dies."""

    def die(*_: Any, **__: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    third = Run(folder, 2, {"save_max": 1})
    if point == "rotation":
        third.to(3)
    setattr(*CRASHES[point], die)
    third.to(4)


def test_a_full_disk_is_an_error_and_leaves_nothing_half_written(
    run: Runs, saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    third = run(saved.parent, step=2)
    monkeypatch.setattr(tensor_file.os, "pwrite", full)
    with pytest.raises(UserError, match=r"iteration_00000003 could not be saved. rank 0: .*No space left") as error:
        third.to(3)
    assert f"The newest complete one is {saved}" in str(error.value)
    assert sorted(path.name for path in saved.parent.glob("*iter*")) == ["iteration_00000001", "iteration_00000002"]


def test_two_runs_on_one_folder_are_refused(run: Runs, tmp_path: Path) -> None:
    first = run(tmp_path)
    with pytest.raises(UserError, match="is used by another run that is still going"):
        run(tmp_path)
    assert first.saver.folder == tmp_path


def test_a_new_run_does_not_save_among_the_checkpoints_of_another(run: Runs, saved: Path) -> None:
    with pytest.raises(UserError, match="holds iteration_00000002, and this run starts at step 1") as error:
        run(saved.parent, step=1)
    assert f"checkpoint.load_path: {saved.parent}" in str(error.value)
    with pytest.raises(UserError, match="What works: choose another save_path, or move"):  # it was from there
        run(saved.parent, step=1, load_path=str(saved.parent))


def test_a_folder_that_cannot_be_written_is_refused(run: Runs, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"checkpoint.save_path .*file/ck cannot be written to: Not a directory"):
        run(tmp_path / "file" / "ck")


def test_checkpoints_do_not_lie_inside_of_one(run: Runs, saved: Path) -> None:
    with pytest.raises(UserError, match="is a checkpoint: others would lie inside it") as error:
        run(saved, step=2)
    assert f"Name a folder of checkpoints, {saved.parent} or" in str(error.value)


def test_only_the_folder_that_a_run_saves_to_may_be_empty(saved: Path, tmp_path: Path) -> None:
    def section(load: Path, save: Path) -> Section:
        return Section(load_path=str(load), save_path=str(save))

    empty = tmp_path / "empty"
    assert begins_from_nothing(section(empty, empty))  # does not exist yet
    empty.mkdir()
    assert begins_from_nothing(section(empty, empty))
    assert not begins_from_nothing(section(empty, tmp_path / "other"))
    assert not begins_from_nothing(section(saved.parent, saved.parent))
    assert not begins_from_nothing(section(saved, saved))
    (tmp_path / "file").write_text("")
    assert not begins_from_nothing(section(tmp_path / "file", tmp_path / "file"))


def test_what_is_no_checkpoint_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="holds no complete checkpoint"):
        resolve(tmp_path)
    with pytest.raises(UserError, match="does not exist"):
        resolve(tmp_path / "nowhere")
    with pytest.raises(UserError, match=f"^nowhere does not exist in {re.escape(str(Path.cwd()))}: "):
        resolve(Path("nowhere"))
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="file is a file: a checkpoint is a folder with"):
        resolve(tmp_path / "file")


def test_another_model_is_refused_with_every_difference(saved: Path) -> None:
    shapes = {"table": (7, 4), "output": (6, 4), "bias": (3,)}
    with pytest.raises(UserError) as error:
        check_model(Checkpoint.open(saved), shapes, what="weights")
    assert [line.strip() for line in str(error.value).splitlines()[1:]] == [
        "- bias [3] is not in it",
        "- output is [4, 6] in it, and [6, 4] in the model",
        "- norm [5] is in it, and not in the model",
    ]


def test_show_says_what_is_in_it(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["checkpoint", "show", str(saved.parent)]) == 0
    out = capsys.readouterr().out
    assert "after step 2: 16 samples read, global batch 8" in out
    assert re.search(r"table\s+7 x 4\s+F64\s+1\s+224\s+1\n", out)


def test_resharding_does_not_overwrite(saved: Path) -> None:
    with pytest.raises(UserError, match="exists: name a new folder"):
        reshard(Checkpoint.open(saved), saved, layout(), plan="", config="")


def test_pub_ckpt_01_experts_keep_their_global_numbers_in_any_layout(tmp_path: Path) -> None:
    """Eight experts saved by 4 ranks with ep 2, read with ep 1, 4 and 8: expert e holds 100 + e, its moment 0.1 · e."""
    declared = {
        "experts": Weight("experts", (8, 2), init=Normal(1.0), ep_dim=0),
        "dense": Weight("dense", (10, 3), init=Normal(1.0)),
    }
    moment = f"{FIRST_MOMENT}experts"
    whole = {
        "experts": np.repeat(100.0 + np.arange(8), 2),
        "dense": np.repeat(np.arange(10.0), 3),
        moment: np.repeat(0.1 * np.arange(8), 2),
    }

    def of(world: int, ep: int) -> ModelLayout:
        degrees = dict.fromkeys(("pp", "dp_replicate", "cp", "tp"), 1) | {"dp_shard": world, "ep": ep}
        return ModelLayout(declared, ParallelMesh(SimpleNamespace(**degrees)), {"experts": (0,), "dense": (0,)})

    def content(name: str, held: Holding) -> write.Content:
        values = whole[name].reshape(held.part.weight.shape)[held.part.index].reshape(-1)[held.start :]
        return write.Content(held, "F64", lambda first, last: values[first:last])

    saved_with, files = of(4, 2), {}
    for rank in range(4):
        stored = saved_with.stored(rank)
        named = stored | ({moment: stored["experts"]} if "experts" in stored else {})
        contents = {name: content(name, held) for name, held in named.items()}
        files[f"{rank}.safetensors"] = write.write_file(tmp_path / f"{rank}.safetensors", contents)
    tensors, sizes = write.joined(files.items())
    Checkpoint(tmp_path, tensors, sizes, State(1, 8, 8, 1), "", "ep 2", 4, {}, {}, index.BLOCK_BYTES).write()
    checkpoint = Checkpoint.open(tmp_path)
    assert list(damages(checkpoint)) == []
    expected = {1: [range(8)], 4: [(0, 1), (2, 3), (4, 5), (6, 7)], 8: [(expert,) for expert in range(8)]}
    for ep, by_coordinate in expected.items():
        load_with = of(ep, ep)
        dense = []
        for rank, experts in enumerate(by_coordinate):
            held = {name: load_with.holding(name, rank) for name in declared} | {
                moment: load_with.holding("experts", rank)
            }
            arrays = {name: np.zeros(holding.size) for name, holding in held.items() if holding}
            load_arrays(
                checkpoint,
                arrays,
                lambda name, _, held=held: held[name].runs,
                connect("single"),
                list(whole),
                dtype=np.dtype(np.float64),
            )
            assert arrays["experts"].tolist() == [100.0 + expert for expert in experts for _ in range(2)]
            assert arrays[moment].tolist() == [0.1 * expert for expert in experts for _ in range(2)]
            dense += arrays["dense"].tolist()
        assert dense == [float(row) for row in range(10) for _ in range(3)]
    with pytest.raises(UserError, match=rf"{FIRST_MOMENT}dense \[10, 3\] is not in it"):
        check_model(checkpoint, {moment: (8, 2), f"{FIRST_MOMENT}dense": (10, 3)}, what="moments")


if __name__ == "__main__":
    die_at(Path(sys.argv[1]), sys.argv[2])
