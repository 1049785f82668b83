"""The cases that need several ranks; `mpiexec -n 8 python rank_cases RESULTS` runs them.

Starting ranks costs seconds, so all cases run in one launch: the eight ranks form worlds of 1, 2, 3, 4 and
8 ranks by `split` and run every case in each, in some worlds also in debug mode, and a few cases with each way
to wait for MPI, where connect() takes one. Each rank writes one line of JSON for a finished case into
RESULTS/<rank>.jsonl; test_ranks.py turns these into one test for each case and world size. It also imports this
module, to know the cases, so MPI and MindSpore are imported where they are used.
"""

from __future__ import annotations

import json
import sys
import traceback
from pathlib import Path

import rank_collectives  # noqa: F401  # the modules below register their cases when they are imported
import rank_gradients  # noqa: F401
import rank_groups  # noqa: F401
import rank_mistakes  # noqa: F401
from attrs import evolve
from device_mesh import Communicator, abort_on_error, connect
from device_mesh.debug import CheckedCommunicator
from rank_support import CASES, WORLDS, Mode

DEBUG_WORLDS = (1, 2, 8)


def run(results: Path) -> None:
    whole = connect("mpi", debug=False)
    with abort_on_error(whole), (results / f"{whole.rank}.jsonl").open("w") as lines:
        for world in WORLDS:
            modes = in_each_mode(whole.split(whole.rank // world))
            for name, case in CASES.items():
                if world not in case.worlds:
                    continue
                failures = {}
                for mode in (mode for mode in case.modes if mode in modes):
                    try:
                        case.check(modes[mode])
                    except Exception:
                        failures[mode] = traceback.format_exc()
                lines.write(json.dumps({"case": name, "world": world, "failures": failures}) + "\n")
                lines.flush()


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
    run(Path(sys.argv[1]))
