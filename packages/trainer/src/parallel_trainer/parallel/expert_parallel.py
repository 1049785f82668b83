"""Expert parallelism: tokens travel to the ranks that hold their experts, and the results back.

Every rank of a pipeline stage has tokens of its own, tensor-parallel ranks too, and each of them sends its own. Experts
are split over the mesh axis `ep`; each rank's experts are cut once more over `efsdp`, as other weights are over `fsdp`.
How tokens travel is `moe_dispatch`'s.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from attrs import field, frozen
from device_mesh import Communicator, connect
from mindspore import Tensor
from mindspore.common import _Function
from moe_dispatch import AllToAllDispatcher, DeredundantDispatcher
from moe_dispatch.mindspore import start_combine, start_dispatch
from parallel_config import ParallelPlan

from parallel_trainer.batch import MicroBatch
from parallel_trainer.kernels.interface import Kernels
from parallel_trainer.models.section import ModelConfig
from parallel_trainer.parallel.fully_shard import AxisGroups, ShardedWeight
from parallel_trainer.parallel.routing_record import ExpertLoads, RoutingRecord

Dispatcher = AllToAllDispatcher | DeredundantDispatcher
Halves = tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]
"""What all tokens go through beside experts, in two steps."""


@frozen(eq=False)
class ExpertParallel:
    """The ranks that hold a model's experts, and what they do together.

    kernels:    what is computed on a rank.
    dispatcher: takes tokens to their experts; None where they are on the rank, or there are none.
    cp, tp:     the ranks that have other tokens of the same sequences.
    record:     is told what routers do.
    sequences:  how many the auxiliary loss is the mean over: those of the global batch.
    divisor:    what averaging divides gradients by (`ShardedWeights.divisor`); the loss carries it as a factor.
    """

    kernels: Kernels
    dispatcher: Dispatcher | None
    record: RoutingRecord
    cp: Communicator = field(factory=lambda: connect("single"))
    tp: Communicator = field(factory=lambda: connect("single"))
    sequences: int = 1
    divisor: int = 1

    @classmethod
    def none(cls, kernels: Kernels, layers: Sequence[str] = (), num_experts: int = 0) -> ExpertParallel:
        """No expert parallelism: one rank holds all experts of these layers."""
        return cls(kernels, None, RoutingRecord(layers, num_experts))

    def experts(
        self,
        layer: str,
        x_TH: Tensor,
        ids_TK: np.ndarray,
        weights_TK: Tensor,
        mlp: Callable[[Tensor, np.ndarray], Tensor],
        *,
        beside: Halves | None = None,
    ) -> Tensor:
        """The sum over k of weights[t, k] times what expert ids[t, k] makes of token t, (T, H), and what is `beside`.

        The first half of that is computed while tokens are on their way to experts, the second while results are on
        their way back; in the backward pass likewise.

        x (T, H) are this rank's tokens; mlp is what its experts make of rows in their order, of which each has so many,
        int64 (E/ep,). Collective over the expert-parallel ranks, forward and backward, whether or not a rank gets a
        token.
        """
        self.record.add_tokens(layer, ids_TK)
        if self.dispatcher is None:
            rows_RH, counts, order = self.kernels.permute(x_TH, ids_TK, self.record.num_experts)
            out_TH = self.kernels.unpermute(mlp(rows_RH, counts), weights_TK, order)
            return out_TH + beside[1](beside[0](x_TH)) if beside else out_TH
        route = self.dispatcher.route(ids_TK)
        arriving = start_dispatch(x_TH, route)
        half = beside[0](x_TH) if beside else x_TH
        rows_RH = mlp(arriving(), route.counts)
        returning = start_combine(rows_RH, weights_TK, route)
        beside_TH = beside[1](half) if beside else None
        out_TH = returning()
        return out_TH if beside_TH is None else out_TH + beside_TH

    def balanced(
        self,
        layer: str,
        weights_TK: Tensor,
        probabilities_TE: Tensor,
        ids_TK: np.ndarray,
        batch: MicroBatch,
        coefficient: float,
    ) -> Tensor:
        """`weights_TK`, whose backward pass adds the gradient of the sequence auxiliary loss to the probabilities'.

        Of a sequence of S tokens with E experts of which each token takes K, the loss is the sum over experts of f·P:
        f = E/(K·S) times the tokens that chose the expert, P the mean over tokens of its probability. Choices are
        counted over the ranks that share the sequence; the loss is a sum over them. Collective over these ranks.
        DeepSeek-V3, arXiv:2412.19437, equations 17 to 20.
        """
        if not coefficient:
            return weights_TK
        rows, per_row = batch.input_ids.shape
        experts = probabilities_TE.shape[1]
        tokens, chosen = ids_TK.shape
        row_T = (self.tp.rank * tokens + np.arange(tokens)) // per_row
        flat = (row_T[:, None] * experts + ids_TK).reshape(-1)
        counts = np.bincount(flat, minlength=rows * experts).reshape(rows, experts).astype(np.float64)
        for group in (self.cp, self.tp):
            counts = group.all_reduce(counts)
        length = per_row * self.cp.size
        of_token = coefficient * experts / (chosen * length) / (length * self.sequences)
        gradient_TE = (counts * of_token)[row_T]
        probabilities = probabilities_TE.asnumpy()
        self.record.add_loss(layer, float((gradient_TE * probabilities).sum()))
        gradient_TE = (gradient_TE * self.divisor).astype(probabilities.dtype)
        return _WithGradient.apply(weights_TK, probabilities_TE, gradient_TE)


def build_expert_parallel(
    kernels: Kernels,
    plan: ParallelPlan,
    model: ModelConfig,
    groups: AxisGroups,
    record: RoutingRecord,
    *,
    npus: int,
    divisor: int = 1,
) -> ExpertParallel:
    """What a plan asks for, with this rank's groups by mesh axis. Collective over the world.

    npus: of a node, for the dispatcher that goes through nodes (`npu_nums_per_device`).
    """
    routing = model.routing
    dispatcher: Dispatcher | None = None
    if routing and plan.ep > 1:
        if plan.moe_token_dispatcher_type == "alltoall_deredundancy":
            dispatcher = DeredundantDispatcher(groups["ep"], routing.experts, npus)
        else:
            dispatcher = AllToAllDispatcher(groups["ep"], routing.experts)
    return ExpertParallel(
        kernels,
        dispatcher,
        record,
        cp=groups["cp"],
        tp=groups["tp"],
        sequences=plan.global_batch_size,
        divisor=divisor,
    )


class _WithGradient(_Function):
    """The first tensor; the gradient of the second is an array that is known beforehand."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, other: Tensor, gradient: np.ndarray) -> Tensor:
        ctx.gradient = gradient
        return Tensor.from_numpy(x.asnumpy().copy())

    @staticmethod
    def backward(ctx: Any, d_x: Tensor) -> tuple[Tensor, Tensor, None]:
        return d_x, Tensor.from_numpy(ctx.gradient), None


def bias_change(loads: ExpertLoads, layer: str, rate: float) -> np.ndarray:
    """What the bias of a layer's router changes by, (E,): `rate` up for experts with fewer tokens than the mean, down
    for those with more. Wang et al., arXiv:2408.15664; DeepSeek-V3, arXiv:2412.19437, section 2.1.2.
    """
    tokens = loads.tokens_per_expert[loads.layers.index(layer)]
    return rate * np.sign(tokens.mean() - tokens)


def update_biases(biases: Mapping[str, ShardedWeight], loads: ExpertLoads, rate: float) -> None:
    """Move this rank's part of each router's bias, by layer, by its `bias_change`."""
    for layer, sharded in biases.items():
        start = sharded.holding.start
        sharded.values += bias_change(loads, layer, rate)[start : start + sharded.values.size]
