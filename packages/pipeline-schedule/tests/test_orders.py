"""What each generator makes: orders and memory against a peer library, published figures, and bad numbers."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path

import pytest
from pipeline_schedule import (
    SCHEDULE_NAMES,
    Action,
    Kind,
    Schedule,
    ScheduleError,
    add_communication,
    find_problems,
    generate,
    gpipe,
    interleaved_1f1b,
    loop_placement,
    one_f_one_b,
    peak_activations,
    simulate,
    validate,
    vee_placement,
    zb_h1,
    zb_v,
)

PEER = json.loads((Path(__file__).parent / "data" / "peer_orders.json").read_text())
SHORT = {Kind.FORWARD: "F", Kind.BACKWARD: "B", Kind.BACKWARD_INPUT: "I", Kind.BACKWARD_WEIGHT: "W"}
PEER_KINDS = {
    "F": Kind.FORWARD,
    "B": Kind.BACKWARD,
    "FS": Kind.SEND_ACTIVATION,
    "FR": Kind.RECV_ACTIVATION,
    "BS": Kind.SEND_GRADIENT,
    "BR": Kind.RECV_GRADIENT,
}


def sizes(case: str) -> tuple[int, int, int]:
    found = re.fullmatch(r"pp(\d+)\.v(\d+)\.mb(\d+)", case)
    assert found is not None
    stages, chunks, microbatches = map(int, found.groups())
    return stages, chunks, microbatches


def computations(schedule: Schedule, rank: int) -> list[Action]:
    return [step for step in schedule.programs[rank] if isinstance(step, Action) and step.kind in SHORT]


def order(schedule: Schedule, rank: int) -> str:
    """Kind and micro-batch of what a rank computes."""
    return " ".join(f"{SHORT[action.kind]}{action.microbatch}" for action in computations(schedule, rank))


@pytest.mark.parametrize(
    ("name", "case"), [(name, case) for name, cases in PEER["schedules"].items() for case in cases]
)
def test_computes_in_the_peer_librarys_order(name: str, case: str) -> None:
    stages, chunks, microbatches = sizes(case)
    schedule = generate(name, stages, microbatches, chunks)
    lines = (
        " ".join(f"{SHORT[action.kind]}:{action.stage}:{action.microbatch}" for action in computations(schedule, rank))
        for rank in range(stages)
    )
    expected = PEER["schedules"][name][case]
    assert hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16] == expected["sha256"]
    assert list(validate(schedule)) == expected["peak"]


def peer_schedule(name: str, case: str) -> Schedule:
    stages, chunks, microbatches = sizes(case)
    programs = []
    for text in PEER["programs"][name][case]:
        fields = (step.split(":") for step in text.split())
        programs.append([Action(PEER_KINDS[kind], int(stage), int(microbatch)) for kind, stage, microbatch in fields])
    return Schedule("peer", loop_placement(stages, chunks), microbatches, programs)


@pytest.mark.parametrize(("name", "case"), [(name, case) for name, cases in PEER["programs"].items() for case in cases])
def test_accepts_the_peers_transfers_where_they_are_right(name: str, case: str) -> None:
    peer = peer_schedule(name, case)
    if "stuck" not in PEER["schedules"][name][case]:
        assert list(validate(peer)) == PEER["schedules"][name][case]["peak"]
        stages, chunks, microbatches = sizes(case)
        assert simulate(peer).makespan == simulate(generate(name, stages, microbatches, chunks)).makespan
        return
    with pytest.raises(ScheduleError, match=r"before recv_gradient\(stage 3, micro-batch 0\) .*, which it needs"):
        validate(peer)
    faults = {(problem.rank, problem.step) for problem in find_problems(peer)}
    assert faults == {(3, Action(Kind.BACKWARD, 3, m)) for m in range(peer.microbatches)}


def test_small_orders_in_full() -> None:
    assert [order(gpipe(2, 3), rank) for rank in (0, 1)] == ["F0 F1 F2 B0 B1 B2"] * 2
    assert order(one_f_one_b(3, 4), 0) == "F0 F1 F2 B0 F3 B1 B2 B3"
    assert order(one_f_one_b(3, 4), 2) == "F0 B0 F1 B1 F2 B2 F3 B3"
    assert order(one_f_one_b(3, 1), 0) == "F0 B0"


def test_zb_h1_is_the_papers_figure() -> None:
    """Qi et al. 2023, figure 3 (upper), 4 stages and 8 micro-batches: first and last device."""
    schedule = zb_h1(4, 8)
    assert order(schedule, 0) == "F0 F1 F2 F3 I0 W0 F4 I1 W1 F5 I2 W2 F6 I3 W3 F7 I4 W4 I5 W5 I6 W6 I7 W7"
    assert order(schedule, 3) == "F0 I0 F1 I1 F2 I2 F3 I3 W0 F4 I4 W1 F5 I5 W2 F6 I6 W3 F7 I7 W4 W5 W6 W7"


@pytest.mark.parametrize("stages", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("microbatches", [1, 2, 5, 9, 20])
def test_memory_of_each_schedule(stages: int, microbatches: int) -> None:
    ranks = range(stages)
    assert peak_activations(gpipe(stages, microbatches)) == (microbatches,) * stages
    assert peak_activations(one_f_one_b(stages, microbatches)) == tuple(min(stages - r, microbatches) for r in ranks)
    assert peak_activations(zb_h1(stages, microbatches)) == (min(stages, microbatches),) * stages
    peaks = peak_activations(zb_v(stages, microbatches))
    assert max(peaks) <= min(2 * stages, 2 * microbatches)
    if microbatches >= 2 * stages - 1:
        assert peaks == (2 * stages,) * stages


@pytest.mark.parametrize(("stages", "chunks", "microbatches"), [(4, 2, 8), (4, 3, 11), (8, 2, 3), (2, 4, 1), (1, 3, 5)])
def test_forwards_before_the_first_backward(stages: int, chunks: int, microbatches: int) -> None:
    """W = min((v - 1) n + 2 (p - 1 - r), m v), n being the first round: p micro-batches plus its part of the rest."""
    number = max(1, microbatches // stages)
    first_round = -(-microbatches // number)
    schedule = interleaved_1f1b(stages, chunks, microbatches)
    for rank in range(stages):
        warmup = (chunks - 1) * first_round + 2 * (stages - 1 - rank)
        letters = order(schedule, rank).replace(" ", "")
        before = re.sub(r"\d", "", letters).index("B")
        assert before == min(warmup + 1, microbatches * chunks) == validate(schedule)[rank]


def test_placements() -> None:
    assert interleaved_1f1b(3, 2, 4).placement == (0, 1, 2, 0, 1, 2) == loop_placement(3, 2)
    vee = zb_v(3, 4)
    assert vee.placement == (0, 1, 2, 2, 1, 0) == vee_placement(3)
    assert vee.stages == ((0, 5), (1, 4), (2, 3))
    assert [vee.chunk(stage) for stage in range(6)] == [0, 0, 0, 1, 1, 1]
    assert (vee.num_ranks, vee.num_stages, vee.num_chunks) == (3, 6, 2)


def test_neighbouring_stages_on_one_rank_send_nothing() -> None:
    turning_point = {2, 3}
    sent = {
        (step.stage, step.kind)
        for program in zb_v(3, 4).programs
        for step in program
        if isinstance(step, Action) and step.kind not in SHORT
    }
    assert (2, Kind.SEND_ACTIVATION) not in sent
    assert (3, Kind.SEND_GRADIENT) not in sent
    assert {kind for stage, kind in sent if stage in turning_point} == {
        Kind.RECV_ACTIVATION,
        Kind.SEND_GRADIENT,
        Kind.SEND_ACTIVATION,
        Kind.RECV_GRADIENT,
    }


def test_one_rank_needs_no_transfers() -> None:
    for name in SCHEDULE_NAMES:
        schedule = generate(name, 1, 3)
        assert len(schedule.programs[0]) == len(computations(schedule, 0))


def test_generate_by_name() -> None:
    assert generate("zbv", 3, 5) == generate("zbv", 3, 5, 2) == zb_v(3, 5)
    assert generate(None, 3, 5) == generate(None, 3, 5, 1) == one_f_one_b(3, 5)
    assert generate(None, 3, 5, 2) == interleaved_1f1b(3, 2, 5)
    assert generate("interleaved", 3, 5) == interleaved_1f1b(3, 1, 5)


def test_transfers_for_an_order_of_ones_own() -> None:
    """Two stages, the second one's backward as late as can be."""
    orders = [
        [
            Action(Kind.FORWARD, 0, 0),
            Action(Kind.FORWARD, 0, 1),
            Action(Kind.BACKWARD, 0, 1),
            Action(Kind.BACKWARD, 0, 0),
        ],
        [
            Action(Kind.FORWARD, 1, 0),
            Action(Kind.FORWARD, 1, 1),
            Action(Kind.BACKWARD, 1, 1),
            Action(Kind.BACKWARD, 1, 0),
        ],
    ]
    schedule = Schedule("last first", (0, 1), 2, add_communication(orders, (0, 1), 2))
    assert validate(schedule) == (2, 2)
    assert [str(step) for step in schedule.programs[1][-4:]] == [
        "backward(stage 1, micro-batch 1)",
        "send_gradient(stage 1, micro-batch 1)",
        "backward(stage 1, micro-batch 0)",
        "send_gradient(stage 1, micro-batch 0)",
    ]


