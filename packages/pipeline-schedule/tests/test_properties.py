"""What holds for schedules of any size: they are valid, keep their order, and take the time of a naive model."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pipeline_schedule import (
    Action,
    Costs,
    Kind,
    Overlap,
    Schedule,
    Step,
    Together,
    generate,
    overlap_b_f,
    overlap_p2p,
    post_together,
    schedule_from_dict,
    schedule_to_dict,
    simulate,
    validate,
)

COMPUTE = (Kind.FORWARD, Kind.BACKWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT)
VARIANTS: list[Callable[[Schedule], Schedule]] = [
    lambda schedule: schedule,
    overlap_p2p,
    overlap_b_f,
    lambda schedule: overlap_p2p(overlap_b_f(schedule)),
    post_together,
    lambda schedule: post_together(overlap_p2p(schedule)),
]


@st.composite
def schedules(draw: st.DrawFn, max_stages: int = 8, max_chunks: int = 4, max_microbatches: int = 33) -> Schedule:
    name = draw(st.sampled_from(["gpipe", "1f1b", "interleaved", "zbh1", "zbv"]))
    chunks = draw(st.integers(1, max_chunks)) if name == "interleaved" else None
    schedule = generate(name, draw(st.integers(1, max_stages)), draw(st.integers(1, max_microbatches)), chunks)
    return draw(st.sampled_from(VARIANTS))(schedule)


def actions(program: tuple[Step, ...]) -> Iterator[Action]:
    for step in program:
        if isinstance(step, Together):
            yield from step.transfers
        else:
            yield from (step,) if isinstance(step, Action) else (step.backward, step.forward)


@settings(max_examples=150, deadline=None)
@given(schedules())
def test_every_schedule_is_valid(schedule: Schedule) -> None:
    peaks = validate(schedule)
    microbatches = schedule.microbatches
    assert all(1 <= peak <= microbatches * len(held) for peak, held in zip(peaks, schedule.stages, strict=True))
    done = [action for program in schedule.programs for action in actions(program)]
    assert len(done) == len(set(done))
    forwards = {action for action in done if action.kind is Kind.FORWARD}
    assert len(forwards) == schedule.num_stages * microbatches


@settings(max_examples=60, deadline=None)
@given(schedules(max_microbatches=12))
def test_json_round_trip(schedule: Schedule) -> None:
    assert schedule_from_dict(json.loads(json.dumps(schedule_to_dict(schedule)))) == schedule


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(["gpipe", "1f1b", "interleaved", "zbh1", "zbv"]), st.integers(1, 8), st.integers(1, 17))
def test_overlap_p2p_keeps_the_order_of_computations_and_of_transfers(
    name: str, stages: int, microbatches: int
) -> None:
    before = generate(name, stages, microbatches)
    after = overlap_p2p(before)
    for program, changed in zip(before.programs, after.programs, strict=True):
        for computes in (True, False):
            old = [step for step in actions(program) if (step.kind in COMPUTE) == computes]
            new = [step for step in actions(changed) if (step.kind in COMPUTE) == computes and "wait" not in step.kind]
            assert old == new
        waits = [action for action in actions(changed) if "wait" in action.kind]
        assert len(waits) == sum(action.kind not in COMPUTE for action in actions(program))


def naive_makespan(schedule: Schedule, forward: Fraction, half: Fraction, transfer: Fraction) -> Fraction:
    """The earliest times, found by repeating until nothing changes: everything ends after what must be before it."""
    length = {Kind.FORWARD: forward, Kind.BACKWARD: 2 * half, Kind.BACKWARD_INPUT: half, Kind.BACKWARD_WEIGHT: half}
    # For each transfer (what is moved, the stage it leaves, micro-batch), when each of its ranks is ready for it.
    ready: dict[tuple[str, int, int], dict[int, Fraction]] = {}
    finish = Fraction(0)

    def ends_of(action: Action) -> dict[int, Fraction]:
        what = "activation" if "activation" in action.kind else "gradient"
        from_next = 1 if what == "gradient" else -1
        leaves = action.stage + from_next if "recv" in action.kind else action.stage
        return ready.setdefault((what, leaves, action.microbatch), {})

    def posted(group: Sequence[Action], rank: int, now: Fraction, before: Fraction) -> tuple[Fraction, Fraction]:
        """When a rank goes on and when its transfers are over, after a group of them, which begin beside each other."""
        for action in group:
            ends_of(action)[rank] = max(now, before)
        over = max(max(ends_of(action).values()) + transfer for action in group)
        return now if schedule.overlap_p2p else max(now, over), over

    before = ""
    while before != (before := repr((ready, finish))):
        for rank, program in enumerate(schedule.programs):
            now = last_transfer = Fraction(0)
            for step in program:
                if isinstance(step, Together):
                    now, last_transfer = posted(step.transfers, rank, now, last_transfer)
                elif isinstance(step, Overlap):
                    now += length[step.backward.kind] + length[step.forward.kind]
                elif step.kind in COMPUTE:
                    now += length[step.kind]
                elif "wait" in step.kind:
                    now = max(now, max(ends_of(step).values()) + transfer)
                else:
                    now, last_transfer = posted([step], rank, now, last_transfer)
            finish = max(finish, now, last_transfer)
    return finish


TIMES = st.fractions(Fraction(1, 4), 3, max_denominator=4)


@settings(max_examples=60, deadline=None)
@given(schedules(4, 2, 5), TIMES, TIMES, st.sampled_from([Fraction(0), Fraction(1, 3), Fraction(2)]))
def test_times_of_a_naive_model(schedule: Schedule, forward: Fraction, half: Fraction, transfer: Fraction) -> None:
    costs = Costs(forward=forward, backward_input=half, backward_weight=half, communication=transfer)
    timeline = simulate(schedule, costs)
    assert timeline.makespan == naive_makespan(schedule, forward, half, transfer)


@pytest.mark.parametrize("overlapping", [False, True])
@settings(max_examples=40, deadline=None)
@given(st.integers(1, 8), st.integers(1, 4), st.integers(1, 4), TIMES, TIMES)
def test_interleaved_closed_form(
    overlapping: bool, stages: int, chunks: int, rounds: int, forward: Fraction, half: Fraction
) -> None:
    """Narayanan et al. 2021, section 2.2.2: with m = p * rounds, idle is (p - 1) / (v m + p - 1)."""
    microbatches = stages * rounds
    schedule = generate("interleaved", stages, microbatches, chunks)
    costs = Costs(forward=forward, backward_input=half, backward_weight=half)
    timeline = simulate(overlap_p2p(schedule) if overlapping else schedule, costs)
    assert timeline.makespan == (chunks * microbatches + stages - 1) * (forward + 2 * half)
    assert set(timeline.idle) == {Fraction(stages - 1, chunks * microbatches + stages - 1)}
