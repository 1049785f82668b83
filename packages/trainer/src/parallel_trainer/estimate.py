"""What a plan costs a rank, from declarations and arithmetic: parameters, memory and communication of one step.

Parameters, what is kept in memory, and communication are counted as runs count them, and tests compare. What a unit of
a model keeps and receives for a micro-batch is said by the unit (`costs.py`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from itertools import accumulate, pairwise

from attrs import frozen
from device_mesh import ParallelMesh
from pipeline_schedule import Action, Kind, Overlap, Step
from pipeline_schedule.actions import flat

from parallel_trainer.costs import Costs, OnRank, all_reduce
from parallel_trainer.job import Job
from parallel_trainer.kernels import kernels
from parallel_trainer.models import build_model
from parallel_trainer.parallel.layout import Holding, MeshPlaces, WeightPart, holding
from parallel_trainer.parallel.pipeline import Order, schedule, stage_units, weight_ranks
from parallel_trainer.parallel.weights import Weight

KINDS = {
    "norm": "norms",
    "embed_tokens": "embedding",
    "lm_head": "head",
    "self_attn": "attention",
    "mlp.experts": "experts",
    "mlp.shared_experts": "shared experts",
    "mlp.gate.": "router",
    "mlp": "feed-forward",
}
"""Kinds of weights by a part of their names, of which the first counts."""

FURTHER = "multi-token prediction"
"""The kind of all that only the layer after the last one has."""


@frozen
class HeldWeight:
    """What one rank holds of a weight.

    kind:     which kind of weight it is, for a table.
    holding:  what that is.
    """

    kind: str
    holding: Holding

    @property
    def part(self) -> WeightPart:
        """What is left of the weight by tensor or expert parallelism."""
        return self.holding.part

    @property
    def shards(self) -> int:
        """Ranks over which the part is cut once more."""
        return len(self.holding.sizes)

    @property
    def elements(self) -> int:
        """Elements of the part on this rank."""
        return self.holding.size

    @property
    def trainable(self) -> bool:
        """Whether it has a gradient."""
        return self.part.weight.trainable


@frozen(eq=False)
class Estimate:
    """The cost of a job for one rank.

    job, rank: what is asked about.
    mesh:      its ranks.
    chunks:    by virtual stage, of the rank's, the weights of each unit in the order in which they run.
    costs:     by virtual stage what a micro-batch costs there.
    model_size: elements of the whole model.
    losses:    how many the model has.
    shared:    names of weights that two ranks of a pipeline share, the first and the last.
    """

    job: Job
    rank: int
    mesh: ParallelMesh
    chunks: Mapping[int, tuple[tuple[HeldWeight, ...], ...]]
    costs: Mapping[int, Costs]
    model_size: int
    losses: int
    shared: AbstractSet[str]

    @classmethod
    def of(cls, job: Job, rank: int = 0) -> Estimate:
        """For rank `rank` of the job's world."""
        mesh, plan = ParallelMesh(job.plan), job.plan
        kinds = {f"model.layers.{job.model.num_hidden_layers}.": FURTHER} | KINDS

        def held(weight: Weight) -> HeldWeight:
            kind = next(kind for text, kind in kinds.items() if text in weight.name)
            return HeldWeight(kind, holding(weight, MeshPlaces(mesh, rank)))

        on_rank = OnRank(
            plan,
            tp_rank=mesh.axis("tp").index(rank),
            tokens=plan.local_batch_size * job.seq_length // plan.cp,
            itemsize=job.dtype.itemsize,
            loss_parallel=job.config.parallelism.enable_loss_parallel,
        )
        model = build_model(job.config.model, kernels("cpu"))
        stages = stage_units(model.units, plan.stage_layers)
        own = [stage for stage, at in enumerate(plan.stage_ranks) if at == mesh.axis("pp").index(rank)]
        return cls(
            job,
            rank,
            mesh,
            chunks={stage: tuple(tuple(map(held, unit.weights)) for unit in stages[stage]) for stage in own},
            costs={stage: sum((unit.costs(on_rank) for unit in stages[stage]), Costs()) for stage in own},
            model_size=sum(weight.size for weight in model.weights),
            losses=len(model.losses),
            shared={name for name, ranks in weight_ranks(stages, plan.stage_ranks).items() if len(ranks) > 1},
        )

    @classmethod
    def largest(cls, job: Job) -> Estimate:
        """For a rank that needs the most memory: where sizes do not divide, the first ranks have the larger parts."""
        first_of_stages = ParallelMesh(job.plan).group("pp", 0)
        return max((cls.of(job, rank) for rank in first_of_stages), key=lambda found: sum(found.memory().values()))

    @property
    def units(self) -> tuple[tuple[HeldWeight, ...], ...]:
        """The weights of each unit that the rank runs."""
        return tuple(unit for chunk in self.chunks.values() for unit in chunk)

    @property
    def weights(self) -> tuple[HeldWeight, ...]:
        """Every weight once."""
        return _once(self.units)

    def parameters(self) -> Counter[str]:
        """Elements that the rank holds, by kind."""
        found: Counter[str] = Counter()
        for held in self.weights:
            found[held.kind] += held.elements
        return found

    def memory(self) -> dict[str, int]:
        """Bytes by what they are for, each when it is most; other working memory of kernels is left out.

        What experts keep is counted for even routing.
        """
        size, reshard = self.job.dtype.itemsize, self.job.plan.reshard_after_forward
        trained = sum(held.elements for held in self.weights if held.trainable)
        gathered = list(self._gathered_together()) if reshard else [self.weights]
        return {
            "parameters": sum(held.elements for held in self.weights) * size,
            "gradients": trained * size,
            "whole gradients": self._most_whole_gradients() * size,
            # Two moments, and whether weight decay applies.
            "optimizer state": trained * (2 * size + 1),
            "gathered parameters": max(sum(held.part.size for held in some if held.shards > 1) for some in gathered)
            * size,
            "activations": self._most_kept() * size,
            "logits at work": max(costs.at_work for costs in self.costs.values()) * size,
        }

    def communication(self) -> Counter[str]:
        """Bytes that the rank receives in a step, by mesh axis, as `device_mesh.Traffic` counts them.

        What travels over `ep` depends on where tokens go: it is counted for even routing, and its names say so.
        """
        found: Counter[str] = Counter()
        for axis, received in (*self._of_weights(), *self._of_micro_batches(), *self._of_numbers()):
            found[axis] += received
        return +found

    def _gathered_together(self) -> Iterator[tuple[HeldWeight, ...]]:
        """The weights of each unit and the next, which are on their way while it runs (`parallel/prefetch.py`)."""
        for chunk in self.chunks.values():
            for first in range(max(1, len(chunk) - 1)):
                yield _once(chunk[first : first + 2])

    def _most_whole_gradients(self) -> int:
        """Elements of the gradients of the unit whose backward pass runs, and of what is still to be reduced.

        That is the unit before, or, where gradients are added up before they are reduced, all units.
        """

        def own(unit: tuple[HeldWeight, ...]) -> int:
            return sum(held.part.size for held in unit if held.trainable)

        def sharded(unit: tuple[HeldWeight, ...]) -> int:
            return sum(held.part.size for held in unit if held.trainable and held.shards > 1)

        if not self.job.plan.reshard_after_forward:
            return max(map(own, self.units)) + sharded(self.weights)
        backwards = (Kind.BACKWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT)
        passes = (self.chunks[action.stage] for action in self._computations() if action.kind in backwards)
        turns = [unit for chunk in passes for unit in reversed(chunk)]
        return max(sharded(before) + own(unit) for before, unit in pairwise([(), *turns]))

    def _most_kept(self) -> int:
        """Elements kept when they are most: each micro-batch under way counts for the stages that it passed."""
        changes = {
            Kind.FORWARD: lambda costs: costs.kept,
            Kind.BACKWARD: lambda costs: -costs.kept,
            Kind.BACKWARD_INPUT: lambda costs: costs.left - costs.kept,
            Kind.BACKWARD_WEIGHT: lambda costs: -costs.left,
        }
        computations = (action for action in self._computations() if action.kind in changes)
        return max(accumulate(changes[action.kind](self.costs[action.stage]) for action in computations))

    def _computations(self) -> Iterator[Action]:
        """What the rank does in a step, in turn."""
        plan, order = self.job.plan, Order.of(self.job.config.parallelism)
        made = schedule(plan.pp, plan.interleave_num, plan.num_accumulation_steps, order)
        return _one_by_one(made.programs[self.mesh.axis("pp").index(self.rank)])

    def _of_weights(self) -> Iterator[tuple[str, int]]:
        plan, size = self.job.plan, self.job.dtype.itemsize
        if plan.reshard_after_forward:  # each use by a unit, forward and backward, in each micro-batch
            scattered = [held for unit in self.units for held in unit]
            # What the unit before uses too is still there when it is sent for.
            pairs = [pair for chunk in self.chunks.values() for pair in pairwise(((), *chunk))]
            gathered = [held for before, unit in pairs for held in unit if held not in before]
            scatters = plan.num_accumulation_steps
            gathers = 2 * scatters
        else:  # each weight, and its gradient from each chunk
            gathered = list(self.weights)
            scattered = [held for chunk in self.chunks.values() for held in _once(chunk)]
            gathers = scatters = 1
        for held in gathered:
            yield held.part.weight.shard_axis, gathers * (held.part.size - held.elements) * size
        for held in (held for held in scattered if held.trainable):
            yield held.part.weight.shard_axis, scatters * (held.shards - 1) * held.elements * size
        areas: Counter[tuple[int, bool]] = Counter()
        for held in (held for held in self.weights if held.trainable):
            areas[held.part.copies, held.part.weight.name in self.shared] += held.elements
        for (copies, shared), elements in areas.items():
            yield "tp", all_reduce(copies, elements * size)
            yield "pp", all_reduce(2 if shared else 1, elements * size)
        yield "dp_replicate", all_reduce(plan.dp_replicate, sum(areas.values()) * size)

    def _of_micro_batches(self) -> Iterator[tuple[str, int]]:
        plan, model = self.job.plan, self.job.model
        for axis, received in sum(self.costs.values(), Costs()).received.items():
            yield axis, plan.num_accumulation_steps * received
        # Activations from the stage before, gradients from the stage after, if that is on another rank.
        beside = [other for stage in self.costs for other in (stage - 1, stage + 1)]
        others = sum(0 <= other < len(plan.stage_layers) and other not in self.costs for other in beside)
        tokens = plan.num_accumulation_steps * plan.local_batch_size * self.job.seq_length // plan.cp // plan.tp
        yield "pp", others * tokens * model.hidden_size * self.job.dtype.itemsize

    def _of_numbers(self) -> Iterator[tuple[str, int]]:
        plan, model = self.job.plan, self.job.model
        # Valid tokens and the sums of the losses; the norm, and whether all weights are finite after the update.
        yield "loss", 2 * all_reduce(plan.data_parallel * plan.cp, 8 * self.losses)
        yield "pp", all_reduce(plan.pp, 8 * self.losses)
        yield "world", 2 * all_reduce(plan.world_size, 8)
        if model.routing and model.expert_layers:  # tokens of each expert, and the auxiliary loss
            yield "world", all_reduce(plan.world_size, 8 * len(model.expert_layers) * (model.routing.experts + 1))


def _once(units: Iterable[Iterable[HeldWeight]]) -> tuple[HeldWeight, ...]:
    return tuple({held.part.weight.name: held for unit in units for held in unit}.values())


def _one_by_one(program: Iterable[Step]) -> Iterator[Action]:
    """What a rank does in turn: a CPU does a backward and then the forward that may go on beside it."""
    for step in program:
        yield from (step.backward, step.forward) if isinstance(step, Overlap) else flat((step,))
