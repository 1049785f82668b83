"""Zero-bubble schedules: the weights' half of a backward fills time that would be idle.

From Qi et al. 2023, "Zero Bubble Pipeline Parallelism" (ZB-H1: section 2.1, figure 3), and Qi et al. 2024, "Pipeline
Parallelism with Controllable Memory" (ZB-V).
"""

from __future__ import annotations

import itertools

from pipeline_schedule.actions import Action, Kind
from pipeline_schedule.communication import add_communication
from pipeline_schedule.schedule import Schedule, loop_placement, vee_placement
from pipeline_schedule.sizes import check_sizes


def zb_h1(stages: int, microbatches: int) -> Schedule:
    """ZB-H1: 1F1B with split backwards, in no more memory than 1F1B's first rank needs; one stage on each rank.

    Rank r puts off the weights' half of each backward by r micro-batches, so no rank keeps the activations of more
    than min(p, m) of them. Let a forward take F and the two halves of a backward I and W, W being no more than F and I,
    and m >= p: with `overlap_p2p` a step takes m (F + I + W) + (p - 1) (F + I - W), and with blocking transfers too
    where all three are equal.

    Args:
        stages: pipeline stages p, one on each rank.
        microbatches: micro-batches m of a step.

    Raises:
        ValueError: a number below 1.
        TypeError: a number that is not an int.
    """
    check_sizes(stages=stages, microbatches=microbatches)
    orders = (_zb_h1_order(stages, rank, microbatches) for rank in range(stages))
    placement = loop_placement(stages, 1)
    return Schedule("ZB-H1", placement, microbatches, add_communication(orders, placement, microbatches))


def _zb_h1_order(stages: int, rank: int, microbatches: int) -> list[Action]:
    ahead = min(stages - rank, microbatches)
    order = [Action(Kind.FORWARD, rank, m) for m in range(ahead)]
    for m in range(microbatches):
        order.append(Action(Kind.BACKWARD_INPUT, rank, m))
        if m >= rank:
            order.append(Action(Kind.BACKWARD_WEIGHT, rank, m - rank))
        if ahead + m < microbatches:
            order.append(Action(Kind.FORWARD, rank, ahead + m))
    late = range(max(microbatches - rank, 0), microbatches)
    return [*order, *(Action(Kind.BACKWARD_WEIGHT, rank, m) for m in late)]


def zb_v(stages: int, microbatches: int) -> Schedule:
    """ZB-V: two chunks on each rank, placed down and up again as a V, with split backwards.

    Rank i holds virtual stages i and 2 p - 1 - i. With m >= 2 p - 1 and equal times for a forward, an input half
    and a weight half, the idle time of a rank is p - 1 of these times and no rank keeps more than 2 p activations of
    chunks, which is what 1F1B's first rank keeps.

    Args:
        stages: pipeline stages p, one for each rank; there are `2 * stages` virtual stages.
        microbatches: micro-batches m of a step.

    Raises:
        ValueError: a number below 1.
        TypeError: a number that is not an int.
    """
    check_sizes(stages=stages, microbatches=microbatches)
    full = max(microbatches, 2 * stages - 1)
    orders = (
        # A step of fewer micro-batches is the same order without those that it lacks.
        (action for action in _zb_v_order(stages, rank, full) if action.microbatch < microbatches)
        for rank in range(stages)
    )
    placement = vee_placement(stages)
    return Schedule("ZB-V", placement, microbatches, add_communication(orders, placement, microbatches))


def _zb_v_order(stages: int, rank: int, microbatches: int) -> list[Action]:
    """The order for at least 2 p - 1 micro-batches: a pattern, each letter the next micro-batch of its kind."""
    down, up = rank, 2 * stages - 1 - rank
    kinds = {
        "F": (Kind.FORWARD, down),
        "I": (Kind.BACKWARD_INPUT, down),
        "W": (Kind.BACKWARD_WEIGHT, down),
        "f": (Kind.FORWARD, up),
        "i": (Kind.BACKWARD_INPUT, up),
        "w": (Kind.BACKWARD_WEIGHT, up),
    }
    ahead = "F" * (2 * (stages - rank) - 1) + "fF" * rank + "fiw" * (stages - rank)
    steady = "FIWfiw" * (microbatches - ahead.count("F")) + "IWfiw" * (stages - rank - 1)
    end = "Ii" * rank + "IW" * (stages - rank) + "w" * rank + "W" * rank
    numbers = {letter: itertools.count() for letter in kinds}
    order = []
    for letter in ahead + steady + end:
        kind, stage = kinds[letter]
        order.append(Action(kind, stage, next(numbers[letter])))
    return order
