"""AdamW on this rank's flat shards (Loshchilov & Hutter, https://arxiv.org/abs/1711.05101)."""

from __future__ import annotations

import numpy as np

# Elements that one pass works on: four arrays of this length stay in a core's cache.
_BLOCK = 1 << 15


class AdamW:
    """Decoupled weight decay and bias-corrected moments, in place on flat arrays.

    values: float (n,), the weights; updated in place by `step`.
    decay:  bool (n,) or None for all: the elements that weight decay applies to.
    eps:    more than 0 in the values' dtype: what has a gradient of 0 is divided by it alone.
    The moments have the dtype of the values: 2·n elements of state.

    Raises ValueError for another eps.
    """

    def __init__(
        self,
        values: np.ndarray,
        *,
        decay: np.ndarray | None = None,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
    ) -> None:
        if not values.dtype.type(eps) > 0:
            raise ValueError(f"AdamW: eps {eps} is not more than 0 in {values.dtype}, and a gradient of 0 gives 0/0")
        self.values = values
        self.decay = decay
        self.betas = betas
        self.eps = eps
        self.weight_decay = weight_decay
        self.first_moment = np.zeros_like(values)
        self.second_moment = np.zeros_like(values)
        self.steps = 0

    def step(self, gradients: np.ndarray, *, lr: float) -> bool:
        """One update; whether all values are finite after it.

        gradients: (n,) of the values' dtype, not changed; finite, and so are their squares.
        """
        with np.errstate(over="ignore", invalid="ignore"):  # what comes of it is looked at
            return self._step(gradients, lr)

    def _step(self, gradients: np.ndarray, lr: float) -> bool:
        self.steps += 1
        finite = True
        beta1, beta2 = self.betas
        scale1, scale2 = 1.0 - beta1**self.steps, 1.0 - beta2**self.steps
        scratch = np.empty(min(_BLOCK, self.values.size), self.values.dtype)
        for start in range(0, self.values.size, _BLOCK):
            block = slice(start, start + _BLOCK)
            value, gradient = self.values[block], gradients[block]
            first, second = self.first_moment[block], self.second_moment[block]
            buffer = scratch[: value.size]
            if self.weight_decay and lr:
                factor = 1.0 - lr * self.weight_decay
                value *= factor if self.decay is None else np.where(self.decay[block], factor, 1.0)
            first *= beta1
            np.multiply(gradient, 1.0 - beta1, out=buffer)
            first += buffer
            second *= beta2
            np.multiply(gradient, gradient, out=buffer)
            buffer *= 1.0 - beta2
            second += buffer
            np.divide(second, scale2, out=buffer)
            np.sqrt(buffer, out=buffer)
            buffer += self.eps
            np.divide(first, buffer, out=buffer)
            buffer *= lr / scale1
            value -= buffer
            finite = finite and bool(np.isfinite(value).all())
        return finite
