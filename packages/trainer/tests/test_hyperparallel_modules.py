"""The modules that own parameters, on one rank without HyperParallel: losses and gradients are those of plain units."""

from __future__ import annotations

from typing import NamedTuple

import mindspore as ms
import numpy as np
import pytest
from device_mesh import connect
from mask_compression import from_lengths
from mindspore import Parameter, Tensor, nn
from parallel_config import loads, plan
from parallel_trainer.batch import IGNORED_LABEL, MicroBatch, look_ahead
from parallel_trainer.engines.hyperparallel import modules
from parallel_trainer.engines.hyperparallel.blocks import rank_chunks
from parallel_trainer.engines.hyperparallel.inputs import micro_batch, tensors
from parallel_trainer.engines.hyperparallel.layer import Positions, walk
from parallel_trainer.engines.hyperparallel.model import Chunk
from parallel_trainer.engines.hyperparallel.modules import Borders, Logits, Owner, RowLinear, Table
from parallel_trainer.engines.hyperparallel.routing import ForwardRecord
from parallel_trainer.kernels import kernels
from parallel_trainer.models import build_model
from parallel_trainer.models.single import loss_and_gradients
from parallel_trainer.parallel.pipeline import stage_units
from parallel_trainer.parallel.weights import Weight, initial_values

ROWS, TOKENS, SEED = 2, 8, 5
QWEN = """model_type: qwen3, architectures: Qwen3ForCausalLM, vocab_size: 29, seq_length: 8, hidden_size: 16,
    intermediate_size: 24, num_hidden_layers: 2, num_attention_heads: 4, num_key_value_heads: 2, head_dim: 4,
    attention_bias: true"""
QWEN_MOE = """model_type: qwen3_moe, architectures: Qwen3MoeForCausalLM, vocab_size: 29, seq_length: 8, hidden_size: 16,
    intermediate_size: 24, num_hidden_layers: 2, num_attention_heads: 4, num_key_value_heads: 2, head_dim: 4,
    num_experts: 4, num_experts_per_tok: 2, moe_intermediate_size: 8, norm_topk_prob: true, moe_aux_loss_coeff: 0.5"""
DEEPSEEK = """model_type: deepseek_v3, architectures: DeepseekV3ForCausalLM, vocab_size: 29, seq_length: 8,
    hidden_size: 16, intermediate_size: 24, num_hidden_layers: 2, num_attention_heads: 2, q_lora_rank: 6,
    kv_lora_rank: 4, qk_nope_head_dim: 4, qk_rope_head_dim: 4, v_head_dim: 4, n_routed_experts: 8, n_group: 2,
    topk_group: 1, num_experts_per_tok: 2, moe_intermediate_size: 8, first_k_dense_replace: 1, n_shared_experts: 1,
    moe_aux_loss_coeff: 0.5"""
MODELS = {
    "qwen3": QWEN,
    "qwen3_moe": f"{QWEN_MOE}, moe_router_load_balancing_type: global_aux_loss",
    "deepseek_v3": f"{DEEPSEEK}, num_nextn_predict_layers: 0, moe_router_load_balancing_type: aux_loss",
    "deepseek_v3 further": f"{DEEPSEEK}, num_nextn_predict_layers: 1",
}


def value(weight: Weight) -> Tensor:
    """Its initial value, and a bias that is not 0."""
    noise = np.random.default_rng(len(weight.name)).normal(0, 0.1, weight.shape)
    return Tensor(initial_values(weight, seed=SEED) + noise)


def batch() -> MicroBatch:
    """Two rows, one of them two documents; a label that is ignored and a mask that is not 1 everywhere."""
    generator = np.random.default_rng(1)
    ids, labels = (generator.integers(0, 29, (ROWS, TOKENS)).astype(np.int32) for _ in range(2))
    labels[1, 3] = IGNORED_LABEL
    mask = generator.choice([0.0, 1.0, 0.5], (ROWS, TOKENS)).astype(np.float32)
    documents = from_lengths([[3, 5], [8]])
    return MicroBatch(ids, documents.position_ids(), labels, mask, documents)


@pytest.mark.parametrize("name", MODELS)
def test_losses_and_gradients_are_those_of_units(name: str) -> None:
    section = loads(f"model: {{{MODELS[name]}}}").model
    cpu = kernels("cpu")
    model, of_modules = build_model(section, cpu), build_model(section, cpu)
    rows = batch() if len(model.losses) == 1 else look_ahead(batch())
    weights = {weight.name: value(weight).asnumpy() for weight in model.weights}
    factors = (0.25, 0.75)[: len(model.losses)]
    expected, gradients = loss_and_gradients(model, weights, rows, loss_weights=factors)

    chunk = Chunk(of_modules, of_modules.units, value, cpu, Positions(), ForwardRecord())
    parameters = {name: parameter for name, parameter in chunk.parameters_and_names() if parameter.requires_grad}

    chunk.start_step(factors)
    of_parameters = ms.value_and_grad(lambda: chunk(**tensors([rows])), None, weights=list(parameters.values()))
    loss, found = of_parameters()
    np.testing.assert_allclose(loss.asnumpy(), expected, rtol=1e-12)
    np.testing.assert_allclose(chunk.sums @ factors, expected, rtol=1e-12)
    assert parameters.keys() == gradients.keys()
    for (parameter, _), gradient in zip(parameters.items(), found, strict=True):
        np.testing.assert_allclose(gradient.asnumpy(), gradients[parameter], rtol=1e-12, atol=1e-14, err_msg=parameter)


