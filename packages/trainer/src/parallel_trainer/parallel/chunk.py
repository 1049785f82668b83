"""A chunk of a model: units that this rank runs one after the other, forwards and later backwards."""

from __future__ import annotations

from collections.abc import Sequence

from attrs import frozen
from device_mesh import Traffic
from mindspore import Tensor, ops

from parallel_trainer.batch import MicroBatch
from parallel_trainer.models.unit import Unit
from parallel_trainer.parallel.fully_shard import ShardedWeight, ShardedWeights


@frozen(eq=False)
class Tape:
    """What a forward pass leaves for its backward pass: the micro-batch and the input of every unit."""

    batch: MicroBatch
    inputs: tuple[Tensor, ...]


class Chunk:
    """Runs units over sharded weights. Several forwards may be under way before their backwards, in any order.

    units:   in the order they run.
    weights: where the units' weights live.
    reshard_after_forward: True frees a unit's weights after its forward and gathers them again for its backward;
        False keeps them from the first forward of a step until `end_step`.
    traffic: is told during which unit's forward or backward ("unit 1 forward") something is communicated.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        weights: ShardedWeights,
        *,
        reshard_after_forward: bool,
        traffic: Traffic | None = None,
    ) -> None:
        self.units = tuple(units)
        self.weights = weights
        self.reshard_after_forward = reshard_after_forward
        self._sharded = [tuple(weights[weight.name] for weight in unit.weights) for unit in units]
        self._traffic = traffic or Traffic()
        self._kept = [False] * len(self.units)
        self._backwards = []
        for unit in self.units:
            unit.set_grad(True)
            self._backwards.append(ops.GradOperation(get_all=True, sens_param=True)(unit))

    def forward(self, x: Tensor, batch: MicroBatch) -> tuple[Tensor, Tape]:
        """Run every unit on `x` (the first chunk's is the token ids); returns the last unit's result and the tape."""
        inputs = []
        for index, unit in enumerate(self.units):
            inputs.append(x)
            with self._traffic.during(f"unit {index} forward"):
                weights = self._gather(index)
                x = unit(x, batch, *(sharded.tensor for sharded in weights))
                x.asnumpy()  # waits: operators run asynchronously and may still read the weights
                self._release(index)
        return x, Tape(batch, tuple(inputs))

    def backward(self, tape: Tape, gradient: Tensor) -> Tensor:
        """Given the gradient of `forward`'s result, add all weights' gradients and return the gradient of its `x`."""
        for index in reversed(range(len(self.units))):
            with self._traffic.during(f"unit {index} backward"):
                weights = self._gather(index)
                tensors = (sharded.tensor for sharded in weights)
                gradient, *of_weights = self._backwards[index](tape.inputs[index], tape.batch, *tensors, gradient)
                gradient.asnumpy()
                for sharded, of_weight in zip(weights, of_weights, strict=True):
                    if sharded.weight.trainable:
                        self.weights.add_gradient(sharded, of_weight.asnumpy())
                self._release(index)
        return gradient

    def end_step(self) -> None:
        """Free what was kept gathered: the optimizer is about to change the shards."""
        for index, kept in enumerate(self._kept):
            if kept:
                self._kept[index] = False
                for sharded in self._sharded[index]:
                    sharded.release()

    def _gather(self, index: int) -> tuple[ShardedWeight, ...]:
        weights = self._sharded[index]
        for sharded in weights:
            sharded.gather()
        if not self.reshard_after_forward and not self._kept[index]:
            self._kept[index] = True
            for sharded in weights:
                sharded.gather()
        return weights

    def _release(self, index: int) -> None:
        for sharded in self._sharded[index]:
            sharded.release()
