"""What `validate` says of wrong schedules made by hand: the rule, the action at fault, and circles of waiting ranks."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from attrs import evolve
from pipeline_schedule import (
    Action,
    Kind,
    Overlap,
    Schedule,
    ScheduleError,
    Step,
    find_problems,
    generate,
    one_f_one_b,
    overlap_p2p,
    simulate,
    validate,
    zb_h1,
    zb_v,
)
from pipeline_schedule.actions import flat

NAMES = {
    "F": Kind.FORWARD,
    "B": Kind.BACKWARD,
    "I": Kind.BACKWARD_INPUT,
    "W": Kind.BACKWARD_WEIGHT,
    "SA": Kind.SEND_ACTIVATION,
    "RA": Kind.RECV_ACTIVATION,
    "SG": Kind.SEND_GRADIENT,
    "RG": Kind.RECV_GRADIENT,
    "waitSA": Kind.WAIT_SEND_ACTIVATION,
}


def steps(text: str) -> list[Step]:
    """`F0.1` is the forward of stage 0, micro-batch 1."""
    found: list[Step] = []
    for word in text.split():
        name = word.rstrip("0123456789.")
        stage, microbatch = word.removeprefix(name).split(".")
        found.append(Action(NAMES[name], int(stage), int(microbatch)))
    return found


def schedule(*programs: str, placement: tuple[int, ...] | None = None, microbatches: int = 1) -> Schedule:
    place = tuple(range(len(programs))) if placement is None else placement
    return Schedule("by hand", place, microbatches, [steps(program) for program in programs])


GOOD = ("F0.0 SA0.0 RG0.0 B0.0", "RA1.0 F1.0 B1.0 SG1.0")


def messages(wrong: Schedule) -> list[str]:
    return [problem.message for problem in find_problems(wrong)]


def test_good() -> None:
    assert find_problems(schedule(*GOOD)) == []
    assert validate(schedule(*GOOD)) == (1, 1)
    assert validate(schedule("F0.0 F0.1 B0.1 B0.0", microbatches=2)) == (2,)


@pytest.mark.parametrize(
    ("first", "second", "message"),
    [
        (
            "SA0.0 F0.0 RG0.0 B0.0",
            GOOD[1],
            (
                "send_activation(stage 0, micro-batch 0) is step 0 of rank 0, before forward(stage 0, micro-batch 0) "
                "(step 1), which it needs"
            ),
        ),
        (
            "F0.0 SA0.0 B0.0 RG0.0",
            GOOD[1],
            (
                "backward(stage 0, micro-batch 0) is step 2 of rank 0, before recv_gradient(stage 0, micro-batch 0) "
                "(step 3), which it needs"
            ),
        ),
        (
            GOOD[0],
            "RA1.0 B1.0 F1.0 SG1.0",
            (
                "backward(stage 1, micro-batch 0) is step 1 of rank 1, before forward(stage 1, micro-batch 0) (step 2)"
                ", which it needs"
            ),
        ),
        ("F0.0 SA0.0 RG0.0", GOOD[1], "rank 0 never does backward(stage 0, micro-batch 0)"),
        ("F0.0 RG0.0 B0.0", GOOD[1], "rank 0 never does send_activation(stage 0, micro-batch 0)"),
        (
            "F0.0 F0.0 SA0.0 RG0.0 B0.0",
            GOOD[1],
            "forward(stage 0, micro-batch 0) is step 1 of rank 0, but it already is step 0; each action is done once",
        ),
        (
            "F0.0 SA0.0 RG0.0 B0.0 F1.0",
            "RA1.0 B1.0 SG1.0",
            "forward(stage 1, micro-batch 0) is step 4 of rank 0, but stage 1 is on rank 1",
        ),
        (
            "F0.0 SA0.0 RG0.0 B0.0 F0.3",
            GOOD[1],
            "forward(stage 0, micro-batch 3) is step 4 of rank 0, but the micro-batches are 0 to 0",
        ),
        (
            "F0.0 SA0.0 RG0.0 B0.0 F7.0",
            GOOD[1],
            "forward(stage 7, micro-batch 0) is step 4 of rank 0, but the virtual stages are 0 to 1",
        ),
        (
            GOOD[0],
            "RA1.0 F1.0 SA1.0 B1.0 SG1.0",
            (
                "send_activation(stage 1, micro-batch 0) is step 2 of rank 1, but stage 1 is the last, and there is no "
                "stage 2"
            ),
        ),
        (
            "RA0.0 F0.0 SA0.0 RG0.0 B0.0",
            GOOD[1],
            (
                "recv_activation(stage 0, micro-batch 0) is step 0 of rank 0, but stage 0 is the first, and there is "
                "no stage -1"
            ),
        ),
        (
            "F0.0 SA0.0 waitSA0.0 RG0.0 B0.0",
            GOOD[1],
            (
                "wait_send_activation(stage 0, micro-batch 0) is step 2 of rank 0, but without overlap_p2p transfers "
                "are over when they return, and nothing waits for them"
            ),
        ),
        (
            "F0.0 SA0.0 RG0.0 I0.0",
            GOOD[1],
            (
                "rank 0 never does backward_weight(stage 0, micro-batch 0), but does backward_input(stage 0, "
                "micro-batch 0) (step 3)"
            ),
        ),
        (
            "F0.0 SA0.0 RG0.0 W0.0 I0.0",
            GOOD[1],
            (
                "backward_weight(stage 0, micro-batch 0) is step 3 of rank 0, before backward_input(stage 0, "
                "micro-batch 0) (step 4), which it needs"
            ),
        ),
        (
            "F0.0 SA0.0 RG0.0 B0.0 I0.0 W0.0",
            GOOD[1],
            (
                "rank 0 does backward(stage 0, micro-batch 0) (step 3) and also backward_input(stage 0, micro-batch 0) "
                "(step 4)"
            ),
        ),
    ],
)
def test_one_mistake(first: str, second: str, message: str) -> None:
    assert message in messages(schedule(first, second))


def test_all_problems_are_reported() -> None:
    wrong = schedule("SA0.0 F0.0 RG0.0", "RA1.0 F1.0 B1.0 SG1.0 SG1.0")
    with pytest.raises(ScheduleError) as caught:
        validate(wrong)
    assert len(caught.value.problems) == 3
    assert str(caught.value).count("\n") == 2
    missing = next(problem for problem in caught.value.problems if problem.position is None)
    assert (missing.rank, missing.step) == (0, Action(Kind.BACKWARD, 0, 0))


def test_many_problems_are_cut_short() -> None:
    empty = Schedule("empty", (0,), 30, [[]])
    with pytest.raises(ScheduleError) as caught:
        validate(empty)
    assert len(caught.value.problems) == 60
    assert str(caught.value).endswith("\nand 50 more problems")


def test_stages_on_one_rank_send_nothing_and_hand_over_in_order() -> None:
    assert find_problems(schedule("F0.0 F1.0 B1.0 B0.0", placement=(0, 0))) == []
    sends = messages(schedule("F0.0 SA0.0 F1.0 B1.0 B0.0", placement=(0, 0)))
    assert sends == [
        (
            "send_activation(stage 0, micro-batch 0) is step 1 of rank 0, but stages 0 and 1 are both on rank 0, and "
            "nothing is sent"
        )
    ]
    early = messages(schedule("F1.0 F0.0 B1.0 B0.0", placement=(0, 0)))
    assert early == [
        (
            "forward(stage 1, micro-batch 0) is step 0 of rank 0, before forward(stage 0, micro-batch 0) (step 1), "
            "which it needs"
        )
    ]
    early = messages(schedule("F0.0 F1.0 B0.0 I1.0 W1.0", placement=(0, 0)))
    assert early == [
        (
            "backward(stage 0, micro-batch 0) is step 2 of rank 0, before backward_input(stage 1, micro-batch 0) "
            "(step 3), "
            "which it needs"
        )
    ]


def test_messages_that_cross() -> None:
    wrong = schedule(
        "F0.0 F0.1 SA0.1 SA0.0 RG0.0 B0.0 RG0.1 B0.1", "RA1.0 F1.0 B1.0 RA1.1 SG1.0 F1.1 B1.1 SG1.1", microbatches=2
    )
    assert messages(wrong) == [
        (
            "rank 0 does send_activation(stage 0, micro-batch 1) (step 2) before send_activation(stage 0, "
            "micro-batch 0) (step 3), but rank 1 does recv_activation(stage 1, micro-batch 0) (step 0) before "
            "recv_activation(stage 1, micro-batch 1) (step 3); both ends must have the same order"
        )
    ]


def test_deadlock_of_two_ranks() -> None:
    """Both send first: nothing is wrong with any single order, but no send finds its receive."""
    wrong = schedule(
        "F0.0 SA0.0 F0.1 SA0.1 RG0.0 B0.0 RG0.1 B0.1", "RA1.0 F1.0 B1.0 SG1.0 RA1.1 F1.1 B1.1 SG1.1", microbatches=2
    )
    (problem,) = find_problems(wrong)
    assert problem.message == (
        "deadlock: send_activation(stage 0, micro-batch 1) (rank 0, step 3) waits for recv_activation(stage 1, "
        "micro-batch 1) (rank 1, step 4); send_gradient(stage 1, micro-batch 0) (rank 1, step 3) waits for "
        "recv_gradient(stage 0, micro-batch 0) (rank 0, step 4)"
    )
    assert (problem.rank, problem.position, problem.step) == (0, 3, Action(Kind.SEND_ACTIVATION, 0, 1))
    assert [link.step.rank for link in problem.cycle] == [0, 1]
    assert [link.awaited.rank for link in problem.cycle] == [1, 0]


def test_shortest_of_two_circles() -> None:
    """Four ranks hang; ranks 0 and 1 wait for ranks 2 and 3, which wait for each other."""
    base = one_f_one_b(4, 4)
    programs = [list(program) for program in base.programs]
    send, receive = Action(Kind.SEND_ACTIVATION, 2, 1), Action(Kind.RECV_GRADIENT, 2, 0)
    third = programs[2]
    first, second = third.index(send), third.index(receive)
    assert first < second
    third[first], third[second] = third[second], third[first]
    gradient, activation = Action(Kind.SEND_GRADIENT, 3, 0), Action(Kind.RECV_ACTIVATION, 3, 1)
    fourth = programs[3]
    assert fourth.index(activation) < fourth.index(gradient)
    (problem,) = find_problems(evolve(base, programs=programs))
    assert [link.step.rank for link in problem.cycle] == [2, 3]
    assert [link.step.step for link in problem.cycle] == [receive, activation]
    assert [link.awaited.step for link in problem.cycle] == [gradient, send]


def three_ranks_in_a_ring() -> Schedule:
    """Stages 0 to 3 on ranks 0, 1, 2, 0: rank 0 insists on receiving what it sends for last."""
    return schedule(
        "F0.0 F0.1 SA0.0 RA3.0 F3.0 B3.0 SG3.0 SA0.1 RA3.1 F3.1 B3.1 SG3.1 RG0.0 B0.0 RG0.1 B0.1",
        "RA1.0 F1.0 RA1.1 F1.1 SA1.0 SA1.1 RG1.0 B1.0 SG1.0 RG1.1 B1.1 SG1.1",
        "RA2.0 F2.0 SA2.0 RA2.1 F2.1 SA2.1 RG2.0 B2.0 SG2.0 RG2.1 B2.1 SG2.1",
        placement=(0, 1, 2, 0),
        microbatches=2,
    )


def test_a_circle_through_all_ranks_is_reported_whole() -> None:
    """Rank 0 waits for rank 2, rank 2 for rank 1, and rank 1 for rank 0."""
    (problem,) = find_problems(three_ranks_in_a_ring())
    assert [(link.step.rank, str(link.step.step), str(link.awaited.step)) for link in problem.cycle] == [
        (0, "recv_activation(stage 3, micro-batch 0)", "send_activation(stage 2, micro-batch 0)"),
        (2, "recv_activation(stage 2, micro-batch 0)", "send_activation(stage 1, micro-batch 0)"),
        (1, "recv_activation(stage 1, micro-batch 1)", "send_activation(stage 0, micro-batch 1)"),
    ]


def test_deadlock_of_transfers_done_one_by_one() -> None:
    """With overlap_p2p the ranks go on, but a device that does its transfers in turn still waits."""
    good = overlap_p2p(one_f_one_b(2, 2))
    assert find_problems(good) == []
    programs = [list(program) for program in good.programs]
    receive = Action(Kind.RECV_GRADIENT, 0, 0)
    programs[0].remove(receive)
    programs[0].insert(0, receive)
    (problem,) = find_problems(evolve(good, programs=programs))
    assert problem.message.startswith("deadlock: ")
    assert str(receive) in problem.message


def test_a_wait_that_is_missing() -> None:
    good = overlap_p2p(one_f_one_b(2, 1))
    wait = Action(Kind.WAIT_SEND_GRADIENT, 1, 0)
    programs = [[step for step in program if step != wait] for program in good.programs]
    assert messages(evolve(good, programs=programs)) == [f"rank 1 never does {wait}"]


def test_pairs_that_cannot_overlap() -> None:
    forward, backward = Action(Kind.FORWARD, 0, 0), Action(Kind.BACKWARD, 0, 0)
    assert messages(Schedule("pair", (0,), 1, [[Overlap(backward, forward)]])) == [
        f"{backward} is step 0 of rank 0, beside {forward} (step 0), which it needs"
    ]
    other = Action(Kind.FORWARD, 0, 1), Action(Kind.BACKWARD, 0, 1)
    assert messages(Schedule("pair", (0,), 2, [[Overlap(forward, other[0]), backward, other[1]]])) == [
        f"{forward} beside {other[0]} is step 0 of rank 0, but only a backward and a forward can overlap"
    ]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda good: evolve(good, placement=(0, 1, 5)), "names rank 5, and there are programs for ranks 0 to 2"),
        (lambda good: evolve(good, placement=(0, 1, 1)), "puts no virtual stage on rank 2; each of the 3 ranks must"),
        (lambda good: evolve(good, placement=()), "needs ranks, stages and micro-batches, and has 3, 0 and 2"),
        (lambda good: evolve(good, microbatches=0), "needs ranks, stages and micro-batches, and has 3, 3 and 0"),
    ],
)
def test_schedules_without_sense(change: Callable[[Schedule], Schedule], message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        validate(change(zb_h1(3, 2)))


@pytest.mark.parametrize("step", [("forward", 0, 0), Action("forward", 0, 0), "F0.0"])  # type: ignore[arg-type]
def test_steps_of_a_wrong_type(step: object) -> None:
    good = zb_v(1, 1).programs[0]
    wrong = Schedule("strings", (0, 0), 1, [[step, *good[1:]]])  # type: ignore[list-item]
    assert (
        f"{step} is step 0 of rank 0, but a step must be an Action with a Kind (Kind.FORWARD, not 'forward'), "
        "an Overlap or some Together" in messages(wrong)
    )


# PUB-PP-03: ranks, chunks and micro-batches, fewer than stages or no multiple of them.
AWKWARD_SIZES = {
    "a": (4, 1, 1),
    "b": (4, 1, 2),
    "c": (4, 1, 3),
    "d": (4, 1, 6),
    "e": (2, 2, 3),
    "f": (4, 2, 10),
    "g": (4, 2, 3),
}


@pytest.mark.parametrize("row", AWKWARD_SIZES)
def test_any_number_of_micro_batches_passes_every_stage_once_and_in_order(row: str) -> None:
    """PUB-PP-03, by its invariants; that ranks end and gradients are right, `test_execute.py` finds on threads."""
    ranks, chunks, microbatches = AWKWARD_SIZES[row]
    made = generate(None, ranks, microbatches, chunks)
    assert find_problems(made) == []
    timeline = simulate(made)
    ended = {span.step: (span.start, span.end) for spans in timeline.computations for span in spans}
    every = [(stage, m) for stage in range(ranks * chunks) for m in range(microbatches)]
    assert sorted(ended) == sorted(Action(kind, *at) for kind in (Kind.FORWARD, Kind.BACKWARD) for at in every)
    assert sum(len(spans) for spans in timeline.computations) == 2 * len(every)
    for stage, m in every:
        forward, backward = ended[Action(Kind.FORWARD, stage, m)], ended[Action(Kind.BACKWARD, stage, m)]
        assert forward[1] <= backward[0]
        if stage > 0:
            assert ended[Action(Kind.FORWARD, stage - 1, m)][1] <= forward[0]
            assert backward[1] <= ended[Action(Kind.BACKWARD, stage - 1, m)][0]
    moved = [action.kind for program in made.programs for action in flat(program)]
    assert moved.count(Kind.SEND_ACTIVATION) == moved.count(Kind.RECV_ACTIVATION) == (ranks * chunks - 1) * microbatches
    assert moved.count(Kind.SEND_GRADIENT) == moved.count(Kind.RECV_GRADIENT) == (ranks * chunks - 1) * microbatches
