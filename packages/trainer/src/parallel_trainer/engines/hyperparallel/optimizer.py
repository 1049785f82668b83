"""AdamW on parameters that HyperParallel has sharded: each rank updates what it holds of them, with MindSpore."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import mindspore as ms
from mindspore import Tensor, mint, ops

from parallel_trainer.engines.hyperparallel.modules import local
from parallel_trainer.engines.hyperparallel.runtime import gradient_of, named_parameters


class AdamW:
    """`optim.adamw.AdamW` for modules' parameters; moments have the type of the part of a parameter that a rank holds.

    chunks: the rank's parts of the model, whose parameters may have been put in others' places since.
    decays: by the name of a weight whether it decays; what is not in it is not trained.
    """

    def __init__(
        self,
        chunks: Sequence[Any],
        decays: Mapping[str, bool],
        *,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
    ) -> None:
        self._chunks, self._decays = chunks, decays
        self._betas, self._eps, self._weight_decay = betas, eps, weight_decay
        self._moments: dict[str, tuple[Tensor, Tensor]] = {}
        self.steps = 0

    def step(self, lr: float) -> bool:
        """One update of every parameter that has a gradient; whether all values are finite after it."""
        self.steps += 1
        finite: list[Tensor] = []
        with ms._no_grad():
            for name, parameter in named_parameters(self._chunks):
                gradient = gradient_of(parameter)
                if name in self._decays and gradient is not None:
                    finite.append(self._update(name, local(parameter), gradient, lr))
            return not finite or bool(ops.stack(finite).all().asnumpy())

    def _update(self, name: str, value: Tensor, gradient: Tensor, lr: float) -> Tensor:
        """Update one parameter; a bool tensor without dimensions, whether it is finite after it."""
        if name not in self._moments:
            self._moments[name] = mint.zeros(value.shape, dtype=value.dtype), mint.zeros(value.shape, dtype=value.dtype)
        first, second = self._moments[name]

        def number(x: float) -> Tensor:
            return Tensor(x, value.dtype)

        beta1, beta2 = self._betas
        gradient = gradient.astype(value.dtype)
        first.copy_(first * number(beta1) + gradient * number(1 - beta1))
        second.copy_(second * number(beta2) + gradient * gradient * number(1 - beta2))
        scale1, scale2 = 1 - beta1**self.steps, 1 - beta2**self.steps
        change = first / (mint.sqrt(second / number(scale2)) + number(self._eps)) * number(lr / scale1)
        kept = 1 - lr * self._weight_decay if self._decays[name] else 1.0
        value.copy_(value * number(kept) - change)
        return mint.isfinite(value).all()
