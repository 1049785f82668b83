"""Times: the closed forms of the classic schedules, costs that differ between stages, transfers, and bad costs."""

from __future__ import annotations

from fractions import Fraction

import pytest
from pipeline_schedule import (
    Costs,
    Kind,
    ScheduleError,
    generate,
    gpipe,
    interleaved_1f1b,
    one_f_one_b,
    overlap_b_f,
    overlap_p2p,
    simulate,
    zb_h1,
    zb_v,
)
from pipeline_schedule.actions import Action
from pipeline_schedule.schedule import Schedule

RATIOS = [(1, 1, 1), (1, 1, 0), (2, 1, 1), (3, 2, 2), (1, 2, 1), (Fraction(1, 3), Fraction(1, 2), 1)]


def costs(forward: int | Fraction, input_half: int | Fraction, weight_half: int | Fraction) -> Costs:
    return Costs(forward=forward, backward_input=input_half, backward_weight=weight_half)


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
@pytest.mark.parametrize("times", RATIOS)
@pytest.mark.parametrize(("p", "m"), [(1, 4), (2, 2), (4, 4), (4, 16), (8, 9), (5, 32)])
def test_gpipe_and_1f1b(name: str, times: tuple[int, int, int], p: int, m: int) -> None:
    """Huang et al. 2019, section 2.3: (p - 1) / (m + p - 1) of the time is idle, with any times and m."""
    timeline = simulate(generate(name, p, m), costs(*times))
    assert timeline.makespan == (m + p - 1) * sum(times)
    assert timeline.idle == (Fraction(p - 1, m + p - 1),) * p


@pytest.mark.parametrize("times", [(1, 1, 1), (1, 1, 0), (2, 1, 1), (3, 2, 2), (1, 2, 1)])
@pytest.mark.parametrize(("p", "m"), [(2, 2), (4, 4), (4, 16), (8, 9), (5, 32)])
def test_zb_h1(times: tuple[int, int, int], p: int, m: int) -> None:
    """Qi et al. 2023, table 1: (p - 1)(F + I - W) is idle, here with transfers beside the computations."""
    forward, input_half, weight_half = times
    idle = (p - 1) * (forward + input_half - weight_half)
    assert simulate(overlap_p2p(zb_h1(p, m)), costs(*times)).makespan == m * sum(times) + idle
    if times == (1, 1, 1):
        assert simulate(zb_h1(p, m)).makespan == 3 * m + p - 1


@pytest.mark.parametrize(("p", "m"), [(1, 1), (2, 3), (4, 7), (4, 16), (8, 15), (5, 32)])
def test_zb_v(p: int, m: int) -> None:
    """With equal times only the first micro-batch's way down is idle, on every rank."""
    timeline = simulate(zb_v(p, m))
    assert timeline.makespan == 6 * m + p - 1
    assert timeline.idle == (Fraction(p - 1, 6 * m + p - 1),) * p


@pytest.mark.parametrize("times", RATIOS)
@pytest.mark.parametrize(("p", "v", "m"), [(4, 1, 8), (4, 2, 8), (3, 4, 9)])
def test_overlapping_pairs(times: tuple[int, int, int], p: int, v: int, m: int) -> None:
    """Pairs that hide nothing take their sum, and pairs that hide all the longer one, on the last rank."""
    schedule = overlap_p2p(overlap_b_f(interleaved_1f1b(p, v, m)))
    assert simulate(schedule, costs(*times)).makespan == (v * m + p - 1) * sum(times)
    backward, forward = times[1] + times[2], times[0]
    hidden = Costs(forward=forward, backward_input=times[1], backward_weight=times[2], hidden=1)
    last = simulate(schedule, hidden).computations[p - 1]
    alone = (v - 1) * p + 1
    paired = v * m - alone
    expected = alone * (forward + backward) + paired * max(forward, backward)
    assert sum(span.end - span.start for span in last) == expected


