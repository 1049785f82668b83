"""FSDP and HSDP: weights live as flat shards and are gathered only while a unit runs.

What is sharded is the part of a weight that tensor or expert parallelism leaves to this rank; where several
tensor-parallel ranks hold the same part, their gradients are parts of a sum.
Shards are the master weights. Units may be given narrower ones (`param_dtype`, bfloat16 on Ascend): a shard is rounded
before it is gathered, so half as much is communicated, and gradients are widened before they are added to anything, on
this rank or another.
Method: ZeRO stage 3 (Rajbhandari et al., https://arxiv.org/abs/1910.02054), replicated over `dp_replicate` for HSDP.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Protocol

import numpy as np
from attrs import frozen
from device_mesh import Communicator, Request
from mindspore import Tensor, mint

from parallel_trainer.parallel.dtypes import MINDSPORE_DTYPES
from parallel_trainer.parallel.layout import Holding, WeightPart, holding, weight_part
from parallel_trainer.parallel.weights import Weight


class AxisGroups(Protocol):
    """This rank's group on each mesh axis: `device_mesh.AxisCommunicators`, or a plain dict."""

    def __getitem__(self, axis: str, /) -> Communicator: ...


def averaging_divisor(communicators: AxisGroups) -> int:
    """What averaging divides the sum of the ranks' gradients by: how many ranks have samples or tokens of their own."""
    return communicators["dp_replicate"].size * communicators["fsdp"].size


class ShardedWeight:
    """One weight on one rank: its piece of the flat shards, and a tensor that has memory only while in use.

    holding:  what this rank holds of the weight.
    slice:    where this rank's elements lie in the rank's flat arrays of values (and gradients, if trainable).
    dtype:    of the tensor.
    on_host:  whether the tensor's memory is the host's, where shards are, or a device's.
    tensor:   the whole part of the weight that the shard group holds together. Its memory is empty unless gathered.
    """

    def __init__(
        self, holding: Holding, group: Communicator, offset: int, dtype: np.dtype, *, on_host: bool = True
    ) -> None:
        self.holding = holding
        self.group = group
        self.slice = slice(offset, offset + holding.size)
        self.dtype = dtype
        self.on_host = on_host
        self.nbytes = holding.part.size * dtype.itemsize
        self.users = 0
        self._arriving: _Arriving | None = None
        self.values: np.ndarray
        self.tensor: Tensor

    @property
    def weight(self) -> Weight:
        """The whole weight's declaration."""
        return self.part.weight

    @property
    def part(self) -> WeightPart:
        """Which part of the weight the shard group holds together."""
        return self.holding.part

    @property
    def sizes(self) -> tuple[int, ...]:
        """Elements on each rank of the shard group; the last ranks may have fewer, or none."""
        return self.holding.sizes

    @property
    def stays(self) -> bool:
        """Whether there is nothing to gather: this rank's shard is the whole part, and the tensor is its memory."""
        return self.group.size == 1 and self.on_host and self.values.dtype == self.dtype

    def attach(self, values: np.ndarray) -> None:
        """Take this rank's elements of the flat values as memory, and make the tensor."""
        self.values = values[self.slice]
        if self.stays:
            self.tensor = Tensor.from_numpy(self.values.reshape(self.part.shape))
        else:
            # A tensor from an operator, because resizing the memory of one made from a NumPy array, or of a
            # Parameter, never gives memory back (MindSpore 2.10 on CPU: one weight's size lost per gather).
            self.tensor = mint.empty(self.part.shape, dtype=MINDSPORE_DTYPES[self.dtype])
            self.tensor.untyped_storage().resize_(0)

    def gather(self) -> None:
        """Start to fill the tensor from all shards (all-gather over the shard group), unless a user has it already."""
        self.users += 1
        if self.users == 1 and not self.stays:
            self.tensor.untyped_storage().resize_(self.nbytes)
            own = self.values.astype(self.dtype, copy=False)
            whole = self.tensor.asnumpy() if self.on_host else np.empty(self.part.shape, self.dtype)
            request = self.group.iall_gather(own, sizes=self.sizes, out=whole.reshape(-1))
            self._arriving = _Arriving(own, whole, request)

    def wait(self) -> None:
        """Return once the tensor is filled; each user of it must, after `gather` and before it reads."""
        if self._arriving:
            self._arriving.request.wait()
            if not self.on_host:
                self.tensor.copy_(Tensor.from_numpy(self._arriving.whole))
            self._arriving = None

    def release(self) -> None:
        """Free the tensor's memory when its last user is done."""
        self.users -= 1
        if self.users == 0 and not self.stays:
            self.tensor.untyped_storage().resize_(0)


