"""In which order a chunk's weights are gathered and its gradients reduced while units compute.

The weights of the next unit are on their way while a unit runs, forward and backward; so are the gradients of the unit
before. Never more: a rank has room for two units' weights, and for two units' gradients. The order is the same whatever
carries messages; whether they travel meanwhile is the communicator's affair.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import numpy as np
from device_mesh import Traffic

from parallel_trainer.parallel.fully_shard import ShardedWeight, ShardedWeights


class Prefetch:
    """The communication of a chunk's weights.

    units:   the weights of each unit.
    weights: where they live.
    keep:    a unit's weights stay gathered from their first use on, until `release_kept`.
    names:   of the units, for `traffic`.
    traffic: is told for which unit's part of the step something is communicated.
    """

    def __init__(
        self,
        units: Sequence[Sequence[ShardedWeight]],
        weights: ShardedWeights,
        *,
        keep: bool,
        names: Sequence[str],
        traffic: Traffic,
    ) -> None:
        self._units, self._weights = units, weights
        self._names, self._traffic = names, traffic
        self._keep = keep
        self._kept: set[int] = set()

    def gathered(self, order: Iterable[int], part: str) -> Iterator[int]:
        """Units in turn, each gathered when its turn comes; what the caller does then counts as its `part` of the step.

        Its weights arrive, those of the next are sent for, the caller runs it, its weights are freed.
        """
        turns = [(index, f"{self._names[index]} {part}") for index in order]
        for (index, label), following in zip(turns, [*turns[1:], None], strict=True):
            with self._traffic.during(label):
                if index == turns[0][0]:
                    self._gather(index)
                for sharded in self._units[index]:
                    sharded.wait()
                if following:
                    with self._traffic.during(following[1]):
                        self._gather(following[0])
                yield index
                for sharded in self._units[index]:
                    sharded.release()

    def reduce(self, gradients: Iterable[tuple[ShardedWeight, np.ndarray]]) -> None:
        """Send a unit's gradients to be reduced; those sent before have been, and are added to the step's."""
        self._weights.finish_reductions()
        for sharded, gradient in gradients:
            self._weights.add_gradient(sharded, gradient)

    def release_kept(self) -> None:
        """Free what was kept gathered."""
        for index in self._kept:
            for sharded in self._units[index]:
                sharded.release()
        self._kept.clear()

    def _gather(self, index: int) -> None:
        users = 1
        if self._keep and index not in self._kept:
            self._kept.add(index)
            users = 2
        for sharded in self._units[index]:
            for _ in range(users):
                sharded.gather()
