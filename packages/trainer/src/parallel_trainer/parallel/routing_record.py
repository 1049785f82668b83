"""How many tokens routers send to each expert, counted on every rank and added up once a step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from weakref import WeakKeyDictionary

import numpy as np
from attrs import frozen
from device_mesh import Communicator

from parallel_trainer.batch import MicroBatch


class RoutingRecord:
    """What routers did since the last `collect`, on this rank.

    layers:      names of the model's layers with experts, also those of other pipeline stages.
    num_experts: of each of them.
    """

    def __init__(self, layers: Sequence[str], num_experts: int) -> None:
        self.layers = tuple(layers)
        self._tokens = np.zeros((len(self.layers), num_experts))
        self._losses = np.zeros((len(self.layers), 1))
        self._chosen: dict[str, _Chosen] = {}

    @property
    def num_experts(self) -> int:
        """Of a layer."""
        return self._tokens.shape[1]

    def add_tokens(self, layer: str, ids: np.ndarray) -> None:
        """Count the experts `ids` (T, K) that a layer's tokens were routed to."""
        self._tokens[self.layers.index(layer)] += np.bincount(ids.reshape(-1), minlength=self._tokens.shape[1])

    def add_loss(self, layer: str, loss: float) -> None:
        """Add this rank's part of a layer's auxiliary loss."""
        self._losses[self.layers.index(layer)] += loss

    def chosen_so_far(self, layer: str, batch: MicroBatch, count: Callable[[], np.ndarray]) -> np.ndarray:
        """What `count` gave for this micro-batch of a layer and all before it since the last `collect`, added up.

        A backward pass that computes activations again asks for a micro-batch again: it gets what it got before, and
        nothing is counted.
        """
        return self._chosen.setdefault(layer, _Chosen()).up_to(batch, count)

    def collect(self, world: Communicator) -> ExpertLoads:
        """The sum over all ranks, which is the global batch's, and start anew. Collective over the world."""
        total = world.all_reduce(np.hstack([self._tokens, self._losses]))
        self.clear()
        return ExpertLoads(self.layers, total[:, :-1].astype(np.int64), float(total[:, -1].sum()))

    def clear(self) -> None:
        """Start anew: what was counted since the last `collect` is no part of a training step."""
        self._tokens[...] = 0
        self._losses[...] = 0
        self._chosen.clear()


class _Chosen:
    """How often a layer's experts were chosen by the micro-batches of a step, and when each came, by those so far."""

    def __init__(self) -> None:
        self._last: np.ndarray | None = None
        self._up_to: WeakKeyDictionary[MicroBatch, np.ndarray] = WeakKeyDictionary()

    def up_to(self, batch: MicroBatch, count: Callable[[], np.ndarray]) -> np.ndarray:
        if batch not in self._up_to:
            self._last = count() if self._last is None else self._last + count()
            self._up_to[batch] = self._last
        return self._up_to[batch]


@frozen(eq=False)
class ExpertLoads:
    """What the routers of all layers did with a global batch, the same on every rank.

    layers:            names of the layers with experts.
    tokens_per_expert: int64 (layers, experts), tokens of the batch that each expert got.
    balance_loss:      auxiliary loss of the global batch, summed over layers, with its coefficient.
    """

    layers: tuple[str, ...]
    tokens_per_expert: np.ndarray
    balance_loss: float