@frozen(eq=False)
class _Arriving:
    """A weight on its way: what this rank sends, the whole that arrives, and neither may be touched meanwhile."""

    own: np.ndarray
    whole: np.ndarray
    request: Request


@frozen(eq=False)
class _Reducing:
    """A gradient on its way: all of it, and where this rank's piece of the sum arrives."""

    sharded: ShardedWeight
    mine: np.ndarray
    whole: np.ndarray
    request: Request


class ShardedWeights:
    """All weights of a model on this rank.

    values:    flat array of this rank's shards, trainable weights first.
    gradients: flat array of the trainable part's gradients, summed over the micro-batches of a step.
    divisor:   what averaging divides each gradient by; the loss carries it as a factor to make up for it.

    weights:        the model's weights; a weight that appears twice (tied) is one weight.
    communicators:  this rank's groups by mesh axis; `fsdp`, `dp_replicate` and `tp` are used, and for expert weights
        `efsdp` and `ep`.
    dtype:          float32 or float64, of values and gradients.
    param_dtype:    of the tensors that units are given of `narrow` weights; `dtype` if left out.
    on_host:        whether tensors are in host memory, where gathers can write; else each is copied to its device.
    seed:           of the initial values, which do not depend on how the weights are spread.
    sharers:        by name of a weight that other stages of a pipeline use as well: the ranks that hold the same shard.
    average:        average gradients over the group instead of summing (`disable_gradient_division: false`).
    """

    def __init__(
        self,
        weights: Iterable[Weight],
        *,
        communicators: AxisGroups,
        dtype: np.dtype,
        seed: int,
        param_dtype: np.dtype | None = None,
        on_host: bool = True,
        sharers: Mapping[str, Communicator] | None = None,
        average: bool = False,
    ) -> None:
        self._sharers = sharers or {}
        self._groups = communicators
        self.param_dtype = np.dtype(dtype if param_dtype is None else param_dtype)
        self.replicas, self.tp = communicators["dp_replicate"], communicators["tp"]
        self.divisor = averaging_divisor(communicators) if average else 1
        unique = {weight.name: weight for weight in weights}
        held = [holding(weight, communicators) for weight in unique.values()]
        self._by_name: dict[str, ShardedWeight] = {}
        size = self.trainable_size = 0
        # Weights of which equally many ranks hold the same part lie side by side: one reduction for each number.
        self._areas: dict[tuple[int, bool], slice] = {}
        for of_rank in sorted(held, key=lambda held: (not held.part.weight.trainable, *self._area(held.part))):
            weight, area = of_rank.part.weight, self._area(of_rank.part)
            group = communicators[weight.shard_axis]
            given = self.param_dtype if weight.narrow else np.dtype(dtype)
            sharded = ShardedWeight(of_rank, group, size, given, on_host=on_host)
            self._by_name[weight.name] = sharded
            size = sharded.slice.stop
            if weight.trainable:
                self.trainable_size = size
                self._areas[area] = slice(self._areas.get(area, sharded.slice).start, size)
        several = sorted({copies for copies, _ in self._areas if copies > 1})
        self._holders = {copies: self._holders_of(copies) for copies in several}
        self._reducing: list[_Reducing] = []
        self.values = np.empty(size, dtype)
        self.gradients = np.zeros(self.trainable_size, dtype)
        for sharded in self:
            sharded.attach(self.values)
            start = sharded.holding.start
            sharded.values[...] = sharded.part.initial_values(seed=seed, start=start, stop=start + sharded.values.size)

    def _area(self, part: WeightPart) -> tuple[int, bool]:
        return part.copies, part.weight.name in self._sharers

    def _holders_of(self, copies: int) -> Communicator:
        """The tensor-parallel ranks that hold the same parts as this one: neighbours."""
        return self.tp if copies == self.tp.size else self.tp.split(self.tp.rank // copies)

    def __iter__(self) -> Iterator[ShardedWeight]:
        return iter(self._by_name.values())

    def __contains__(self, name: str) -> bool:
        return name in self._by_name

    def __getitem__(self, name: str) -> ShardedWeight:
        return self._by_name[name]

    @property
    def trainable(self) -> tuple[ShardedWeight, ...]:
        """The weights that have a gradient."""
        return tuple(sharded for sharded in self if sharded.weight.trainable)

    def widened(self, gradient: np.ndarray) -> np.ndarray:
        """A gradient that came from a unit, in the dtype in which gradients are added up."""
        return gradient.astype(self.gradients.dtype, copy=False)

    def add_gradient(self, sharded: ShardedWeight, gradient: np.ndarray) -> None:
        """Start to reduce-scatter a whole gradient over the shard group, which must be left unchanged meanwhile.

        This rank's piece is added to `gradients` by `finish_reductions`; at once where there is nothing to reduce.
        """
        flat = np.ascontiguousarray(gradient).reshape(-1)
        if sharded.stays:
            self._add(sharded, flat)
        else:
            mine = np.empty_like(sharded.values)
            request = sharded.group.ireduce_scatter(flat, sizes=sharded.sizes, out=mine)
            self._reducing.append(_Reducing(sharded, mine, flat, request))

    def finish_reductions(self) -> None:
        """Wait for what `add_gradient` started, and add it up in that order."""
        for reducing in self._reducing:
            reducing.request.wait()
            self._add(reducing.sharded, reducing.mine)
        self._reducing.clear()

    def _add(self, sharded: ShardedWeight, mine: np.ndarray) -> None:
        self.gradients[sharded.slice] += mine if self.divisor == 1 else mine / self.divisor

    def finish_gradients(self) -> None:
        """Add up what all holders of the same elements found: after this gradients are the step's."""
        self.finish_reductions()
        for (copies, shared), where in self._areas.items():
            area = self.gradients[where]
            if copies > 1:
                self._holders[copies].all_reduce(area, out=area)
            if shared:
                self._stages().all_reduce(area, out=area)
        if self.replicas.size > 1:
            self.replicas.all_reduce(self.gradients, out=self.gradients)

    def norm_parts(self) -> Iterator[tuple[np.ndarray, int]]:
        """The gradients, each with how many ranks of the world hold the same elements: what `global_norm` takes."""
        for (copies, shared), area in self._areas.items():
            stages = self._stages().size if shared else 1
            yield self.gradients[area], copies * stages * self.replicas.size

    def _stages(self) -> Communicator:
        """The pipeline ranks of shared weights; a model shares them between its first and its last stage only."""
        return next(iter(self._sharers.values()))

    def full_value(self, name: str) -> np.ndarray:
        """The whole value of a weight; collective over the ranks that it is split over."""
        sharded = self[name]
        return self._whole(sharded.weight, sharded.group.all_gather(sharded.values, sizes=sharded.sizes))

    def _whole(self, weight: Weight, part: np.ndarray) -> np.ndarray:
        group = self._groups[weight.split_axis]
        if weight.split_dim is None or group.size == 1:
            return part.reshape(weight.shape)
        parts = [weight_part(weight, group.size, rank) for rank in range(group.size)]
        every = group.all_gather(part, sizes=[held.size for held in parts])
        whole = np.empty(weight.shape, part.dtype)
        ends = np.cumsum([held.size for held in parts])
        for held, values in zip(parts, np.split(every, ends[:-1]), strict=True):
            whole[held.index] = values.reshape(held.shape)
        return whole
