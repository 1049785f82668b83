"""What goes wrong while a run saves and loads: ranks that are killed, a stop, a full disk, damaged files, two runs."""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import subprocess
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType

import pytest
from attrs import frozen
from cases import Case, Model
from msrun import interruptible
from test_command import COMMAND, END_SECONDS, RANK, call, metrics, refused, running

pytestmark = pytest.mark.timeout(1200)

RANKS = 2
LAST_STEP = 9

# In the rank that PMI_RANK names: the process is killed in the given call of a function.
_KILLED = """
import os, signal, time
rank, point, call = os.environ.get("KILL_RANK"), os.environ.get("KILL_IN"), int(os.environ.get("KILL_AT", 0))
if rank is not None and os.environ.get("PMI_RANK") == rank:
    from parallel_trainer.checkpoint.tensor_file import TensorFileWriter
    from parallel_trainer.parallel.chunk import Chunk
    points = {"forward": (Chunk, "forward"), "backward": (Chunk, "backward"), "saving": (TensorFileWriter, "close")}
    owner, name = points[point]
    right, calls = getattr(owner, name), 0
    def fatal(*args, **options):
        global calls
        calls += 1
        if calls == call:
            open("killed", "w").write(str(time.time()))
            os.kill(os.getpid(), signal.SIGKILL)
        return right(*args, **options)
    setattr(owner, name, fatal)
"""


# In ranks: no file may grow beyond 20 kB once MPI, which needs files in memory that are larger, has started.
_FULL = """
import os, resource
if "PMI_RANK" in os.environ:
    from parallel_trainer.checkpoint.save import Saver
    right = Saver.__init__
    def limited(*args, **options):
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
        right(*args, **options)
    Saver.__init__ = limited
"""


@frozen
class Place:
    """A folder with a file that saves each step; runs in it go on from what is saved."""

    folder: Path

    @property
    def checkpoints(self) -> Path:
        return self.folder / "ck"

    def config(self, name: str = "run.yaml", *, load: bool = False, **checkpoint: str) -> Path:
        """The file, with a section `checkpoint`."""
        text = (self.folder / "base.yaml").read_text(encoding="utf-8")
        fields = {"save_path": "ck", "save_interleaved_steps": "1"} | ({"load_path": "ck"} if load else {}) | checkpoint
        text += "checkpoint:\n" + "".join(f"  {key}: {value}\n" for key, value in fields.items())
        (self.folder / name).write_text(text, encoding="utf-8")
        return self.folder / name

    def saved(self) -> list[int]:
        """The steps of complete checkpoints."""
        return sorted(int(path.parent.name[-8:]) for path in self.checkpoints.glob("iteration_*/metadata.json"))


def _written(folder: Path, corpora: dict[str, str]) -> Place:
    case = Case(1, RANKS, model=Model(dtype="float64"))
    text = re.sub(r"(?m)^  steps: .*$", f"  steps: {LAST_STEP}", case.yaml(corpora), count=1)
    (folder / "base.yaml").write_text(text, encoding="utf-8")
    return Place(folder)


