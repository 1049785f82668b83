"""What the ranks of one world size do with the double of HyperParallel, in one launch.

    mpiexec -n WORLD python hyperparallel_ranks.py FOLDER

Rank 0 writes FOLDER/hyperparallel-N.json: by the name of a check, what each rank found.
"""

from __future__ import annotations

import json
import sys
from importlib import import_module
from pathlib import Path

import mindspore as ms
import numpy as np
from device_mesh import Communicator, abort_on_error, connect
from hyperparallel_checks import CHECKS
from hyperparallel_stand_in import install

Found = dict[str, dict[str, float | str]]


def checks(communicator: Communicator) -> list[Found]:
    """By rank, what each check found."""
    forget = install(communicator)
    import_module("hyper_parallel.platform.mindspore.autograd_compat").enable_mindspore_backward_compat()
    found: Found = {}
    for check in CHECKS:
        found[check.__name__] = check(communicator)
        forget()
    return of_all_ranks(communicator, found)


def of_all_ranks(communicator: Communicator, found: Found) -> list[Found]:
    """What each rank found, by rank."""
    own = np.frombuffer(json.dumps(found).encode(), np.uint8)
    sizes = communicator.all_gather(np.array([len(own)])).tolist()
    text = communicator.all_gather(own, sizes=sizes).tobytes()
    ends = np.cumsum(sizes)
    return [json.loads(text[end - size : end]) for end, size in zip(ends, sizes, strict=True)]


def main(folder: Path) -> None:
    ms.set_device("CPU")
    communicator = connect()
    with abort_on_error(communicator):
        report = {"checks": checks(communicator)}
        if communicator.rank == 0:
            (folder / f"hyperparallel-{communicator.size}.json").write_text(json.dumps(report), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
