"""A whole model on one device with its weights as plain arrays: what tests and comparisons call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import mindspore as ms
import numpy as np
from mindspore import Tensor, ops

from parallel_trainer.batch import MicroBatch
from parallel_trainer.models.layers import Model
from parallel_trainer.models.unit import Unit
from parallel_trainer.parallel.weights import initial_values


def initial_weights(model: Model, *, seed: int, dtype: str = "float32") -> dict[str, np.ndarray]:
    """The weights that training starts from, by name."""
    return {weight.name: initial_values(weight, seed=seed).astype(dtype) for weight in model.weights}


def logits(model: Model, weights: Mapping[str, np.ndarray], input_ids: np.ndarray) -> np.ndarray:
    """Logits (B, S, V) for int ids (B, S), every row a sequence that starts at position 0."""
    positions = np.broadcast_to(np.arange(input_ids.shape[1]), input_ids.shape)
    return _forward(model, weights, MicroBatch(input_ids, positions))


def losses(model: Model, weights: Mapping[str, np.ndarray], batch: MicroBatch) -> np.ndarray:
    """The losses that `model.losses` names, each summed over the tokens of `batch` that count: (len(losses),)."""
    return _forward(model, weights, batch)


def _forward(model: Model, weights: Mapping[str, np.ndarray], batch: MicroBatch) -> np.ndarray:
    x = Tensor(batch.input_ids, ms.int32)
    with ms._no_grad():
        for unit in model.units:
            x = unit(x, batch, *_tensors(unit, weights))
        return x.asnumpy()


def loss_and_gradients(
    model: Model,
    weights: Mapping[str, np.ndarray],
    batch: MicroBatch,
    *,
    loss_weights: Sequence[float] | None = None,
) -> tuple[float, dict[str, np.ndarray]]:
    """The sum of `losses`, each times its weight (1 for all if left out), and its gradient for every weight trained."""
    inputs = [Tensor(batch.input_ids, ms.int32)]
    tensors = [_tensors(unit, weights) for unit in model.units]
    for unit, of_unit in zip(model.units, tensors, strict=True):
        unit.set_grad(True)
        inputs.append(unit(inputs[-1], batch, *of_unit))
    sums = inputs.pop().asnumpy()
    seeds = np.ones_like(sums) if loss_weights is None else np.asarray(loss_weights, sums.dtype)

    gradients: dict[str, np.ndarray] = {}
    dy = Tensor(seeds)
    for unit, x, of_unit in reversed(list(zip(model.units, inputs, tensors, strict=True))):
        dy, *of_weights = ops.GradOperation(get_all=True, sens_param=True)(unit)(x, batch, *of_unit, dy)
        for weight, gradient in zip(unit.weights, of_weights, strict=True):
            if weight.trainable:
                gradients[weight.name] = gradients.get(weight.name, 0) + gradient.asnumpy()
    return float(sums @ seeds), gradients


def _tensors(unit: Unit, weights: Mapping[str, np.ndarray]) -> list[Tensor]:
    return [Tensor(weights[weight.name]) for weight in unit.weights]
