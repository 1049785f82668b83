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
from parallel_trainer.models.router import Routing
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
    loss:       the ranks that have other sequences of the global batch, or with cp above 1 other tokens of them.
    record:     is told what routers do.
    sequences:  how many the global batch has; the auxiliary loss is the mean over their tokens.
    divisor:    what averaging divides gradients by (`ShardedWeights.divisor`); the loss carries it as a factor.
    """

    kernels: Kernels
    dispatcher: Dispatcher | None
    record: RoutingRecord
    cp: Communicator = field(factory=lambda: connect("single"))
    tp: Communicator = field(factory=lambda: connect("single"))
    loss: Communicator = field(factory=lambda: connect("single"))
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
        self, layer: str, weights_TK: Tensor, probabilities_TE: Tensor, batch: MicroBatch, routing: Routing
    ) -> Tensor:
        """`weights_TK`, whose backward pass adds the gradient of the auxiliary loss to the probabilities'.

        Of T tokens that are balanced together the loss is the coefficient times the sum over E experts of f·P. P is
        the mean over tokens of the expert's probability, and f = E/(K·T) times the tokens with that probability among
        their K largest: what the router would choose without bias and groups, of equal probabilities the first.
        f has no gradient. The loss of the global batch is the mean over its sequences, or over its micro-batches; for
        "global_batch" (`Routing.balanced_over`) with f over a micro-batch of all ranks and those before it in the step.
        Either way a probability's gradient is f times the coefficient over the number of tokens of the global batch.

        Collective over the ranks whose tokens are balanced together. DeepSeek-V3, arXiv:2412.19437, equations 17 to
        20, for sequences; Fedus et al., arXiv:2101.03961, equation 4, for micro-batches; Qiu et al., arXiv:2501.11873,
        for the global batch.
        """
        ids_TK = self.kernels.choose_experts(probabilities_TE, top_k=routing.top_k)
        load_TE = self._load(layer, ids_TK, batch, routing)
        length = batch.input_ids.shape[1] * self.cp.size
        gradient_TE = routing.balance / (length * self.sequences) * load_TE
        probabilities = probabilities_TE.asnumpy()
        self.record.add_loss(layer, float((gradient_TE * probabilities).sum()))
        gradient_TE = (gradient_TE * self.divisor).astype(probabilities.dtype)
        return _WithGradient.apply(weights_TK, probabilities_TE, gradient_TE)

    def _load(self, layer: str, ids_TK: np.ndarray, batch: MicroBatch, routing: Routing) -> np.ndarray:
        """For each of this rank's tokens the share of each expert in the choices of the tokens that it is balanced
        with, 1 on average, (T, E)."""
        rows, per_row = batch.input_ids.shape
        tokens, experts = len(ids_TK), routing.experts
        row_T = np.zeros(tokens, np.int64)
        if routing.balanced_over == "sequence":
            row_T = (self.tp.rank * tokens + np.arange(tokens)) // per_row
        else:
            rows = 1
        flat = (row_T[:, None] * experts + ids_TK).reshape(-1)
        own = np.bincount(flat, minlength=rows * experts).reshape(rows, experts).astype(np.float64)
        if routing.balanced_over == "global_batch":
            counts = self.record.chosen_so_far(layer, batch, lambda: self.tp.all_reduce(self.loss.all_reduce(own)))
        else:
            counts = self.tp.all_reduce(self.cp.all_reduce(own))
        return (experts * counts / counts.sum(axis=1, keepdims=True))[row_T]


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
        loss=groups["loss"],
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
