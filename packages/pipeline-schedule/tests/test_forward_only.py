"""Schedules without backwards: what passes where, how long that takes, what is refused, and running one."""

from __future__ import annotations

import queue
import re
import threading
from typing import Any

import pytest
from attrs import evolve
from pipeline_schedule import (
    Action,
    Callbacks,
    Executor,
    Kind,
    Schedule,
    find_problems,
    forward_only,
    gpipe,
    loop_placement,
    overlap_p2p,
    validate,
    vee_placement,
)
from pipeline_schedule.replay import Replay

PLACEMENTS = [loop_placement(1, 1), loop_placement(4, 1), loop_placement(3, 2), vee_placement(4), (0, 0, 1, 2, 1, 0)]


def turns(schedule: Schedule) -> Any:
    """How long a schedule takes where a forward takes 1 and a transfer 0."""
    replay = Replay(schedule, compute_time=lambda step: 1, transfer_time=lambda send: 0)
    replay.run()
    return max(rank.clock for rank in replay.ranks)


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("microbatches", [1, 2, 7])
def test_every_micro_batch_passes_every_stage_and_nothing_is_kept(
    placement: tuple[int, ...], microbatches: int
) -> None:
    schedule = forward_only(placement, microbatches)
    assert validate(schedule, forward_only=True) == (0,) * schedule.num_ranks
    forwards = [step for program in schedule.programs for step in program if step.kind is Kind.FORWARD]
    assert sorted(forwards) == [
        Action(Kind.FORWARD, stage, number) for stage in range(len(placement)) for number in range(microbatches)
    ]


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
@pytest.mark.parametrize("rounds", [1, 3])
def test_no_rank_waits_longer_than_it_must(ranks: int, rounds: int) -> None:
    microbatches = rounds * ranks
    for chunks in (1, 2, 3):
        assert turns(forward_only(loop_placement(ranks, chunks), microbatches)) == chunks * microbatches + ranks - 1
    assert turns(forward_only(vee_placement(ranks), microbatches)) == 2 * microbatches + 2 * (ranks - 1)


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_ranks_compute_what_one_would(placement: tuple[int, ...]) -> None:
    schedule = forward_only(placement, 3)
    ranks = range(schedule.num_ranks)
    lines: dict[tuple[int, int], queue.Queue[Any]] = {(a, b): queue.Queue() for a in ranks for b in ranks}
    outputs: dict[int, Any] = {}
    callbacks = Callbacks(
        forward=lambda stage, number, x: ((number,) if x is None else x) + (f"stage {stage}",),
        send=lambda message, value: lines[message.sender, message.receiver].put(value),
        recv=lambda message: lines[message.sender, message.receiver].get(timeout=120),
    )
    threads = [
        threading.Thread(target=lambda rank=rank: outputs.update(Executor(schedule, rank, callbacks).run()))
        for rank in ranks
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert outputs == {m: (m, *(f"stage {stage}" for stage in range(len(placement)))) for m in range(3)}


def test_what_is_no_forward_only_schedule_is_named() -> None:
    schedule = forward_only((0, 1), 2)
    assert any("never does backward(stage 0, micro-batch 0)" in str(problem) for problem in find_problems(schedule))
    trained = [str(problem) for problem in find_problems(gpipe(2, 1), forward_only=True)]
    assert (
        "backward(stage 0, micro-batch 0) is step 3 of rank 0, but with forward_only nothing goes backward" in trained
    )
    without_last = evolve(schedule, programs=[schedule.programs[0], schedule.programs[1][:-1]])
    missing = find_problems(without_last, forward_only=True)
    assert [str(problem) for problem in missing] == ["rank 1 never does forward(stage 1, micro-batch 1)"]


@pytest.mark.parametrize(
    ("placement", "microbatches", "said"),
    [((0, 1), 0, "microbatches = 0"), ((), 1, "placement ()"), ((0, 2), 1, "placement (0, 2)"), ((1,), 1, "(1,)")],
)
def test_what_cannot_be_is_refused(placement: tuple[int, ...], microbatches: int, said: str) -> None:
    with pytest.raises(ValueError, match=re.escape(said)):
        forward_only(placement, microbatches)


def test_transfers_do_not_overlap() -> None:
    with pytest.raises(ValueError, match="no backwards"):
        overlap_p2p(forward_only((0, 1), 2))
