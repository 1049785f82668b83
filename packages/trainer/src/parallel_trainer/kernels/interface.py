"""What a kernel set has to offer: one signature per computation, with shapes and dtypes.

Letters: B rows (sequences), S tokens of a row, V vocabulary, D size of one head, `...` any dimensions.
Tensors are float32 or float64 on a CPU and bfloat16, float16 or float32 on Ascend, all of one call alike but for what
`linear` and `unpermute` say. Results have their dtype, but a loss is never narrower than float32. Every kernel that
takes tensors is differentiable in them. What comes from the data pipeline (labels, masks, positions) stays on the host
as NumPy arrays.

The weight gradients of the linear kernels and of `grouped_mlp` are products that a backward can leave for later
(`later.py`): a weight that a unit gives to one of them goes nowhere else in that unit.

Weights may have been freed and filled again between forward and backward, so a kernel keeps the weight
tensor itself and never a view of its memory, and returns memory of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, Protocol

import numpy as np
from device_mesh import Communicator
from mask_compression import CompressedMask, Range
from mindspore import Tensor

Scoring = Literal["sigmoid", "softmax"]
"""How a router's logits become scores of experts."""


class Kernels(Protocol):
    """The computations that models call. Heads are counted from the shapes: a part of them works as well."""

    def embedding(self, ids: Tensor, weight: Tensor, *, first: int = 0, vocab_size: int | None = None) -> Tensor:
        """Rows of `weight` (V, features) for `ids`, int32 (...); returns (..., features).

        With `vocab_size`, `weight` is the part of a table of so many rows that starts at row `first`, and ids of other
        parts give zeros. Raises ValueError for an id outside 0 to V-1, or to vocab_size-1.
        """

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """`x @ weight.T + bias` for x (..., in), weight (out, in), bias (out,); returns (..., out).

        A weight that is float32 where x is narrower, a router's, is multiplied in float32, and so is the result.
        """

    def linear_reduce_scatter(self, x: Tensor, weight: Tensor, group: Communicator) -> Tensor:
        """This rank's tokens of the sum of every rank's `x @ weight.T`: x (T, in), weight (out, in), (T/ranks, out).

        The ranks of `group` hold the inputs' parts. Backward, the gradients of all tokens are gathered.
        """

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """`x / sqrt(mean(x²) + eps) * weight` over the last dimension; x (..., n), weight (n,).

        Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019.
        """

    def rotary_table(self, position_ids: np.ndarray, frequencies: np.ndarray, *, scale: float = 1.0) -> Any:
        """Angles for `rotary`, position times frequency: int positions (B, S), one frequency for each pair, (pairs,).

        `scale` multiplies what is turned. Computed once per batch and used in every layer; the value belongs to the
        kernel set, and callers only pass it on and refer to it weakly.
        """

    def rotary(self, x: Tensor, table: Any, *, interleaved: bool = False) -> Tensor:
        """Turn x (B, S, heads, D) by its positions: the last R = 2·pairs dimensions, of which i goes with i + R/2.

        With `interleaved`, 2i goes with 2i + 1. Dimensions before the last R stay as they are. Raises ValueError for
        R > D. Su et al., "RoFormer", 2021; without `interleaved` in the layout of Llama's and Qwen's checkpoints.
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
        """`softmax(scale * q kᵀ) v` over what `mask` lets a token see; returns (B, Q, heads, Dv).

        q (B, Q, heads, D), k (B, K, kv_heads, D) and v (B, K, kv_heads, Dv), heads a multiple of kv_heads (else
        ValueError).
        Query head h reads key/value head h // (heads // kv_heads). The ranges say which positions of the mask's
        sequences the Q and K tokens are, in order; None: all of them. A token that sees no key gets 0.
        Memory grows with the number of tokens, not with its square.
        """

    def swiglu(self, gate: Tensor, up: Tensor) -> Tensor:
        """`gate * sigmoid(gate) * up`, all (..., n). Shazeer, "GLU Variants Improve Transformer", 2020."""

    def split(self, x: Tensor, sizes: Sequence[int]) -> tuple[Tensor, ...]:
        """x (..., n) cut along its last dimension into parts of these sizes, which add up to n (else ValueError)."""

    def concat(self, *parts: Tensor) -> Tensor:
        """Parts (..., nᵢ) beside each other along the last dimension. Where one has size 1 in another dimension, it is
        copied to the others' size, and its gradient is the sum over the copies."""

    def choose_experts(
        self, logits: Tensor, *, top_k: int, bias: Tensor | None = None, groups: int = 1, topk_group: int = 1
    ) -> np.ndarray:
        """The `top_k` experts of each token, int64 (T, K), best first and of equals the first, for logits (T, E).

        Scores are `sigmoid(logits) + bias`, bias (E,); without bias and groups their order is that of the logits,
        whatever the scoring. Of `groups` equally many neighbouring experts only the best `topk_group` take part, where
        the score of a group is the sum of its best two, as in DeepSeek's own code. DeepSeek-AI, arXiv:2412.19437,
        section 2.1.2. No gradient.

        Raises ValueError for experts that groups do not divide, and for more than the chosen groups have.
        """

    def router_weights(
        self, logits: Tensor, ids: np.ndarray, *, scoring: Scoring, normalized: bool, scaling: float = 1.0
    ) -> tuple[Tensor, Tensor]:
        """Weights (T, K) of the experts `ids`, int64 (T, K), all different; and probabilities of all, (T, E).

        logits (T, E). Scores are `sigmoid(logits)` or `softmax(logits)`; weights are those of the chosen, with
        `normalized` divided by their sum, times `scaling`. Probabilities are scores divided by their sum: what losses
        that balance the experts use. Biases change what is chosen and not how it is weighed.
        """

    def permute(self, x: Tensor, ids: np.ndarray, num_experts: int) -> tuple[Tensor, np.ndarray, Any]:
        """A copy of x (T, H) for each of a token's experts, in the order of the experts: (T·K, H) for int64 ids (T, K).

        Also how many rows each expert has, int64 (E,), and what `unpermute` needs to know of the order.
        """

    def unpermute(self, rows: Tensor, weights: Tensor, order: Any) -> Tensor:
        """The sum over k of weights[t, k] times the row of token t for its k-th expert: (T·K, H), (T, K) to (T, H).

        Weights are float32 where rows are narrower, and so are the sums.
        """

    def grouped_mlp(self, rows: Tensor, counts: np.ndarray, gate_up: Tensor, down: Tensor) -> Tensor:
        """`down[e] @ (silu(gate) * up)`, gate and up the halves of `gate_up[e] @ row`, for rows (R, H); returns (R, H).

        gate_up (E, 2I, H), down (E, H, I). The rows lie in the order of the experts: `counts` int64 (E,) says how many
        each has, any of which and R may be 0; ValueError if they do not add up. Gradients of an expert without rows
        are zero.
        """

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
