"""What routers do, where activations are computed again: a backward pass that does so routes the same tokens twice."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np

from parallel_trainer.parallel.routing_record import RoutingRecord


class ForwardRecord(RoutingRecord):
    """A record of what routers do inside `forward` alone."""

    def __init__(self, layers: Sequence[str] = (), num_experts: int = 0) -> None:
        super().__init__(layers, num_experts)
        self._forward = False

    @contextmanager
    def forward(self) -> Iterator[None]:
        """While a chunk goes forward for the first time."""
        self._forward = True
        try:
            yield
        finally:
            self._forward = False

    def add_tokens(self, layer: str, ids: np.ndarray) -> None:
        """See `RoutingRecord.add_tokens`."""
        if self._forward:
            super().add_tokens(layer, ids)

    def add_loss(self, layer: str, loss: float) -> None:
        """See `RoutingRecord.add_loss`."""
        if self._forward:
            super().add_loss(layer, loss)
