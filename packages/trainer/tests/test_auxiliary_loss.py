"""The auxiliary losses of routers, held against their equations written out in float64 from probabilities alone."""

from __future__ import annotations

from typing import Literal

import mindspore as ms
import numpy as np
import pytest
from attrs import evolve, fields
from device_mesh import connect
from mindspore import Tensor, mint, nn, ops
from parallel_config import loads, plan
from parallel_config.schema import Model
from parallel_config.schema.setting import limit_of
from parallel_trainer.batch import MicroBatch
from parallel_trainer.kernels import kernels
from parallel_trainer.models.initial import InitialStd
from parallel_trainer.models.layers import Declare, Experts
from parallel_trainer.models.router import BALANCED_OVER, Routing, Tokens
from parallel_trainer.models.used import UsedTensors
from parallel_trainer.parallel.expert_parallel import ExpertParallel
from parallel_trainer.parallel.routing_record import RoutingRecord
from parallel_trainer.parallel.tensor_parallel import TensorParallel
from parallel_trainer.parallel.weights import initial_values
from parallel_trainer.trace import on_one_rank

ms.set_device("CPU")
ROWS, LENGTH, EXPERTS, CHOSEN, HIDDEN = 3, 40, 16, 4, 6
TOKENS = ROWS * LENGTH
COEFFICIENT = 0.5
SEQUENCES = 6
"""Of the global batch: two micro-batches."""
KINDS: tuple[Tokens, ...] = ("sequence", "micro_batch", "global_batch")
ROUTERS = {
    "plain": {},
    "groups": {"groups": 4, "topk_group": 2},
    "bias": {"bias": True},
    "both": {"groups": 4, "topk_group": 2, "bias": True},
}


def batch() -> MicroBatch:
    return MicroBatch(np.zeros((ROWS, LENGTH), np.int32), np.zeros((ROWS, LENGTH), np.int32))


def share(probabilities: np.ndarray) -> np.ndarray:
    """f of each expert, (E,): E/(K·T) times the tokens, (T, E), that have it among the K largest probabilities."""
    largest = [sorted(range(EXPERTS), key=lambda expert: -token[expert])[:CHOSEN] for token in probabilities]
    counts = [sum(expert in of_token for of_token in largest) for expert in range(EXPERTS)]
    return np.array(counts) * EXPERTS / (CHOSEN * len(probabilities))


def written_out(kind: Tokens, micro_batches: list[np.ndarray]) -> tuple[float, list[np.ndarray]]:
    """The loss of a global batch, and its slope in each probability, (T, E) for each micro-batch.

    Equations 17 to 20 of arXiv:2412.19437 for each sequence, or for the tokens of a micro-batch; for the global batch
    with f of the micro-batches so far. f is a constant for the slope. P is a mean over tokens.
    """
    total, slopes = 0.0, []
    for number, probabilities in enumerate(micro_batches):
        rows = probabilities.reshape(ROWS, LENGTH, EXPERTS)
        if kind == "sequence":
            terms = [(share(row), row.mean(axis=0)) for row in rows]
        elif kind == "micro_batch":
            terms = [(share(probabilities), probabilities.mean(axis=0))]
        else:
            so_far = np.concatenate(micro_batches[: number + 1])
            terms = [(share(so_far), probabilities.mean(axis=0))]
        weight = COEFFICIENT / (len(terms) * len(micro_batches))
        total += weight * sum(f @ mean for f, mean in terms)
        tokens = TOKENS // len(terms)
        slopes.append(np.repeat([weight * f / tokens for f, _ in terms], tokens, axis=0))
    return total, slopes


def routing(kind: Tokens, **fields: object) -> Routing:
    values = {"normalized": True, "balance": COEFFICIENT, "balanced_over": kind, "scoring": "sigmoid"} | fields
    return Routing(experts=EXPERTS, inner=4, top_k=CHOSEN, **values)  # type: ignore[arg-type]


def expert_parallel(divisor: int = 1) -> ExpertParallel:
    ep = ExpertParallel.none(kernels("cpu"), ["model.layers.0"], EXPERTS)
    return evolve(ep, sequences=SEQUENCES, divisor=divisor)