def test_an_order_that_cannot_be_done() -> None:
    orders = [
        [Action(Kind.BACKWARD, 0, 0), Action(Kind.FORWARD, 0, 0)],
        [Action(Kind.FORWARD, 1, 0), Action(Kind.BACKWARD, 1, 0)],
    ]
    with pytest.raises(
        ValueError, match=r"rank 0 at backward\(stage 0, .* rank 1 at forward\(stage 1, micro-batch 0\)"
    ):
        add_communication(orders, (0, 1), 1)


@pytest.mark.parametrize("make", [gpipe, one_f_one_b, zb_h1, zb_v, lambda p, m: interleaved_1f1b(p, 2, m)])
def test_bad_numbers(make: object) -> None:
    assert callable(make)
    with pytest.raises(ValueError, match="stages = 0 must be at least 1: it is the number of pipeline stages"):
        make(0, 4)
    with pytest.raises(ValueError, match="microbatches = -2 must be at least 1: it is the number of micro-batches"):
        make(4, -2)
    with pytest.raises(TypeError, match=r"microbatches = 2\.0 must be an int"):
        make(4, 2.0)
    with pytest.raises(TypeError, match="stages = True must be an int"):
        make(True, 2)


def test_bad_names_and_chunks() -> None:
    with pytest.raises(ValueError, match="no schedule 'dualpipe': choose one of gpipe, 1f1b, interleaved, zbh1, zbv"):
        generate("dualpipe", 4, 8)
    with pytest.raises(ValueError, match=r"chunks = 3 does not fit the schedule zbv, which has 2 .* interleaved"):
        generate("zbv", 4, 8, 3)
    with pytest.raises(ValueError, match="chunks = 0 must be at least 1"):
        generate(None, 4, 8, 0)
    with pytest.raises(ValueError, match="chunks = 0 must be at least 1"):
        interleaved_1f1b(4, 0, 8)
