"""The two things a model is made of: micro-batches that flow through it and the units they flow through."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from attrs import frozen
from mindspore import Tensor, nn

from parallel_trainer.parallel.weights import Weight


@frozen(eq=False, repr=False)  # MindSpore prints the arguments of every cell it runs
class MicroBatch:
    """Rows that one forward pass takes, on this rank. B rows of S tokens.

    input_ids:    int32 (B, S), ids of the tokens.
    position_ids: int32 (B, S), position of each token, for the rotary embedding.
    labels:       int32 (B, S), id to predict at each place; None to ask for logits instead of a loss.
    loss_mask:    float (B, S), 1 where the prediction counts, else 0; None counts all.
    """

    input_ids: np.ndarray
    position_ids: np.ndarray
    labels: np.ndarray | None = None
    loss_mask: np.ndarray | None = None


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