@pytest.fixture(scope="module")
def undisturbed(corpora: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Place:
    """A run that nothing happened to, in "out", and its checkpoints of all steps."""
    place = _written(tmp_path_factory.mktemp("undisturbed"), corpora)
    path = place.config(save_max=str(LAST_STEP), async_save="true")
    done = call("run", path, "--nproc", str(RANKS), "--output", "out", cwd=place.folder)
    assert done.returncode == 0, done.stderr
    assert place.saved() == list(range(1, LAST_STEP + 1))
    return place


@pytest.fixture
def place(corpora: dict[str, str], tmp_path: Path) -> Place:
    return _written(tmp_path, corpora)


def brought(undisturbed: Place, place: Place, *steps: int) -> None:
    """Checkpoints of these steps, as if runs here had saved them."""
    for name in (f"iteration_{step:08d}" for step in steps):
        shutil.copytree(undisturbed.checkpoints / name, place.checkpoints / name)


def with_fault(place: Place, program: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have every Python that starts from here on run this first."""
    (place.folder / "sitecustomize.py").write_text(program, encoding="utf-8")
    folders = [str(place.folder), *filter(None, [os.environ.get("PYTHONPATH")])]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(folders))


def killed(place: Place, output: str, *, rank: int, point: str, at: int) -> None:
    """A run of which one rank is killed: the others are gone soon, and in the end nobody is left."""
    path, mark = place.config(load=True, save_max="2"), place.folder / "killed"
    mark.unlink(missing_ok=True)
    fault = {"KILL_RANK": str(rank), "KILL_IN": point, "KILL_AT": str(at)}
    with begun(place, path, output, fault) as (process, log):
        while not mark.exists():
            assert process.poll() is None, log.read_text()
            time.sleep(0.05)
        deadline = time.monotonic() + END_SECONDS
        while [other for other in running(str(path)) if other.cmdline()[:3] == RANK]:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert process.wait(END_SECONDS) not in (0, None)
    assert "Killed (signal 9)" in log.read_text()
    assert running(str(path)) == []


@contextmanager
def begun(
    place: Place, config: Path, output: str, environment: Mapping[str, str] = MappingProxyType({})
) -> Iterator[tuple[subprocess.Popen[bytes], Path]]:
    """A run that is going on, and where it says what it says."""
    log = place.folder / f"{output}.log"
    command = [*COMMAND, "run", str(config), "--nproc", str(RANKS), "--output", output]
    with (
        log.open("w") as file,
        interruptible(),
        subprocess.Popen(
            command, cwd=place.folder, stdout=file, stderr=subprocess.STDOUT, env=os.environ | environment
        ) as process,
    ):
        try:
            yield process, log
        finally:
            if process.poll() is None:
                process.kill()


def test_a_run_through_every_accident_equals_one_without(
    place: Place, undisturbed: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks killed in a forward, a backward and while saving; SIGTERM; then to the end: each step's numbers are those
    of a run that nothing happened to, to the last bit, and nothing but the step of the accident is done twice."""
    with_fault(place, _KILLED, monkeypatch)
    # One micro-batch a step: the second forward, the third backward of the next run, the first of two files.
    # The file loads from where it saves, where nothing is yet.
    killed(place, "first", rank=1, point="forward", at=2)
    assert place.saved() == [1]
    killed(place, "second", rank=0, point="backward", at=3)
    assert place.saved() == [1, 2, 3]
    killed(place, "third", rank=1, point="saving", at=3)
    assert place.saved() == [1, 2, 3, 4]
    stopped_at = stopped(place)
    last = call("run", place.config(load=True), "--nproc", str(RANKS), "--output", "last", cwd=place.folder)
    assert last.returncode == 0, last.stderr
    assert f"Going on after step {stopped_at}, from ck/iteration_{stopped_at:08d}" in last.stdout

    found: dict[int, tuple[float, ...]] = {}
    for output in ("first", "second", "third", "fourth", "last"):
        steps = metrics(place.folder / output)
        assert [step["step"] for step in steps] == [*range(int(steps[0]["step"]), int(steps[-1]["step"]) + 1)]
        found |= {int(step["step"]): numbers(step) for step in steps}
    assert found == {int(step["step"]): numbers(step) for step in metrics(undisturbed.folder / "out")}
    assert max(found) == LAST_STEP


def numbers(step: dict[str, float]) -> tuple[float, ...]:
    return step["loss"], step["grad_norm"], step["lr"], step["consumed_samples"]


def stopped(place: Place) -> int:
    """Ask a run to stop after its first step; returns the step that it saved."""
    path = place.config(load=True, async_save="true")
    with begun(place, path, "fourth") as (process, log):
        while not (place.folder / "fourth" / "metrics.jsonl").exists():
            assert process.poll() is None, log.read_text()
            time.sleep(0.02)
        process.terminate()
        assert process.wait(END_SECONDS) == 0, log.read_text()
    (said,) = re.findall(rf"Stopped by SIGTERM after step (\d+) of {LAST_STEP}", log.read_text())
    assert place.saved()[-1] == int(said)
    assert running(str(path)) == []
    return int(said)


def test_a_disk_that_is_full_ends_the_run_with_the_checkpoint_before(
    place: Place, undisturbed: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The limit on a file's size stands in for the disk: it lets metrics through and no weights."""
    brought(undisturbed, place, 1, 2)
    with_fault(place, _FULL, monkeypatch)
    full = call("run", place.config(load=True), "--nproc", "2", "--output", "b", cwd=place.folder)
    refused(
        full,
        "iteration_00000003 could not be saved",
        "File too large",
        "The newest complete one is ck/iteration_00000002",
    )
    assert place.saved() == [1, 2]
    assert not list(place.checkpoints.glob(".iteration*"))


def test_two_runs_on_one_folder(place: Place) -> None:
    """The second is refused while the first goes on, and the first is not disturbed."""
    place.checkpoints.mkdir()
    with (place.checkpoints / ".lock").open("w") as lock:  # as a run holds it
        fcntl.flock(lock, fcntl.LOCK_EX)
        done = call("run", place.config(), "--nproc", "2", "--output", "b", cwd=place.folder)
    refused(done, "checkpoint.save_path ck is used by another run that is still going")
    assert place.saved() == []


def flip(folder: Path) -> None:
    path = folder / "checkpoint-opt-0000001-0000002.safetensors"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def truncate(folder: Path) -> None:
    path = folder / "checkpoint-model-0000000-0000002.safetensors"
    os.truncate(path, path.stat().st_size - 1)


def lose(folder: Path) -> None:
    (folder / "checkpoint-model-0000001-0000002.safetensors").unlink()


def newer(folder: Path) -> None:
    body = json.loads((folder / "metadata.json").read_text(encoding="utf-8"))
    del body["checksum"]
    body["version"] = 99
    body["checksum"] = zlib.crc32(json.dumps(body, ensure_ascii=False, sort_keys=True).encode())
    (folder / "metadata.json").write_text(json.dumps(body), encoding="utf-8")


def test_damaged_checkpoints_are_refused_and_the_one_before_is_named(place: Place, undisturbed: Place) -> None:
    brought(undisturbed, place, 4, 8, 9)
    path = place.config(load=True)
    kept = place.checkpoints / "iteration_00000008"
    (place.checkpoints / "iteration_00000009" / "metadata.json").unlink()  # not complete: never taken
    original = {file.name: file.read_bytes() for file in kept.iterdir()}
    for file in (place.checkpoints / "iteration_00000009").iterdir():
        file.unlink()
    damages: list[tuple[Callable[[Path], None], list[str]]] = [
        (truncate, ["checkpoint-model-0000000-0000002.safetensors has ", "bytes, and had "]),
        (lose, ["checkpoint-model-0000001-0000002.safetensors is missing"]),
        (newer, ["has version 99", "use the parallel-trainer that wrote it"]),
        (flip, ["checkpoint-opt-0000001-0000002.safetensors is damaged", "other values in elements"]),
    ]
    for damage, named in damages:
        damage(kept)
        done = call("run", path, "--nproc", "2", "--output", "b", cwd=place.folder)
        again = [] if damage is newer else ["checkpoint.load_path: ck/iteration_00000004"]
        refused(done, *named, *again)
        assert not (place.folder / "b").exists()
        for name, data in original.items():
            (kept / name).write_bytes(data)


def test_a_run_whose_steps_are_done_says_so_before_any_rank_starts(place: Place, undisturbed: Place) -> None:
    brought(undisturbed, place, LAST_STEP)
    done = call("run", place.config(load=True), "--nproc", "2", "--output", "b", cwd=place.folder)
    assert done.returncode == 0, done.stderr
    assert f"is of the last of {LAST_STEP} steps: this run is complete" in done.stdout
    assert not (place.folder / "b").exists()
