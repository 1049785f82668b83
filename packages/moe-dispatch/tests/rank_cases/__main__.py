"""Cases that need several ranks: `mpiexec -n 8 python rank_cases RESULTS numpy`, `mpiexec -n 2 … mindspore`.

Starting ranks costs seconds, so all cases of a set run in one launch: the ranks form worlds of the sizes that the cases
want, and each checks what it got. A rank writes one line of JSON for a finished case into RESULTS/<rank>.jsonl;
test_ranks.py makes tests of these. It imports this module too, to know the cases, so they import MindSpore themselves.
"""

from __future__ import annotations

import json
import sys
import traceback
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # dense_reference

import rank_mindspore
import rank_numpy
from device_mesh import abort_on_error, connect

CASES = {"numpy": rank_numpy.CASES, "mindspore": rank_mindspore.CASES}


def run(results: Path, cases: str) -> None:
    whole = connect("mpi", debug=True, debug_timeout_seconds=60.0)
    with abort_on_error(whole), (results / f"{whole.rank}.jsonl").open("w") as lines:
        worlds = sorted({world for world, _ in CASES[cases]})
        groups = {world: whole.split(whole.rank // world) for world in worlds}
        for (world, name), check in CASES[cases].items():
            failure = None
            try:
                check(groups[world])
            except Exception:
                failure = traceback.format_exc()
            lines.write(json.dumps({"case": name, "world": world, "failure": failure}) + "\n")
            lines.flush()


if __name__ == "__main__":
    run(Path(sys.argv[1]), sys.argv[2])