class Balanced(nn.Cell):
    """Weights times 3, with the auxiliary loss of probabilities, which are the second input."""

    def __init__(self, ep: ExpertParallel, of: Routing) -> None:
        super().__init__()
        self._ep, self._of = ep, of

    def construct(self, weights: Tensor, probabilities: Tensor, batch: MicroBatch) -> Tensor:
        balanced = self._ep.balanced("model.layers.0", weights, probabilities, batch, self._of)
        return mint.sum(balanced * 3.0 + 0.0 * mint.sum(probabilities))


@pytest.mark.parametrize("divisor", [1, 8])
@pytest.mark.parametrize("kind", KINDS)
def test_value_and_gradient_are_those_of_the_equations(kind: Tokens, divisor: int) -> None:
    generator = np.random.default_rng(0)
    micro_batches = [generator.random((TOKENS, EXPERTS)) ** 3 for _ in range(2)]
    ep = expert_parallel(divisor)
    cell = Balanced(ep, routing(kind))
    cell.set_grad()
    loss, slopes = written_out(kind, micro_batches)
    for probabilities, slope in zip(micro_batches, slopes, strict=True):
        inputs = (Tensor(np.ones((TOKENS, CHOSEN))), Tensor(probabilities), batch())
        assert cell(*inputs).asnumpy() == 3 * TOKENS * CHOSEN
        d_weights, d_probabilities = ops.GradOperation(get_all=True)(cell)(*inputs)
        np.testing.assert_array_equal(d_weights.asnumpy(), 3.0)
        np.testing.assert_allclose(d_probabilities.asnumpy(), divisor * slope, rtol=1e-12)
    assert ep.record.collect(connect("single")).balance_loss == pytest.approx(loss, rel=1e-13)


def test_one_micro_batch_is_balanced_as_the_global_batch_that_it_is() -> None:
    """Without accumulation the loss over the global batch is that over the micro-batch of all ranks."""
    probabilities = [np.random.default_rng(0).random((TOKENS, EXPERTS))]
    losses = [written_out(kind, probabilities)[0] for kind in KINDS]
    assert losses[1] == losses[2] != losses[0]


class OfLayer(nn.Cell):
    """The experts of a layer."""

    def __init__(self, part: Experts) -> None:
        super().__init__()
        self._part = part
        self._names = [weight.name.removeprefix("model.layers.0.") for weight in part.weights]
        self._tp = TensorParallel.none(kernels("cpu"))

    def construct(self, x_TH: Tensor, batch: MicroBatch, *weights: Tensor) -> Tensor:
        return self._part(x_TH, batch, UsedTensors(dict(zip(self._names, weights, strict=True)), self._tp, 1e-6))


def of_layer(of: Routing, x_TH: np.ndarray, bias: np.ndarray) -> tuple[float, np.ndarray, np.ndarray, np.ndarray]:
    """The auxiliary loss of a layer, the gradients of what comes in and of the router, and the tokens of each expert.

    The gradients are those of the sum of what comes out and of the auxiliary loss.
    """
    ep = expert_parallel()
    part = Experts("model.layers.0", Declare("model.layers.0.", InitialStd(0.5, 0.5)), HIDDEN, of, ep)
    values = {weight.name: initial_values(weight, seed=3) for weight in part.weights}
    values |= {name: bias for name in values if name.endswith("bias")}
    cell = OfLayer(part)
    cell.set_grad()
    inputs = (Tensor(x_TH), batch(), *map(Tensor, values.values()))
    cell(*inputs).asnumpy()
    d_x, d_gate, *_ = ops.GradOperation(get_all=True)(cell)(*inputs)
    loads = ep.record.collect(connect("single"))
    return loads.balance_loss, d_x.asnumpy(), d_gate.asnumpy(), loads.tokens_per_expert[0]


