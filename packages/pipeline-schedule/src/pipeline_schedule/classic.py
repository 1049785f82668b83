"""GPipe, 1F1B and interleaved 1F1B: in which order a rank computes.

- GPipe: Huang et al. 2019, "GPipe: Efficient Training of Giant Neural Networks using Pipeline Parallelism".
- 1F1B: Narayanan et al. 2019, "PipeDream: Generalized Pipeline Parallelism for DNN Training"; with a flush after each
  step, Narayanan et al. 2021, "Memory-Efficient Pipeline-Parallel DNN Training".
- Interleaved 1F1B: Narayanan et al. 2021, "Efficient Large-Scale Language Model Training on GPU Clusters Using
  Megatron-LM"; for any number of micro-batches in the order of HyperParallel's `ScheduleInterleaved1F1B`.
"""

from __future__ import annotations

import itertools

from pipeline_schedule.actions import Action, Kind, new_action
from pipeline_schedule.communication import add_communication
from pipeline_schedule.schedule import Schedule, loop_placement
from pipeline_schedule.sizes import check_sizes


def gpipe(stages: int, microbatches: int) -> Schedule:
    """All forwards, then all backwards, one stage on each rank.

    Every rank keeps the activations of all micro-batches. Idle share of each rank: (p - 1) / (m + p - 1).

    Args:
        stages: pipeline stages p, one on each rank.
        microbatches: micro-batches m of a step.

    Raises:
        ValueError: a number below 1.
        TypeError: a number that is not an int.
    """
    check_sizes(stages=stages, microbatches=microbatches)
    orders = (
        (Action(kind, rank, m) for kind in (Kind.FORWARD, Kind.BACKWARD) for m in range(microbatches))
        for rank in range(stages)
    )
    placement = loop_placement(stages, 1)
    return Schedule("GPipe", placement, microbatches, add_communication(orders, placement, microbatches))


def one_f_one_b(stages: int, microbatches: int) -> Schedule:
    """1F1B: as few forwards ahead as keep all ranks busy, then forward and backward in turns; one stage on each rank.

    Rank r keeps the activations of min(p - r, m) micro-batches. Idle share of each rank: (p - 1) / (m + p - 1).

    Args:
        stages: pipeline stages p, one on each rank.
        microbatches: micro-batches m of a step.

    Raises:
        ValueError: a number below 1.
        TypeError: a number that is not an int.
    """
    check_sizes(stages=stages, microbatches=microbatches)
    orders = (
        _in_turns(
            [Action(Kind.FORWARD, rank, m) for m in range(microbatches)],
            [Action(Kind.BACKWARD, rank, m) for m in range(microbatches)],
            ahead=stages - 1 - rank,
        )
        for rank in range(stages)
    )
    placement = loop_placement(stages, 1)
    return Schedule("1F1B", placement, microbatches, add_communication(orders, placement, microbatches))


def interleaved_1f1b(stages: int, chunks: int, microbatches: int) -> Schedule:
    """Interleaved 1F1B: each rank holds several chunks, which shortens the idle time at both ends of a step.

    Virtual stage `k * p + r` is chunk k of rank r. Micro-batches pass in rounds of about p: a rank does a round with
    its first chunk, then with its second, and so on. Rank r runs W = min((v - 1) n + 2 (p - 1 - r), m v) forwards
    ahead, n being the size of the first round, and keeps the activations of min(W + 1, m v) pairs of chunk and
    micro-batch. Idle share of each rank, where p divides m: (p - 1) / (v m + p - 1). With one chunk this is 1F1B with
    twice as many forwards ahead as `one_f_one_b`.

    Args:
        stages: pipeline stages p, one for each rank; there are `stages * chunks` virtual stages.
        chunks: chunks v on each rank.
        microbatches: micro-batches m of a step; any number.

    Raises:
        ValueError: a number below 1.
        TypeError: a number that is not an int.
    """
    check_sizes(stages=stages, chunks=chunks, microbatches=microbatches)
    rounds = _rounds(stages, microbatches)
    orders = (_interleaved_order(stages, rank, chunks, rounds) for rank in range(stages))
    placement = loop_placement(stages, chunks)
    programs = add_communication(orders, placement, microbatches, in_step=True)
    return Schedule("Interleaved 1F1B", placement, microbatches, programs)


def _interleaved_order(stages: int, rank: int, chunks: int, rounds: list[range]) -> list[Action]:
    held = [chunk * stages + rank for chunk in range(chunks)]
    return _in_turns(
        [new_action((Kind.FORWARD, stage, m)) for batch in rounds for stage in held for m in batch],
        [new_action((Kind.BACKWARD, stage, m)) for batch in rounds for stage in reversed(held) for m in batch],
        ahead=(chunks - 1) * len(rounds[0]) + 2 * (stages - 1 - rank),
    )


def _rounds(stages: int, microbatches: int) -> list[range]:
    """The micro-batches in rounds of at least `stages`, of sizes as equal as can be, the larger ones first."""
    number = max(1, microbatches // stages)
    size, larger = divmod(microbatches, number)
    starts = [i * size + min(i, larger) for i in range(number + 1)]
    return [range(start, end) for start, end in itertools.pairwise(starts)]


def _in_turns(forwards: list[Action], backwards: list[Action], ahead: int) -> list[Action]:
    """`ahead` forwards (or all), then a forward and a backward in turns, then the backwards left."""
    ahead = min(ahead, len(forwards))
    turns = zip(forwards[ahead:], backwards, strict=False)
    steady = len(forwards) - ahead
    return [*forwards[:ahead], *(action for turn in turns for action in turn), *backwards[steady:]]
