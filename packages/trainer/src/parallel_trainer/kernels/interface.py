"""What a kernel set has to offer: one signature per computation, with shapes and dtypes.

Letters: B rows (sequences), S tokens of a row, V vocabulary, D size of one head, `...` any dimensions.
Tensors are float32 or float64, all of one call alike, and results have their dtype. Every kernel that takes
tensors is differentiable in them. What comes from the data pipeline (labels, masks, positions) stays on the
host as NumPy arrays.

Weights may have been freed and filled again between forward and backward, so a kernel keeps the weight
tensor itself and never a view of its memory, and returns memory of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
from device_mesh import Communicator
from mask_compression import CompressedMask, Range
from mindspore import Tensor


class Kernels(Protocol):
    """The computations that models call. Heads are counted from the shapes: a part of them works as well."""

    def embedding(self, ids: Tensor, weight: Tensor, *, first: int = 0, vocab_size: int | None = None) -> Tensor:
        """Rows of `weight` (V, features) for `ids`, int32 (...); returns (..., features).

        With `vocab_size`, `weight` is the part of a table of so many rows that starts at row `first`, and ids of other
        parts give zeros. Raises ValueError for an id outside 0 to V-1, or to vocab_size-1.
        """

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """`x @ weight.T + bias` for x (..., in), weight (out, in), bias (out,); returns (..., out)."""

    def linear_reduce_scatter(self, x: Tensor, weight: Tensor, group: Communicator) -> Tensor:
        """This rank's tokens of the sum of every rank's `x @ weight.T`: x (T, in), weight (out, in), (T/ranks, out).

        The ranks of `group` hold the inputs' parts. Backward, the gradients of all tokens are gathered.
        """

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """`x / sqrt(mean(x²) + eps) * weight` over the last dimension; x (..., n), weight (n,).

        Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019.
        """

    def rotary_table(self, position_ids: np.ndarray, *, head_dim: int, theta: float) -> Any:
        """Angles for `rotary` at int (B, S) positions: computed once per batch, used in every layer.

        The value belongs to the kernel set; callers only pass it on.
        """

    def rotary(self, x: Tensor, table: Any) -> Tensor:
        """Turn x (B, S, heads, D) by its positions, dimension i together with i + D/2.

        Su et al., "RoFormer", 2021, in the half-split layout of Hugging Face checkpoints.
        """

    def attention(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        scale: float,
        mask: CompressedMask,
        *,
        query_ranges: Sequence[Range] | None = None,
        key_ranges: Sequence[Range] | None = None,
    ) -> Tensor:
        """`softmax(scale * q kᵀ) v` over what `mask` lets a token see; returns the shape of q.

        q (B, Q, heads, D), k and v (B, K, kv_heads, D), heads a multiple of kv_heads (else ValueError).
        Query head h reads key/value head h // (heads // kv_heads). The ranges say which positions of the mask's
        sequences the Q and K tokens are, in order; None: all of them. A token that sees no key gets 0.
        Memory grows with the number of tokens, not with its square.
        """

    def swiglu(self, gate: Tensor, up: Tensor) -> Tensor:
        """`gate * sigmoid(gate) * up`, all (..., n). Shazeer, "GLU Variants Improve Transformer", 2020."""

    def cross_entropy_sum(
        self,
        logits: Tensor,
        labels: np.ndarray,
        loss_mask: np.ndarray | None,
        *,
        first: int = 0,
        vocab_size: int | None = None,
        group: Communicator | None = None,
    ) -> Tensor:
        """Sum over the tokens that count of `-log softmax(logits)[label]`, a tensor of shape ().

        logits (..., V); labels int (...); loss_mask (...) multiplies each token's loss, None counts all.
        A token with mask 0 or label -100 does not count and has gradient zero. Summed in float64.

        With `vocab_size`, logits are the part of a vocabulary of that size that starts at id `first`, and the ranks of
        `group` hold the other parts: three numbers a token are all-reduced, never the logits, and the result is
        alike on all ranks. Its gradient is that of one loss, not of `group.size` of them.

        Raises ValueError for another label outside 0 to V-1, or to vocab_size-1.
        """
