"""A schedule: which rank holds which virtual stage, and what every rank does in which order."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property

from attrs import field, frozen

from pipeline_schedule.actions import Step

Placement = tuple[int, ...]
"""The rank that holds each virtual stage: `placement[stage]` is a rank."""


def loop_placement(ranks: int, chunks: int) -> Placement:
    """Virtual stage `k * ranks + i` is chunk `k` of rank `i`: the stages go round the ranks in a loop."""
    return tuple(range(ranks)) * chunks


def vee_placement(ranks: int) -> Placement:
    """Two chunks a rank, down and up again: virtual stages `i` and `2 * ranks - 1 - i` are on rank `i`.

    The last rank holds two neighbouring stages, between which nothing is sent; rank 0 holds the first and the last.
    """
    return (*range(ranks), *reversed(range(ranks)))


def _ranks(placement: Iterable[int]) -> Placement:
    return tuple(placement)


def _steps(programs: Iterable[Iterable[Step]]) -> tuple[tuple[Step, ...], ...]:
    return tuple(tuple(program) for program in programs)


@frozen(slots=False)
class Schedule:
    """What every rank does in one training step, as data.

    Made by the generators and the transformations of this package, by `schedule_from_dict`, or by hand: making one
    checks nothing, `validate` does.

    Attributes:
        name: what the schedule is called in drawings and messages.
        placement: the rank of each virtual stage, in the order in which a micro-batch passes them forward.
            `placement[k * pp + i] == i` for the usual loop; see `loop_placement` and `vee_placement`.
        microbatches: how many micro-batches pass, numbered from 0.
        programs: the steps of each rank, in order.
        overlap_p2p: if true, sends and receives only start a transfer, and a wait action ends each of them; if
            false, a send or a receive returns when the transfer is over, and there are no waits.
    """

    name: str
    placement: Placement = field(converter=_ranks)
    microbatches: int
    programs: tuple[tuple[Step, ...], ...] = field(converter=_steps, repr=False)
    overlap_p2p: bool = False

    @property
    def num_ranks(self) -> int:
        """How many ranks the pipeline has."""
        return len(self.programs)

    @property
    def num_stages(self) -> int:
        """How many virtual stages the pipeline has."""
        return len(self.placement)

    @cached_property
    def stages(self) -> tuple[tuple[int, ...], ...]:
        """The virtual stages of each rank, ascending; the position in this list is the chunk."""
        held: list[list[int]] = [[] for _ in self.programs]
        for stage, rank in enumerate(self.placement):
            held[rank].append(stage)
        return tuple(map(tuple, held))

    @property
    def num_chunks(self) -> int:
        """The largest number of virtual stages on one rank."""
        return max(map(len, self.stages))

    def chunk(self, stage: int) -> int:
        """Which of its rank's chunks a virtual stage is, from 0."""
        return self.stages[self.placement[stage]].index(stage)