def test_stages_that_differ() -> None:
    """Three stages, two micro-batches, 1F1B: worked out by hand; the second stage is slow.

    rank 0: F0 0-1, F1 1-2, B0 13-14, B1 19-20
    rank 1: F0 1-4, F1 4-7, B0 7-13 (its gradient comes at 6, but F1 is before it), B1 13-19
    rank 2: F0 4-5, B0 5-6, F1 7-8, B1 8-9
    """
    times = Costs(forward=(1, 3, 1), backward_input=(Fraction(1, 2), 3, 0.5), backward_weight=(Fraction(1, 2), 3, 0.5))
    timeline = simulate(overlap_p2p(one_f_one_b(3, 2)), times)
    ends = {str(span.step): span.end for spans in timeline.computations for span in spans}
    assert ends["forward(stage 1, micro-batch 1)"] == 7
    assert ends["backward(stage 1, micro-batch 0)"] == 13
    assert ends["backward(stage 0, micro-batch 0)"] == 14
    assert ends["backward(stage 2, micro-batch 1)"] == 9
    assert timeline.makespan == 20
    assert timeline.idle == (Fraction(4, 5), Fraction(1, 10), Fraction(4, 5))


def test_transfers_take_time() -> None:
    """Two stages, one micro-batch: F 1, transfer 3, F and B 1 + 2, transfer 3, B 2; both ranks stay with a transfer."""
    timeline = simulate(gpipe(2, 1), Costs(communication=3))
    assert timeline.makespan == 12
    assert [(span.start, span.end) for span in timeline.transfers] == [(1, 4), (7, 10)]
    assert timeline.transfers[0].step == Action(Kind.SEND_ACTIVATION, 0, 0)
    assert timeline.idle == (Fraction(3, 4), Fraction(3, 4))


def test_boundaries_that_differ() -> None:
    times = Costs(communication=(1, 5))
    assert simulate(gpipe(3, 1), times).makespan == 3 * (1 + 2) + 2 * (1 + 5)
    with pytest.raises(ValueError, match="communication has 2 times, but the schedule has 3 boundaries between stages"):
        simulate(gpipe(4, 1), times)


@pytest.mark.parametrize("transfer", [Fraction(1, 4), Fraction(1, 2)])
def test_overlap_p2p_hides_transfers(transfer: Fraction) -> None:
    """Only the first micro-batch's way down and the last one's way up are longer, which nothing can hide."""
    p, m, times = 4, 16, Costs(communication=transfer)
    schedule = interleaved_1f1b(p, 1, m)
    hidden = simulate(overlap_p2p(schedule), times).makespan
    assert hidden == (m + p - 1) * 3 + 2 * (p - 1) * transfer
    assert simulate(schedule, times).makespan > hidden


def test_times_of_zero() -> None:
    timeline = simulate(one_f_one_b(2, 2), Costs(forward=0, backward_input=0, backward_weight=0))
    assert timeline.makespan == 0
    assert timeline.idle == (0, 0)


def test_only_valid_schedules_are_simulated() -> None:
    with pytest.raises(ScheduleError, match=r"rank 0 never does forward\(stage 0, micro-batch 0\)"):
        simulate(Schedule("empty", (0,), 1, [[]]))


@pytest.mark.parametrize(
    ("name", "value", "error", "message"),
    [
        ("forward", -1, ValueError, "forward: -1 must be a time of at least 0"),
        ("communication", float("nan"), ValueError, "communication: nan must be a time of at least 0, and finite"),
        ("backward_input", (1, float("inf")), ValueError, "backward_input: inf must be a time"),
        ("backward_weight", "1", TypeError, "backward_weight: '1' must be an int, a float or a Fraction"),
        ("hidden", 1.5, ValueError, r"hidden = 1.5 must be a share from 0 to 1"),
        ("hidden", True, TypeError, "hidden: True must be an int"),
    ],
)
def test_bad_costs(name: str, value: object, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        Costs(**{name: value})  # type: ignore[arg-type]


def test_costs_for_another_number_of_stages() -> None:
    with pytest.raises(ValueError, match="forward has 3 times, but the schedule has 4 virtual stages: give one number"):
        simulate(interleaved_1f1b(2, 2, 2), Costs(forward=(1, 2, 3)))
