"""Tensor parallelism with sequence parallelism: what happens at the borders of regions whose weights are split.

Between regions (norms, residuals) each of the tp ranks holds 1/tp of the tokens with all features. Inside, it has all
tokens and its part of the heads, of the inner features, or of the vocabulary:

    tokens/tp ── enter: all-gather ──► column-split weights … row-split weights ── leave: reduce-scatter ──► tokens/tp

Backward the two change places. Every rank's gradient of a weight that is not split is a part of a sum, because it saw
a part of the tokens or heads; `ShardedWeights.finish_gradients` adds these up. With one rank nothing is communicated.
Shoeybi et al., arXiv:1909.08053; Korthikanti et al., arXiv:2205.05198, section 4.2.
"""

from __future__ import annotations

import numpy as np
from attrs import frozen
from device_mesh import Communicator, autograd, connect
from mindspore import Tensor

from parallel_trainer.kernels.interface import Kernels
from parallel_trainer.parallel.weights import split_evenly


@frozen(eq=False)
class TensorParallel:
    """The ranks of a tensor-parallel group and what they do together.

    kernels:       what is computed on a rank.
    group:         the ranks that hold the parts of each weight.
    loss_parallel: the loss is computed from logits that stay split over the vocabulary (`enable_loss_parallel`).
    """

    kernels: Kernels
    group: Communicator
    loss_parallel: bool = False

    @classmethod
    def none(cls, kernels: Kernels) -> TensorParallel:
        """No tensor parallelism: a group of one rank."""
        return cls(kernels, connect("single"))

    def enter(self, x_TH: Tensor) -> Tensor:
        """This rank's tokens (T/tp, H) to those of all ranks (T, H): before column-split weights."""
        return autograd.all_gather(x_TH, self.group)

    def row_linear(self, x_TI: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """A product with a weight whose inputs are split: x (T, I/tp), weight (H, I/tp); returns (T/tp, H).

        The ranks' products are added up and each gets its tokens' part, to which the `bias` (H,) is added.
        """
        if self.group.size == 1:
            return self.kernels.linear(x_TI, weight, bias)
        out = self.kernels.linear_reduce_scatter(x_TI, weight, self.group)
        return out if bias is None else out + bias

    def embedding(self, ids: Tensor, table: Tensor, vocab_size: int) -> Tensor:
        """Rows for `ids`, int32 (T,), of a table whose rows are split over the ranks; returns (T/tp, H).

        Each rank looks up what it holds, and the sum over the ranks has every token's row.
        """
        first, _ = self.vocabulary(vocab_size)
        rows = self.kernels.embedding(ids, table, first=first, vocab_size=vocab_size)
        return autograd.reduce_scatter(rows, self.group)

    def loss_sum(self, logits_TV: Tensor, labels: np.ndarray, loss_mask: np.ndarray | None, vocab_size: int) -> Tensor:
        """`Kernels.cross_entropy_sum` of logits (T, V/tp) that are split over the vocabulary; alike on all ranks."""
        if not self.loss_parallel or self.group.size == 1:
            return self.kernels.cross_entropy_sum(self.whole_logits(logits_TV, vocab_size), labels, loss_mask)
        first, _ = self.vocabulary(vocab_size)
        return self.kernels.cross_entropy_sum(
            logits_TV, labels, loss_mask, first=first, vocab_size=vocab_size, group=self.group
        )

    def whole_logits(self, logits_TV: Tensor, vocab_size: int) -> Tensor:
        """Logits (T, V) from those of each rank's part of the vocabulary."""
        parts = (split_evenly(vocab_size, self.group.size, rank) for rank in range(self.group.size))
        sizes = [stop - start for start, stop in parts]
        return autograd.gather_from_group(logits_TV, self.group, dim=-1, sizes=sizes)

    def vocabulary(self, vocab_size: int) -> tuple[int, int]:
        """The ids `first` to `stop - 1` that this rank holds."""
        return split_evenly(vocab_size, self.group.size, self.group.rank)
