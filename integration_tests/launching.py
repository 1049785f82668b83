"""A launch of ranks that do many tasks one after the other: it prints how far they are, and ends if they are stuck."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from attrs import define
from device_mesh.variables import for_own_mpiexec
from parallel_trainer.launch.mpiexec import rank_environment

SHOWN_EVERY_SECONDS = 30.0
STOP_SECONDS = 30.0
STUCK_SECONDS = 1500.0
"""No task takes a tenth of this on two idle cores."""

Show = Callable[[str], None]


@define
class Tasks:
    """What ranks have done of `total` tasks, for whoever launched them; rank 0 notes it in a file.

    A line of the file is the total, then one for each task that is done: its name and seconds.
    """

    path: Path
    total: int
    writes: bool
    since: float = 0.0

    def __attrs_post_init__(self) -> None:
        self.since = time.monotonic()
        self._note(self.total)

    def done(self, name: str) -> None:
        """This task is done, and took the time since the last."""
        now = time.monotonic()
        self._note([name, round(now - self.since, 2)])
        self.since = now

    def _note(self, line: object) -> None:
        if self.writes:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")


def tasks_of(folder: Path, world: int) -> Path:
    """Where the ranks of a launch note what is done."""
    return folder / f"tasks-{world}.jsonl"


def launch(program: Path, world: int, folder: Path, *, cwd: Path, show: Show, stuck: float = STUCK_SECONDS) -> None:
    """Run a Python program on `world` ranks, with `folder` as its argument.

    Prints how far they are every half minute through `show`, and in the end which tasks took longest.

    Raises:
        RuntimeError: the ranks ended with an error, or finished no task for `stuck` seconds; with what they printed.
    """
    what, log, tasks = f"{program.name} on {world} ranks", folder / f"log-{world}", tasks_of(folder, world)
    command = [str(Path(sys.executable).parent / "mpiexec"), "-n", str(world), sys.executable, str(program)]
    environment = rank_environment(world, for_own_mpiexec(os.environ)) | {"DEVICE_MESH_DEBUG": "0"}
    begin = time.monotonic()
    with (
        log.open("wb") as output,
        subprocess.Popen([*command, str(folder)], cwd=cwd, env=environment, stdout=output, stderr=output) as job,
    ):
        try:
            ended = _watch(job, what, tasks, show, stuck)
        finally:
            _end(job)
    if job.returncode or not ended:
        why = f"ended with {job.returncode}" if ended else f"finished no task for {stuck:g} s"
        raise RuntimeError(f"{what} {why}:\n{log.read_text(encoding='utf-8', errors='replace')}")
    finished = _read(tasks)[1]
    slowest = ", ".join(f"{name} {taken:.0f} s" for name, taken in sorted(finished, key=lambda task: -task[1])[:5])
    show(f"{what}: {len(finished)} tasks in {time.monotonic() - begin:.0f} s, longest: {slowest}")


def _end(job: subprocess.Popen[bytes]) -> None:
    if job.poll() is None:
        job.terminate()  # mpiexec ends its ranks
        try:
            job.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            job.kill()


def _watch(job: subprocess.Popen[bytes], what: str, path: Path, show: Show, stuck: float) -> bool:
    """Whether the ranks have ended; False where no task was done for `stuck` seconds."""
    begin = moved = time.monotonic()
    before = 0
    while True:
        try:
            job.wait(min(SHOWN_EVERY_SECONDS, stuck))
            return True
        except subprocess.TimeoutExpired:
            now = time.monotonic()
        total, finished = _read(path)
        if len(finished) > before:
            before, moved = len(finished), now
        last = f", last {finished[-1][0]}" if finished else ""
        show(f"{what}: {len(finished)} of {total or '?'} tasks in {now - begin:.0f} s{last}")
        if now - moved >= stuck:
            return False


def _read(path: Path) -> tuple[int, list[Any]]:
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True) if path.exists() else []
    total, *finished = [json.loads(line) for line in lines if line.endswith("\n")] or [0]
    return total, finished
