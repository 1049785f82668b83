"""Transfers that are posted together: exchanges that only work so, and what is refused."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterable
from random import Random
from typing import Any

import pytest
from attrs import evolve
from pipeline_schedule import (
    Action,
    Callbacks,
    Executor,
    Kind,
    Overlap,
    Schedule,
    Step,
    Together,
    find_problems,
    generate,
    gpipe,
    one_f_one_b,
    overlap_b_f,
    overlap_p2p,
    post_together,
    schedule_from_dict,
    schedule_to_dict,
    simulate,
    validate,
)

NAMES = {
    "F": Kind.FORWARD,
    "B": Kind.BACKWARD,
    "SA": Kind.SEND_ACTIVATION,
    "RA": Kind.RECV_ACTIVATION,
    "SG": Kind.SEND_GRADIENT,
    "RG": Kind.RECV_GRADIENT,
}


def steps(text: str) -> list[Step]:
    """`F0.1` is the forward of stage 0, micro-batch 1; in brackets is what is posted together."""
    found: list[Step] = []
    for part in text.replace("[", "|[").replace("]", "|").split("|"):
        actions = []
        for word in part.removeprefix("[").split():
            name = word.rstrip("0123456789.")
            stage, microbatch = word.removeprefix(name).split(".")
            actions.append(Action(NAMES[name], int(stage), int(microbatch)))
        found += [Together(actions)] if part.startswith("[") else actions
    return found


def schedule(*programs: str, microbatches: int, placement: tuple[int, ...] | None = None) -> Schedule:
    place = tuple(range(len(programs))) if placement is None else placement
    return Schedule("by hand", place, microbatches, [steps(program) for program in programs])


# Each rank sends the other one something and receives something: the next activation, and the first gradient.
EXCHANGE = (
    "F0.0 SA0.0 F0.1 [SA0.1 RG0.0] B0.0 RG0.1 B0.1",
    "RA1.0 F1.0 B1.0 [SG1.0 RA1.1] F1.1 B1.1 SG1.1",
)

# Three ranks with two stages each, in a ring: each sends to the next and receives from the one before.
RING = (
    "F0.0 SA0.0 F0.1 SA0.1 F0.2 [SA0.2 RA3.0] F3.0 [SA3.0 RA3.1] F3.1 [SA3.1 RA3.2] F3.2 SA3.2",
    "RA1.0 F1.0 [SA1.0 RA1.1] F1.1 [SA1.1 RA1.2] F1.2 [SA1.2 RA4.0] F4.0 [SA4.0 RA4.1] F4.1 [SA4.1 RA4.2] F4.2 SA4.2",
    "RA2.0 F2.0 [SA2.0 RA2.1] F2.1 [SA2.1 RA2.2] F2.2 [SA2.2 RA5.0] F5.0 RA5.1 F5.1 RA5.2 F5.2",
)
RING_PLACEMENT = (0, 1, 2, 0, 1, 2)


def one_by_one(programs: Iterable[str]) -> list[str]:
    """The same programs with blocking transfers, one after the other in the order of their groups."""
    return [program.replace("[", "").replace("]", "") for program in programs]


def test_a_pair_that_exchanges_works_together_and_not_one_by_one() -> None:
    assert validate(schedule(*EXCHANGE, microbatches=2)) == (2, 1)
    (problem,) = find_problems(schedule(*one_by_one(EXCHANGE), microbatches=2))
    assert [str(link) for link in problem.cycle] == [
        (
            "send_activation(stage 0, micro-batch 1) (rank 0, step 3) waits for "
            "recv_activation(stage 1, micro-batch 1) (rank 1, step 4)"
        ),
        (
            "send_gradient(stage 1, micro-batch 0) (rank 1, step 3) waits for "
            "recv_gradient(stage 0, micro-batch 0) (rank 0, step 4)"
        ),
    ]


def test_one_end_that_posts_together_is_enough() -> None:
    first, second = EXCHANGE
    assert find_problems(schedule(first, *one_by_one([second]), microbatches=2)) == []
    assert find_problems(schedule(*one_by_one([first]), second, microbatches=2)) == []


def test_three_ranks_that_pass_on_in_a_circle() -> None:
    ring = schedule(*RING, microbatches=3, placement=RING_PLACEMENT)
    assert find_problems(ring, forward_only=True) == []
    blocking = schedule(*one_by_one(RING), microbatches=3, placement=RING_PLACEMENT)
    (problem,) = find_problems(blocking, forward_only=True)
    assert problem.message.startswith("deadlock: ")


def test_a_group_whose_partner_never_posts() -> None:
    """Not at all; and only after it has got what comes after the group."""
    lost = schedule(EXCHANGE[0], EXCHANGE[1].replace("[SG1.0 RA1.1]", "RA1.1"), microbatches=2)
    assert [problem.message for problem in find_problems(lost)] == [
        "rank 1 never does send_gradient(stage 1, micro-batch 0)"
    ]
    late = schedule(
        "F0.0 [SA0.0 RG0.0] B0.0 F0.1 SA0.1 RG0.1 B0.1",
        "RA1.0 F1.0 B1.0 RA1.1 F1.1 B1.1 SG1.0 SG1.1",
        microbatches=2,
    )
    (problem,) = find_problems(late)
    assert [str(link) for link in problem.cycle] == [
        (
            "together(send_activation(stage 0, micro-batch 0), recv_gradient(stage 0, micro-batch 0)) (rank 0, step 1) "
            "waits for send_gradient(stage 1, micro-batch 0) (rank 1, step 6)"
        ),
        (
            "recv_activation(stage 1, micro-batch 1) (rank 1, step 3) waits for "
            "send_activation(stage 0, micro-batch 1) (rank 0, step 4)"
        ),
    ]


@pytest.mark.parametrize(
    ("group", "message"),
    [
        (Together([]), "holds nothing: it must hold sends and receives"),
        (
            Together([Together(steps("SA0.1 RG0.0"))]),  # type: ignore[list-item]
            "holds together(send_activation(stage 0, micro-batch 1), recv_gradient(stage 0, micro-batch 0)): it must",
        ),
        (
            Together([*steps("SA0.1 RG0.0 F0.1")]),  # type: ignore[list-item]
            "holds forward(stage 0, micro-batch 1): it must hold sends and receives",
        ),
        (
            Together([*steps("SA0.1 RG0.0"), Action(Kind.WAIT_SEND_ACTIVATION, 0, 1)]),  # type: ignore[list-item]
            "holds wait_send_activation(stage 0, micro-batch 1): it must",
        ),
        (
            Together([Overlap(*steps("B0.0 F0.1"))]),  # type: ignore[arg-type,list-item]
            "holds backward(stage 0, micro-batch 0) beside forward(stage 0, micro-batch 1): it must",
        ),
        (Together(["SA0.1"]), "holds SA0.1: it must"),  # type: ignore[list-item]
    ],
)
def test_groups_of_anything_but_transfers_are_refused(group: Together, message: str) -> None:
    good = schedule(*EXCHANGE, microbatches=2)
    program = list(good.programs[0])
    program[3] = group
    problems = find_problems(evolve(good, programs=[program, good.programs[1]]))
    assert f"the group at step 3 of rank 0 {message}" in problems[0].message


def test_a_transfer_that_stands_twice_is_refused() -> None:
    twice = schedule(EXCHANGE[0].replace("[SA0.1 RG0.0]", "[SA0.1 RG0.0 RG0.0]"), EXCHANGE[1], microbatches=2)
    assert [problem.message for problem in find_problems(twice)] == [
        "recv_gradient(stage 0, micro-batch 0) is step 3 of rank 0, but it already is step 3; each action is done once"
    ]


def test_messages_that_cross_in_groups_are_refused() -> None:
    """Nothing blocks, but transports without tags would hand over the one for the other."""
    crossed = schedule(
        "F0.0 F0.1 [SA0.0 SA0.1] RG0.0 B0.0 RG0.1 B0.1",
        "[RA1.1 RA1.0] F1.0 B1.0 SG1.0 F1.1 B1.1 SG1.1",
        microbatches=2,
    )
    (problem,) = find_problems(crossed)
    assert "both ends must have the same order" in problem.message
    straight = evolve(crossed, programs=[crossed.programs[0], [*steps("[RA1.0 RA1.1]"), *crossed.programs[1][1:]]])
    assert find_problems(straight) == []


def naively_stuck(of: Schedule) -> bool:
    """Whether some rank never ends: each posts its step, and goes on when all of it has been posted on both ends."""
    position = [0] * of.num_ranks
    posted: set[tuple[str, int, int]] = set()
    while True:
        before = list(position)
        for rank, program in enumerate(of.programs):
            while position[rank] < len(program):
                step = program[position[rank]]
                group = step.transfers if isinstance(step, Together) else (step,)
                transfers = [(action.kind, action.stage, action.microbatch) for action in group]  # type: ignore[union-attr]
                posted |= set(transfers)
                if not all(
                    _other(*transfer) in posted for transfer in transfers if transfer[0][:5] in ("send_", "recv_")
                ):
                    break
                position[rank] += 1
        if position == before:
            return any(at < len(program) for at, program in zip(position, of.programs, strict=True))


def _other(kind: str, stage: int, microbatch: int) -> tuple[str, int, int]:
    way, _, what = kind.partition("_")
    step = 1 if (way == "send") == (what == "activation") else -1
    return f"{'recv' if way == 'send' else 'send'}_{what}", stage + step, microbatch


def shaken(made: Schedule, random: Random) -> Schedule:
    """Neighbouring transfers of each rank in another order, at random in groups."""
    programs = []
    for program in post_together(made).programs:
        changed: list[Step] = []
        for step in program:
            if not isinstance(step, Together):
                changed.append(step)
                continue
            transfers = random.sample(step.transfers, len(step.transfers))
            while transfers:
                size = random.randint(1, len(transfers))
                changed.append(Together(transfers[:size]))
                transfers = transfers[size:]
        programs.append(changed)
    return evolve(made, programs=programs)


def test_deadlocks_are_those_of_a_naive_run() -> None:
    random = Random(0)
    stuck = 0
    for number in range(300):
        made = generate(
            random.choice(["1f1b", "interleaved", "zbh1", "zbv"]), random.randint(2, 4), random.randint(2, 6)
        )
        tried = shaken(made, random)
        problems = find_problems(tried)
        if any("same order" in problem.message for problem in problems):
            continue
        deadlocks = [problem for problem in problems if problem.message.startswith("deadlock: ")]
        assert problems == deadlocks, number
        assert bool(deadlocks) == naively_stuck(tried), number
        stuck += bool(deadlocks)
        for problem in deadlocks:  # each step waits for one that comes after the next
            for link, after in zip(problem.cycle, (*problem.cycle[1:], problem.cycle[0]), strict=True):
                assert link.awaited.rank == after.step.rank
                assert link.awaited.position > after.step.position
    assert 20 < stuck < 280


def test_transfers_between_computations_can_be_posted_together() -> None:
    """The next activation goes while the gradient comes: what Megatron calls send_forward_recv_backward."""
    grouped = post_together(one_f_one_b(2, 3))
    assert grouped.programs[0][3] == Together(steps("SA0.1 RG0.0")) or grouped.programs[0][3] == Together(
        steps("RG0.0 SA0.1")
    )
    assert not any(
        isinstance(one, Together) and isinstance(other, Together)
        for program in grouped.programs
        for one, other in itertools.pairwise(program)
    )
    assert post_together(gpipe(1, 2)).programs == gpipe(1, 2).programs


def test_a_group_is_over_when_its_last_transfer_is() -> None:
    """Both begin at once: with transfers of 1 the exchange takes 1, and one by one 2."""
    from pipeline_schedule import Costs

    costs = Costs(forward=1, backward_input=1, backward_weight=1, communication=1)
    timeline = simulate(schedule(*EXCHANGE, microbatches=2), costs)
    times = {str(span.step): (span.start, span.end) for span in timeline.transfers}
    # Rank 0: forwards until 1, transfer until 2, forward until 3. Rank 1: forward until 3, backward until 5.
    assert times["send_activation(stage 0, micro-batch 1)"] == (5, 6)
    assert times["send_gradient(stage 1, micro-batch 0)"] == (5, 6)
    in_turn = EXCHANGE[1].replace("[SG1.0 RA1.1]", "RA1.1 SG1.0")
    apart = simulate(schedule(*one_by_one([EXCHANGE[0]]), in_turn, microbatches=2), costs)
    assert apart.makespan == timeline.makespan + 1


def test_json_keeps_groups() -> None:
    written = schedule_to_dict(schedule(*EXCHANGE, microbatches=2))
    assert written["programs"][0][3] == {"together": [["send_activation", 0, 1], ["recv_gradient", 0, 0]]}
    assert schedule_from_dict(written) == schedule(*EXCHANGE, microbatches=2)


@pytest.mark.parametrize(
    "step",
    [
        {"together": [["forward"]]},
        {"together": [[["backward", 0, 0], ["forward", 0, 1]]]},
        {"together": [{"together": [["send_activation", 0, 0]]}]},
        {"together": "all"},
        {"apart": []},
        {"together": [], "and": 1},
    ],
)
def test_other_dictionaries_are_no_steps(step: object) -> None:
    written = schedule_to_dict(schedule(*EXCHANGE, microbatches=2))
    written["programs"][0][3] = step
    with pytest.raises(ValueError, match=r'^step 3 of rank 0 is .*; a step is .*, or {"together": \[step, ...\]}$'):
        schedule_from_dict(written)


def test_the_executor_posts_all_of_a_group_before_it_waits() -> None:
    """Ranks whose receives need no sends before them would not notice: so the order of calls is looked at."""
    log: list[str] = []

    class Posted:
        def __init__(self, name: str) -> None:
            self.name = name

        def wait(self) -> float:
            log.append(f"wait {self.name}")
            return 1.0

    def start(name: str, *message: Any) -> Posted:
        log.append(f"start {name}")
        return Posted(name)

    callbacks = Callbacks(
        forward=lambda *_: 1.0,
        backward=lambda *_: 1.0,
        send=lambda *_: log.append("send"),
        recv=lambda *_: 1.0,
        isend=lambda message, value: start(f"send {message.microbatch}"),
        irecv=lambda message: start(f"receive {message.microbatch}"),
    )
    Executor(schedule(*EXCHANGE, microbatches=2), 0, callbacks).run()
    assert log == ["send", "start send 1", "start receive 0", "wait send 1", "wait receive 0"]
    with pytest.raises(ValueError, match=r"by hand has together\(.*\) on rank 0: it needs the callback isend$"):
        Executor(schedule(*EXCHANGE, microbatches=2), 0, evolve(callbacks, isend=None))


def test_the_watchdog_names_all_that_a_group_waits_for() -> None:
    reported = threading.Event()
    reports: list[str] = []

    def on_stall(report: str) -> None:
        if "together" in report:
            reports.append(report)
            reported.set()

    class Waiting:
        def wait(self) -> float:
            assert reported.wait(120)
            return 1.0

    callbacks = Callbacks(
        forward=lambda *_: 1.0,
        backward=lambda *_: 1.0,
        send=lambda *_: None,
        recv=lambda *_: 1.0,
        isend=lambda *_: Waiting(),
        irecv=lambda *_: Waiting(),
    )
    Executor(schedule(*EXCHANGE, microbatches=2), 0, callbacks, watchdog_seconds=0.05, on_stall=on_stall).run()
    assert reports[0].endswith(
        "it waits for recv_activation(stage 1, micro-batch 1), step 3 of rank 1 and "
        "send_gradient(stage 1, micro-batch 0), step 3 of rank 1"
    )


def test_transformations_in_the_wrong_order_are_refused() -> None:
    with pytest.raises(ValueError, match="posts transfers together; use overlap_p2p first, then post_together"):
        overlap_p2p(post_together(one_f_one_b(2, 3)))
    with pytest.raises(ValueError, match="posts transfers together; use overlap_b_f first, then post_together"):
        overlap_b_f(post_together(one_f_one_b(2, 3)))