@pytest.mark.parametrize("scoring", ["sigmoid", "softmax"])
@pytest.mark.parametrize("router", ROUTERS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_router_with_bias_and_groups_is_balanced_by_its_plain_affinities(
    kind: Tokens, router: str, scoring: Literal["sigmoid", "softmax"]
) -> None:
    """Value, and gradient of the router and of hidden states, against the equations from affinities alone.

    Bias and groups steer half of the choices elsewhere, so that what is chosen would give another loss.
    """
    generator = np.random.default_rng(1)
    x, bias = generator.standard_normal((TOKENS, HIDDEN)), generator.standard_normal(EXPERTS)
    of = routing(kind, scoring=scoring, **ROUTERS[router])
    found, without = (of_layer(evolve(of, balance=balance), x, bias) for balance in (COEFFICIENT, 0.0))
    gate = initial_values(
        next(Declare("model.layers.0.", InitialStd(0.5, 0.5)).whole("mlp.gate", EXPERTS, HIDDEN)), seed=3
    )
    logits = x @ gate.T
    scores = 1 / (1 + np.exp(-logits)) if scoring == "sigmoid" else np.exp(logits)
    probabilities = scores / scores.sum(axis=1, keepdims=True)
    slope_of_score = scores * (1 - scores) if scoring == "sigmoid" else scores
    half, (slope, _) = written_out(kind, [probabilities] * 2)  # the second micro-batch is like the first
    d_scores = (slope - (slope * probabilities).sum(axis=1, keepdims=True)) / scores.sum(axis=1, keepdims=True)
    d_logits = d_scores * slope_of_score
    assert found[0] == pytest.approx(half / 2, rel=1e-13)
    assert without[0] == 0
    np.testing.assert_allclose(found[1] - without[1], d_logits @ gate, rtol=1e-7, atol=1e-12)
    np.testing.assert_allclose(found[2] - without[2], d_logits.T @ x, rtol=1e-7, atol=1e-12)
    of_chosen = EXPERTS / (CHOSEN * TOKENS) * found[3]
    elsewhere = np.abs(of_chosen - share(probabilities)).sum()
    assert elsewhere < 1e-12 if router == "plain" else elsewhere > 1


@pytest.mark.parametrize("kind", KINDS)
def test_of_equal_probabilities_the_first_experts_are_counted(kind: Tokens) -> None:
    ep = expert_parallel()
    cell = Balanced(ep, routing(kind))
    inputs = (Tensor(np.ones((TOKENS, CHOSEN))), Tensor(np.full((TOKENS, EXPERTS), 1 / EXPERTS)), batch())
    gradient = ops.GradOperation(get_all=True)(cell)(*inputs)[1].asnumpy()
    assert (gradient[:, :CHOSEN] > 0).all()
    assert (gradient[:, CHOSEN:] == 0).all()


def test_activations_that_are_computed_again_are_balanced_as_before_and_not_counted() -> None:
    record, batches = RoutingRecord(["layer"], 2), [batch() for _ in range(3)]
    calls: list[int] = []

    def count(number: int) -> np.ndarray:
        calls.append(number)
        return np.array([number, 10 * number])

    def of(number: int) -> list[int]:
        return record.chosen_so_far("layer", batches[number], lambda: count(number + 1)).tolist()  # type: ignore[no-any-return]

    assert [of(0), of(1), of(0), of(2), of(1)] == [[1, 10], [3, 30], [1, 10], [6, 60], [3, 30]]
    assert calls == [1, 2, 3]
    record.clear()
    assert of(2) == [3, 30]


@pytest.mark.parametrize(
    ("kind", "alone"), [("seq_aux_loss", 2), ("aux_loss", 2), ("global_aux_loss", 8), ("gbs_aux_loss", 8)]
)
def test_one_rank_that_is_compared_with_several_cuts_a_batch_as_the_loss_needs_it(kind: str, alone: int) -> None:
    """Four data-parallel ranks with three micro-batches of two samples each: as large, or as many."""
    config = loads(
        "training: {global_batch_size: 24, local_batch_size: 2}\nmodel: {model_type: qwen3_moe, "
        f"architectures: Qwen3MoeForCausalLM, moe_aux_loss_coeff: 0.1, moe_router_load_balancing_type: {kind}}}"
    )
    assert plan(config, 4).num_accumulation_steps == 3
    one = on_one_rank(config, 4)
    assert (one.training.local_batch_size, plan(one, 1).num_accumulation_steps) == (alone, 24 // alone)


def test_every_name_that_a_file_may_write_has_a_meaning_here() -> None:
    limit = limit_of(fields(Model).moe_router_load_balancing_type)
    assert limit is not None
    assert set(limit.options) == BALANCED_OVER.keys()
