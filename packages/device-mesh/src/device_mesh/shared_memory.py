"""The memory through which MPI's ranks of a machine talk: whether there is enough of it, and that none is left behind.

MPICH makes one file in /dev/shm for all ranks of a machine. It takes its size for granted: where the folder is too
small, ranks end with a bus error the first time they touch what is not there.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from device_mesh.launch import LaunchError

FOLDER = Path("/dev/shm")

# What a rank has in the file: cells for messages on their way, and queues of them. Measured with MPICH 5.0.2, 1 to 16
# ranks and other numbers and sizes of cells: exactly this. A twentieth more is asked for.
_CELLS, _CELLS_VARIABLE = 64, "MPIR_CVAR_CH4_SHM_POSIX_IQUEUE_NUM_CELLS"
_CELL_BYTES, _CELL_BYTES_VARIABLE = 16384, "MPIR_CVAR_CH4_SHM_POSIX_IQUEUE_CELL_SIZE"
_CELL_HEADER_BYTES, _QUEUE_BYTES, _PAGE_BYTES = 128, 576, 4096
_SPARE = 20


def needed_bytes(ranks: int, environment: Mapping[str, str] = os.environ) -> int:
    """What MPI needs in /dev/shm for so many ranks of a machine.

    >>> needed_bytes(4, {})
    4445145
    """
    cell_bytes = _number(environment, _CELL_BYTES_VARIABLE, _CELL_BYTES) + _CELL_HEADER_BYTES
    exact = ranks * (_number(environment, _CELLS_VARIABLE, _CELLS) * cell_bytes + _QUEUE_BYTES) + _PAGE_BYTES
    return exact + exact // _SPARE


def check(ranks: int, environment: Mapping[str, str] = os.environ, *, folder: Path = FOLDER) -> None:
    """Raise LaunchError where MPI could not connect so many ranks of this machine. One rank needs no shared memory."""
    if ranks < 2 or sys.platform != "linux":
        return
    if not folder.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
        state = "cannot be written to" if folder.is_dir() else "does not exist"
        raise LaunchError(
            f"{folder} {state}, and {ranks} ranks on one machine talk through a file in it: mount it "
            f"(mount -t tmpfs -o size=64m tmpfs {folder}), or run 1 rank, which does without."
        )
    found = os.statvfs(folder)
    free, size = found.f_bavail * found.f_frsize, found.f_blocks * found.f_frsize
    needed = needed_bytes(ranks, environment)
    if size and free < needed:
        fit = max((fewer for fewer in range(1, ranks) if needed_bytes(fewer, environment) <= free), default=1)
        large = f"{64 * -(-(size - free + needed) // (64 << 20))}m"
        raise LaunchError(
            f"{folder} has {_mib(free)} free of {_mib(size)}, and {ranks} ranks on one machine need {_mib(needed)} "
            f"there to talk to each other. Make it larger (docker run --shm-size={large}, or mount -o "
            f"remount,size={large} {folder}), delete what fills it, or run {fit} rank{'s' if fit > 1 else ''}."
        )


def leave_to_mpich(environment: dict[str, str] | os._Environ[str]) -> None:
    """Keep UCX, which MPICH uses between machines, from taking room in /dev/shm too; a user's choice stays.

    UCX would take 4.2 MiB a rank for nothing. Where that is not free it takes less, and the ranks of such a machine
    sometimes crash in UCX (seen with 4 ranks in 20 MiB and 16 in 64 MiB).
    """
    environment.setdefault("UCX_TLS", "^posix")


def unlink_segments() -> None:
    """Take the names off the shared memory of this machine's ranks, once all of them have it.

    MPICH removes it when a job ends well; a job that is killed would leave it to the machine.
    """
    with suppress(OSError):
        for line in Path("/proc/self/maps").read_text(encoding="utf-8").splitlines():
            if (name := line.partition(f"{FOLDER}/mpich_")[2]) and not name.endswith("(deleted)"):
                Path(f"{FOLDER}/mpich_{name}").unlink(missing_ok=True)


def _number(environment: Mapping[str, str], name: str, default: int) -> int:
    text = environment.get(name, "")
    return int(text) if text.isascii() and text.isdigit() else default


def _mib(count: int) -> str:
    return f"{count / 2**20:.1f} MiB"
