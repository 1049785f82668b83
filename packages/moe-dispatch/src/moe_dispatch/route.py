"""The way of one batch of tokens to their experts and back: dispatch, combine, and the gradient of each.

Dispatch is a linear map D, which copies each token to the rows of its experts. Combine is its transpose after scaling
each row by its weight. So the gradients need nothing else: of dispatch Dᵀ; of combine D of the result's gradient,
scaled by the weights for the rows and multiplied with the rows for the weights.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from attrs import frozen
from device_mesh.half import is_half, wide_type

from moe_dispatch.exchange import Arriving, Exchange, Spread
from moe_dispatch.layout import Array, Ints, check_array
from moe_dispatch.row_sums import scale_rows


@frozen(eq=False)
class Route:
    """Where a rank's tokens go and come back from. Made by a dispatcher's `route`.

    Every method is a collective: all ranks of the group call the same ones in the same order, also with no tokens
    and with no rows. Methods that begin with `start` send what their namesakes send and return at once; their result is
    called, once, for what comes, and what they were given must be left unchanged until then. Rows are bfloat16 (of a
    library that adds it to NumPy), float16, float32 or float64, those of one call alike, and results have their dtype.
    Rows of 16 bits are added up in float32; weights and their gradients are float32 then, else of the rows' dtype.
    T tokens of this rank, K experts of each, H numbers in a row, R rows that this rank's experts get.

    Attributes:
        counts: int64 (experts of this rank,): the rows that each gets; their sum is R.
        num_tokens: T.
        top_k: K.
    """

    counts: Ints
    num_tokens: int
    top_k: int
    # The last of the spreads ends at the experts, and starts where `_slots` bring what belongs to (token, k).
    _spreads: tuple[Spread, ...]
    _slots: tuple[Exchange, ...] = ()

    @property
    def num_rows(self) -> int:
        """R."""
        return int(self.counts.sum())

    def dispatch(self, tokens: Array) -> Array:
        """tokens (T, H) of this rank; (R, H) for its experts: by expert, then source rank, then token."""
        return self.start_dispatch(tokens)()

    def start_dispatch(self, tokens: Array) -> Arriving:
        """`dispatch`; with two steps, the first is under way."""
        _check(tokens, "tokens", self.num_tokens)
        first = self._spreads[0].start_there(tokens)

        def arrived() -> Array:
            rows = first()
            for spread in self._spreads[1:]:
                rows = spread.there(rows)
            return rows

        return arrived

    def combine(self, rows: Array, weights: Array) -> Array:
        """(T, H): for each token the sum over k of weights[t, k] times the row of its k-th expert.

        rows (R, H) in the order in which `dispatch` gave them; weights (T, K) of this rank's tokens.
        """
        return self.start_combine(rows, weights)()

    def start_combine(self, rows: Array, weights: Array) -> Arriving:
        """`combine`; with two steps, the first is under way."""
        _check(rows, "rows", self.num_rows)
        self._check_weights(weights, rows)
        return self._start_gather(rows, lambda: self._weights_of_slots(weights))

    def dispatch_gradient(self, d_rows: Array) -> Array:
        """The gradient by tokens, (T, H), of a loss whose gradient by dispatched rows is d_rows (R, H)."""
        return self.start_dispatch_gradient(d_rows)()

    def start_dispatch_gradient(self, d_rows: Array) -> Arriving:
        """`dispatch_gradient`; with two steps, the first is under way."""
        _check(d_rows, "d_rows", self.num_rows)
        return self._start_gather(d_rows, lambda: None)

    def combine_gradient(self, d_out: Array, rows: Array, weights: Array) -> tuple[Array, Array]:
        """The gradients by rows, (R, H), and by weights, (T, K), for d_out (T, H), the gradient by the result.

        rows and weights are what `combine` was given: nothing else has to be kept.
        """
        _check(rows, "rows", self.num_rows)
        _check(d_out, "d_out", self.num_tokens)
        if d_out.dtype != rows.dtype or d_out.shape[1] != rows.shape[1]:
            raise ValueError(
                f"d_out has shape {d_out.shape} and dtype {d_out.dtype}, rows have shape {rows.shape} and dtype "
                f"{rows.dtype}: as gradient by their combination it must have as many columns and the same dtype"
            )
        self._check_weights(weights, rows)
        return self.start_combine_gradient(d_out)(rows, weights)

    def start_combine_gradient(self, d_out: Array) -> Callable[[Array, Array], tuple[Array, Array]]:
        """`combine_gradient`; what it returns is called with rows and weights."""
        arriving = self.start_dispatch(d_out)

        def arrived(rows: Array, weights: Array) -> tuple[Array, Array]:
            d_rows, last = arriving(), self._spreads[-1].exchange
            d_weights = last.back(scale_rows(d_rows, last.there(self._weights_of_slots(weights)), rows))
            for slots in reversed(self._slots):
                d_weights = slots.back(d_weights)
            return d_rows, d_weights.reshape(self.num_tokens, self.top_k)

        return arrived

    def _start_gather(self, rows: Array, slot_weights: Callable[[], Array | None]) -> Arriving:
        last = self._spreads[-1]
        returning = last.exchange.start_carry_back(rows)

        def arrived() -> Array:
            weights = slot_weights()
            gathered = last.add(returning(), weights)
            for spread in reversed(self._spreads[:-1]):
                gathered = spread.back(gathered)
            return gathered

        return arrived

    def _check_weights(self, weights: Array, rows: Array) -> None:
        check_array(weights, "weights")
        needed = wide_type(rows.dtype)
        if weights.shape != (self.num_tokens, self.top_k) or weights.dtype != needed:
            raise ValueError(
                f"weights have shape {weights.shape} and dtype {weights.dtype}, but this route has {self.num_tokens} "
                f"tokens with top_k {self.top_k}, and the rows are {rows.dtype}: they must have shape "
                f"{(self.num_tokens, self.top_k)} and dtype {needed}"
            )

    def _weights_of_slots(self, weights: Array) -> Array:
        values = weights.reshape(-1)
        for slots in self._slots:
            values = slots.there(values)
        return values


def _check(x: Array, name: str, rows: int) -> None:
    check_array(x, name)
    if x.dtype not in (np.float32, np.float64) and not is_half(x.dtype):
        raise TypeError(
            f"{name} have dtype {x.dtype}, but must be bfloat16, float16, float32 or float64: pass "
            f"{name}.astype('float32')"
        )
    if x.ndim != 2 or len(x) != rows:
        raise ValueError(
            f"{name} have shape {x.shape}, but this route was made for {rows} of them on this rank: the shape must be "
            f"({rows}, H), also where that is no row"
        )
