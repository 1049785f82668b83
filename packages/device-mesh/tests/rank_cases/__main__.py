"""The cases that need several ranks; `mpiexec -n 8 python rank_cases RESULTS mpi end` runs them.

Starting ranks costs seconds, so all cases run in one launch: the eight ranks form worlds of 1, 2, 3, 4 and
8 ranks by `split` and run every case in each, in some worlds also in debug mode, and a few cases with each way
to wait for MPI, where connect() takes one. Under msrun, with `mindspore` for `mpi`, the ranks are one world and run the
cases that go over mccl; with `fail` for `end`, rank 1 then fails. Each rank writes one line of JSON for a finished case
into RESULTS/<rank>.jsonl; test_ranks.py turns these into one test for each case and world size. It also imports this
module, to know the cases, so MPI and MindSpore are imported where they are used.
"""

from __future__ import annotations

import json
import re
import sys
import traceback
from collections.abc import Iterator, Mapping
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
HCCL_WORLDS = (2, 4)
HCCL_DEBUG_WORLD = 2
# Not among them: those that reduce float64, tell messages apart by tags, or look at lengths and copies.
HCCL_CASES = re.compile(
    r"((all_reduce|reduce_scatter|reduce_scatter_uneven|reduce_scatter_under_way|out_is_filled_and_returned|out_may_overlap_the_input"
    r"|sums_are_the_same_on_every_rank)-(?!float64).*"
    r"|(all_reduce_of_bool|all_gather_under_way|all_gather_uneven|all_to_all_uneven|broadcast_from_every_root"
    r"|ring_of_messages|communicators_by_axis)-.*"
    r"|all_gather_and_all_to_all_of_different_sizes_under_way|sizes_in_any_kind_of_sequence|all_to_all_where_one_rank_has_nothing|sums_of_16_bits_are_rounded_once-.*"
    r"|message_that_is_polled|messages_of_a_pair_in_both_directions|message_to_nobody|split_by_color_and_key"
    r"|subgroup_without_the_others|collectives_of_ranks_in_another_order|axes_used_by_some_ranks_only"
    r"|one_group_by_different_names|groups_made_in_different_orders)"
)


def run(results: Path, backend: Backend, ending: str) -> None:
    whole = connect(backend, debug=False)
    with abort_on_error(whole):
        with (results / f"{whole.rank}.jsonl").open("w") as lines:
            for name, world, failures in over_mpi(whole) if backend == "mpi" else over_mccl(whole):
                lines.write(json.dumps({"case": name, "world": world, "failures": failures}) + "\n")
                lines.flush()
        if ending == "fail":
            fail_on_rank_1(whole)


def over_mpi(whole: Communicator) -> Iterator[tuple[str, int, dict[str, str]]]:
    import hccl_over_mpi
    from mpi4py import MPI

    for world in WORLDS:
        modes = in_each_mode(whole.split(whole.rank // world))
        hccl = hccl_over_mpi.over(MPI.COMM_WORLD.Split(whole.rank // world))
        for name, case in CASES.items():
            if world in case.worlds:
                communicators: dict[str, Communicator] = {mode: modes[mode] for mode in case.modes if mode in modes}
                if world in HCCL_WORLDS and HCCL_CASES.fullmatch(name):
                    communicators["hccl"] = hccl
                if world == HCCL_DEBUG_WORLD and case.modes == ("debug",):
                    communicators["hccl in debug mode"] = CheckedCommunicator.over(hccl, 60.0)
                yield name, world, failures(case, communicators)


def over_mccl(whole: Communicator) -> Iterator[tuple[str, int, dict[str, str]]]:
    for name, case in CASES.items():
        if whole.size in case.mccl:
            yield name, whole.size, failures(case, {"mccl": whole})


def failures(case: Case, communicators: Mapping[str, Communicator]) -> dict[str, str]:
    failed = {}
    for name, communicator in communicators.items():
        try:
            case.check(communicator)
        except Exception:
            failed[name] = traceback.format_exc()
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
