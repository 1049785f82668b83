"""What a model is made of: units that micro-batches flow through."""

from __future__ import annotations

from collections.abc import Sequence

from mindspore import Tensor, nn

from parallel_trainer.batch import MicroBatch
from parallel_trainer.costs import Costs, OnRank
from parallel_trainer.parallel.weights import Weight


class Unit(nn.Cell):
    """A part of a model whose weights are gathered, used and freed together: embedding, block or head.

    A unit owns no memory. It declares `weights` and receives them as the last arguments of `construct`,
    in that order, as plain tensors of the declared shapes; so the same unit runs on one device and
    sharded over many, and whoever calls it decides where the weights live.
    """

    def __init__(self, weights: Sequence[Weight]) -> None:
        super().__init__(auto_prefix=False)
        self.weights = tuple(weights)

    def construct(self, x: Tensor, batch: MicroBatch, *weights: Tensor) -> Tensor:
        """`x` is what the unit before returned; the first receives the token ids (B, S), an int32 tensor."""
        raise NotImplementedError

    def costs(self, rank: OnRank) -> Costs:
        """What the rank keeps and receives for a micro-batch that passes this unit forward and backward."""
        raise NotImplementedError
