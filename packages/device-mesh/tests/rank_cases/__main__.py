"""The cases that need several ranks; `mpiexec -n 8 python rank_cases RESULTS mpi end` runs them.

Starting ranks costs seconds, so all cases run in one launch: the eight ranks form worlds of 1, 2, 3, 4 and
8 ranks by `split` and run every case in each, in some worlds also in debug mode, and a few cases with each way
to wait for MPI, where connect() takes one. Under msrun, with `mindspore` for `mpi`, the ranks run the cases of mode
"mccl" in one world, and with `fail` for `end` rank 1 then fails. Each rank writes one line of JSON for a finished case
into RESULTS/<rank>.jsonl; test_ranks.py turns these into one test for each case and world size. It also imports this
module, to know the cases, so MPI and MindSpore are imported where they are used.
"""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import rank_collectives  # noqa: F401  # the modules below register their cases when they are imported
import rank_gradients  # noqa: F401
import rank_groups  # noqa: F401
import rank_mistakes  # noqa: F401
from attrs import evolve
from device_mesh import Backend, Communicator, abort_on_error, connect
from device_mesh.debug import CheckedCommunicator
from rank_support import CASES, WORLDS, Case, Mode

DEBUG_WORLDS = (1, 2, 8)


def run(results: Path, backend: Backend, ending: str) -> None:
    whole = connect(backend, debug=False)
    with abort_on_error(whole):
        with (results / f"{whole.rank}.jsonl").open("w") as lines:
            for world in WORLDS if backend == "mpi" else (whole.size,):
                modes = in_each_mode(whole.split(whole.rank // world)) if backend == "mpi" else {"mccl": whole}
                for name, case in CASES.items():
                    if world in case.worlds and not modes.keys().isdisjoint(case.modes):
                        report = {"case": name, "world": world, "failures": failures(case, modes)}
                        lines.write(json.dumps(report) + "\n")
                        lines.flush()
        if ending == "fail":
            fail_on_rank_1(whole)


def failures(case: Case, modes: Mapping[Mode, Communicator]) -> dict[Mode, str]:
    failed: dict[Mode, str] = {}
    for mode in (mode for mode in case.modes if mode in modes):
        try:
            case.check(modes[mode])
        except Exception:
            failed[mode] = traceback.format_exc()
    return failed


def fail_on_rank_1(whole: Communicator) -> None:
    if whole.rank == 1:
        raise RuntimeError("rank 1 fails on purpose")
    whole.recv(np.empty(1), 1)


def in_each_mode(plain: Communicator) -> dict[Mode, Communicator]:
    from device_mesh import mpi, waiting

    modes: dict[Mode, Communicator] = {"plain": plain}
    if plain.size in DEBUG_WORLDS:
        modes["debug"] = CheckedCommunicator.over(plain, 60.0)
    if isinstance(plain, mpi.MpiCommunicator):
        modes["hold_core"] = evolve(plain, wait=waiting.hold_core)
        modes["give_way"] = evolve(plain, wait=waiting.give_way)
    return modes


if __name__ == "__main__":
    run(Path(sys.argv[1]), sys.argv[2], sys.argv[3])
