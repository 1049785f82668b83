"""A whole model on one device with its weights as plain arrays: what tests and comparisons call."""

from __future__ import annotations

from collections.abc import Mapping

import mindspore as ms
import numpy as np
from mindspore import Tensor, ops

from parallel_trainer.batch import MicroBatch
from parallel_trainer.models.qwen3 import Qwen3
from parallel_trainer.models.unit import Unit
from parallel_trainer.parallel.weights import initial_values


def initial_weights(model: Qwen3, *, seed: int, dtype: str = "float32") -> dict[str, np.ndarray]:
    """The weights that training starts from, by name."""
    return {weight.name: initial_values(weight, seed=seed).astype(dtype) for weight in model.weights}


def logits(model: Qwen3, weights: Mapping[str, np.ndarray], input_ids: np.ndarray) -> np.ndarray:
    """Logits (B, S, V) for int ids (B, S), every row a sequence that starts at position 0."""
    batch = MicroBatch(input_ids, np.broadcast_to(np.arange(input_ids.shape[1]), input_ids.shape))
    x = Tensor(input_ids, ms.int32)
    with ms._no_grad():
        for unit in model.units:
            x = unit(x, batch, *_tensors(unit, weights))
        return x.asnumpy()


def loss_and_gradients(
    model: Qwen3, weights: Mapping[str, np.ndarray], batch: MicroBatch
) -> tuple[float, dict[str, np.ndarray]]:
    """The loss summed over the tokens of `batch` that count, and its gradient for every weight."""
    inputs = [Tensor(batch.input_ids, ms.int32)]
    tensors = [_tensors(unit, weights) for unit in model.units]
    for unit, of_unit in zip(model.units, tensors, strict=True):
        unit.set_grad(True)
        inputs.append(unit(inputs[-1], batch, *of_unit))
    loss = inputs.pop()

    gradients: dict[str, np.ndarray] = {}
    dy = Tensor(np.ones(loss.shape, loss.asnumpy().dtype))
    for unit, x, of_unit in reversed(list(zip(model.units, inputs, tensors, strict=True))):
        dy, *of_weights = ops.GradOperation(get_all=True, sens_param=True)(unit)(x, batch, *of_unit, dy)
        for weight, gradient in zip(unit.weights, of_weights, strict=True):
            gradients[weight.name] = gradients.get(weight.name, 0) + gradient.asnumpy()
    return float(loss.asnumpy().sum()), gradients


def _tensors(unit: Unit, weights: Mapping[str, np.ndarray]) -> list[Tensor]:
    return [Tensor(weights[weight.name]) for weight in unit.weights]