@pytest.mark.parametrize("name", MODELS)
def test_a_rank_s_chunks_have_the_modules_and_parameters_that_calls_name(name: str) -> None:
    stages = "pipeline_parallel: 2, pipeline_parallel_layers_per_stage: auto" if "further" not in name else ""
    config = loads(
        f"model: {{{MODELS[name]}}}\nparallelism: {{{stages}}}\ntraining: {{global_batch_size: 4, local_batch_size: 1}}"
    )
    made = plan(config, 2)
    model = build_model(config.model, kernels("cpu"))
    units = stage_units(model.units, made.stage_layers)
    for rank, chunks in enumerate(rank_chunks(config, made)):
        held = [of for stage, of in zip(made.stage_ranks, units, strict=True) if stage == rank]
        for blocks, of in zip(chunks, held, strict=True):
            chunk = Chunk(model, of, value, kernels("cpu"), Positions(), ForwardRecord())
            wanted = {
                f"{block.module.name}.{name}": weight for block in blocks for name, weight in block.weights.items()
            }
            found = dict(chunk.parameters_and_names())
            assert found.keys() == wanted.keys()
            for name, weight in wanted.items():
                assert (found[name].shape, found[name].requires_grad) == (weight.shape, weight.trainable)
            for block in blocks:
                assert all(isinstance(walk(chunk, block.module.inner(name).name), nn.Cell) for name in block.modules)


def test_a_micro_batch_comes_back_from_its_tensors() -> None:
    first, second = look_ahead(batch()), look_ahead(batch())
    found = tensors([first, second])
    assert {name: tensor.shape[0] for name, tensor in found.items()} == dict.fromkeys(found, 2 * ROWS)
    ahead = [found[f"ahead_{name}"][ROWS:] for name in ("input_ids", "labels", "loss_mask")]
    names = ("input_ids", "position_ids", "labels", "loss_mask", "document_ends")
    back = micro_batch(*(found[name][ROWS:] for name in names), ahead=tuple(ahead))
    assert back.mask == second.mask
    assert back.ahead is not None
    for one, other in ((back, second), (back.ahead, second.ahead)):
        for name in names[:-1]:
            np.testing.assert_array_equal(getattr(one, name), getattr(other, name))
    assert back.counts(2).tolist() == second.counts(2).tolist()


def test_tokens_that_are_routed_again_in_a_backward_pass_do_not_count() -> None:
    record = ForwardRecord(["layer"], 3)
    with record.forward():
        record.add_tokens("layer", np.array([[0, 2], [2, 1]]))
        record.add_loss("layer", 0.5)
    record.add_tokens("layer", np.array([[0, 2], [2, 1]]))
    record.add_loss("layer", 0.5)
    loads = record.collect(connect("single"))
    assert loads.tokens_per_expert.tolist() == [[1, 1, 2]]
    assert loads.balance_loss == 0.5


class OfRanks:
    """A mesh of three ranks, this one being the second; what is distributed over it is written down."""

    def size(self) -> int:
        return 3

    def get_local_rank(self) -> int:
        return 1


class Distributed(NamedTuple):
    local: Tensor
    placement: str

    @classmethod
    def from_local(cls, local: Tensor, mesh: OfRanks, placements: tuple[str]) -> Distributed:
        return cls(local, *placements)

    def to_local(self) -> Tensor:
        return self.local


def test_what_a_rank_of_tensor_parallelism_returns_is_a_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sum over ranks of a row-split product, bias once; a part of the vocabulary; own tokens of a whole table."""
    stand_in = {"DTensor": Distributed, "Shard": lambda dim: f"Shard({dim})", "Partial": lambda: "Partial()"}
    monkeypatch.setattr(modules, "imported", lambda name: stand_in[name.path.rpartition(".")[2]])
    cpu, borders = kernels("cpu"), Borders(OfRanks())
    generator = np.random.default_rng(0)
    weight, bias, x = (generator.normal(size=shape) for shape in ((6, 9), (6,), (6, 9)))

    def holding(kind: type[Owner], of_rank: dict[str, np.ndarray], whole: dict[str, np.ndarray]) -> Owner:
        owner = kind(cpu, borders, {name: Tensor(value) for name, value in whole.items()})
        for name, value in of_rank.items():
            owner._params[name] = Parameter(Tensor(value), name=name)
        return owner

    parts = []
    for rank in range(3):
        columns = slice(3 * rank, 3 * rank + 3)
        rows = holding(RowLinear, {"weight": weight[:, columns].copy()}, {"weight": weight, "bias": bias})
        parts.append(borders.summand(rows(Tensor(x[:, columns].copy()))))
    assert {part.placement for part in parts} == {"Partial()"}
    np.testing.assert_allclose(sum(part.local.asnumpy() for part in parts), x @ weight.T + bias, rtol=1e-5)

    split = holding(Logits, {"weight": weight[2:4].copy()}, {"weight": weight})(Tensor(x))
    np.testing.assert_allclose(split.local.asnumpy(), x @ weight[2:4].T)
    assert split.placement == "Shard(1)"
    assert holding(Logits, {}, {"weight": weight})(Tensor(x)).shape == (6, 6)

    ids = Tensor(np.array([5, 0, 2, 3, 1, 4], np.int32))
    table = holding(Table, {"weight": weight[2:4].copy()}, {"weight": weight})(ids)
    expected = np.where(np.isin(ids.asnumpy(), (2, 3))[:, None], weight[ids.asnumpy()], 0)
    np.testing.assert_array_equal(table.local.asnumpy(), expected)
    assert table.placement == "Partial()"
    np.testing.assert_array_equal(holding(Table, {}, {"weight": weight})(ids).asnumpy(), weight[[2, 3]])
