"""A chunk of a model: units that this rank runs one after the other, forwards and later backwards."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import reduce

import mindspore as ms
import numpy as np
from attrs import frozen
from device_mesh import Traffic
from mindspore import Tensor, ops

from parallel_trainer.batch import MicroBatch
from parallel_trainer.kernels import later
from parallel_trainer.models.unit import Unit
from parallel_trainer.parallel.fully_shard import ShardedWeight, ShardedWeights
from parallel_trainer.parallel.prefetch import Prefetch


@frozen(eq=False)
class Tape:
    """What a forward pass leaves for its backward pass: the micro-batch and the input of every unit."""

    batch: MicroBatch
    inputs: tuple[Tensor, ...]


@frozen(eq=False)
class Products:
    """What `Chunk.backward_input` leaves for `Chunk.backward_weight`: for each unit, products by weight."""

    units: tuple[tuple[tuple[ShardedWeight, tuple[later.Product, ...]], ...], ...]


class Chunk:
    """Runs units over sharded weights. Several forwards may be under way before their backwards, in any order.

    units:   in the order they run.
    weights: where the units' weights live.
    reshard_after_forward: True frees a unit's weights after its forward and gathers them again for its backward;
        False keeps them from the first forward of a step until `end_step`, and adds up whole gradients until
        `reduce_gradients`: memory for communication.
    names:   of the units, for `traffic`.
    traffic: is told during which unit's part of the step something is communicated: "layers.3 forward", or
        "backward", "backward_input", "backward_weight".
    """

    def __init__(
        self,
        units: Sequence[Unit],
        weights: ShardedWeights,
        *,
        reshard_after_forward: bool,
        names: Sequence[str] | None = None,
        traffic: Traffic | None = None,
    ) -> None:
        self.units = tuple(units)
        self.names = tuple(names or (f"unit {index}" for index in range(len(units))))
        self.weights = weights
        self.reshard_after_forward = reshard_after_forward
        self._sharded = [tuple(weights[weight.name] for weight in unit.weights) for unit in units]
        # Each unit gets a tensor object of its own for the same memory: of a tensor that two cells take, as a tied head
        # does, MindSpore 2.10 differentiates one use and gives zeros for the other.
        self._tensors = [tuple(sharded.tensor.data for sharded in weights) for weights in self._sharded]
        self._traffic = traffic or Traffic()
        self._prefetch, self._evaluation = (
            Prefetch(self._sharded, weights, keep=keep, names=self.names, traffic=self._traffic)
            for keep in (not reshard_after_forward, False)
        )
        self._whole_gradients: dict[str, np.ndarray] = {}
        self._backwards = []
        for unit in self.units:
            unit.set_grad(True)
            self._backwards.append(ops.GradOperation(get_all=True, sens_param=True)(unit))

    def forward(self, x: Tensor, batch: MicroBatch) -> tuple[Tensor, Tape]:
        """Run every unit on `x` (the first chunk's is the token ids); returns the last unit's result and the tape."""
        inputs = []
        for index in self._prefetch.gathered(range(len(self.units)), "forward"):
            inputs.append(x)
            x = self.units[index](x, batch, *self._tensors[index])
            x.asnumpy()  # waits: operators run asynchronously and may still read the weights
        return x, Tape(batch, tuple(inputs))

    def evaluate(self, x: Tensor, batch: MicroBatch) -> Tensor:
        """What `forward` returns, with nothing kept for a backward: every unit's weights are freed after it."""
        with ms._no_grad():
            for index in self._evaluation.gathered(range(len(self.units)), "evaluation"):
                x = self.units[index](x, batch, *self._tensors[index])
                x.asnumpy()
        return x

    def backward(self, tape: Tape, gradient: Tensor) -> Tensor:
        """Given the gradient of `forward`'s result, add all weights' gradients and return the gradient of its `x`."""
        for index in self._prefetch.gathered(reversed(range(len(self.units))), "backward"):
            gradient, of_weights = self._backward(index, tape, gradient)
            self._add(zip(self._sharded[index], of_weights, strict=True))
        return gradient

    def backward_input(self, tape: Tape, gradient: Tensor) -> tuple[Tensor, Products]:
        """Like `backward`, but with the weights' matrix products left for `backward_weight`.

        Gradients that are no such product (of norms, biases, the embedding) are added at once.
        """
        left = []
        for index in self._prefetch.gathered(reversed(range(len(self.units))), "backward_input"):
            with later.put_off() as products:
                gradient, of_weights = self._backward(index, tape, gradient)
            found = [products.of(tensor) for tensor in self._tensors[index]]
            assert sum(map(len, found)) == len(products), (
                f"{self.names[index]} gives kernels other tensors than its weights"
            )
            of_unit = tuple(zip(self._sharded[index], of_weights, found, strict=True))
            self._add((sharded, of_weight) for sharded, of_weight, put_off in of_unit if not put_off)
            left.append(tuple((held, put_off) for held, _, put_off in of_unit if put_off and held.weight.trainable))
        return gradient, Products(tuple(left))

    def backward_weight(self, products: Products) -> None:
        """Compute what `backward_input` left, and add it to the weights' gradients."""
        for name, of_unit in zip(reversed(self.names), products.units, strict=True):
            with self._traffic.during(f"{name} backward_weight"):
                self._add([(sharded, reduce(np.add, (product() for product in found))) for sharded, found in of_unit])

    def _backward(self, index: int, tape: Tape, gradient: Tensor) -> tuple[Tensor, list[np.ndarray]]:
        """The gradients of a unit's input and of its weights."""
        gradient, *of_weights = self._backwards[index](tape.inputs[index], tape.batch, *self._tensors[index], gradient)
        gradient.asnumpy()
        return gradient, [self.weights.widened(of_weight.asnumpy()) for of_weight in of_weights]

    def reduce_gradients(self) -> None:
        """Reduce what was added up whole, after the last backward of a step."""
        self._prefetch.reduce((self.weights[name], gradient) for name, gradient in self._whole_gradients.items())
        self._whole_gradients.clear()

    def _add(self, of_unit: Iterable[tuple[ShardedWeight, np.ndarray]]) -> None:
        """Of a unit's weights those that are trainable get their gradients, now or when whole ones are reduced."""
        at_once = []
        for sharded, gradient in of_unit:
            name = sharded.weight.name
            if not sharded.weight.trainable:
                continue
            if self.reshard_after_forward or sharded.stays:
                at_once.append((sharded, gradient))
            elif name in self._whole_gradients:
                self._whole_gradients[name] += gradient
            else:
                self._whole_gradients[name] = gradient.copy()
        self._prefetch.reduce(at_once)

    def end_step(self) -> None:
        """Free what was kept gathered: the optimizer is about to change the shards."""
        self._prefetch.release_kept()
