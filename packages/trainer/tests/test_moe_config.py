"""Which sections with experts can be built, and what is refused of them."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from parallel_config import fields_without_effect, loads
from parallel_config.schema.model import MODEL_DEFAULTS
from parallel_trainer.models.config import (
    CONFIGS,
    DeepseekV3Config,
    Qwen3MoeConfig,
    UnsupportedModelError,
    model_config,
)
from parallel_trainer.models.rope import Yarn, frequencies

SIZES = {
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 8,
}
QWEN = SIZES | {"num_key_value_heads": 2, "head_dim": 8, "num_experts": 8}
DEEPSEEK = SIZES | {
    "kv_lora_rank": 6,
    "qk_nope_head_dim": 4,
    "qk_rope_head_dim": 2,
    "v_head_dim": 3,
    "n_routed_experts": 16,
}
SHIPPED = Path(__file__).parents[2] / "parallel-config/tests/data/pretrain_deepseek3_1b_8p_pynative.yaml"


def qwen(**fields):
    return SimpleNamespace(**{"model_type": "qwen3_moe", "extra": {}, **QWEN, **fields})


def deepseek(**fields):
    return SimpleNamespace(**{"model_type": "deepseek_v3", "extra": {}, **DEEPSEEK, **fields})


def refusal(section):
    with pytest.raises(UnsupportedModelError) as caught:
        model_config(section)
    return str(caught.value)


def test_silent_fields_have_the_defaults_of_the_format():
    for model_type, section in (("qwen3_moe", qwen()), ("deepseek_v3", deepseek())):
        config, defaults = model_config(section), MODEL_DEFAULTS[model_type]
        silent = defaults.keys() & {field.name for field in type(config).__attrs_attrs__} - vars(section).keys()
        silent -= {"q_lora_rank"}  # null says something in a file, so that silence and null have to differ
        assert {"norm_topk_prob", "moe_aux_loss_coeff", "rms_norm_eps"} <= silent
        assert {name: getattr(config, name) for name in silent} == {name: defaults[name] for name in silent}


def test_dense_layers_of_qwen():
    config = model_config(qwen(decoder_sparse_step=2, mlp_only_layers=[3]))
    assert [config.has_experts(layer) for layer in range(4)] == [False, True, False, False]
    assert config.expert_layers == ("model.layers.1",)
    assert "mlp_only_layers is [0, 4]: layers count from 0 to 3; remove 4." in refusal(qwen(mlp_only_layers=[0, 4]))


def test_dense_layers_of_deepseek():
    assert [model_config(deepseek()).has_experts(layer) for layer in range(4)] == [False, False, False, True]
    spaced = model_config(deepseek(first_k_dense_replace=0, moe_layer_freq=2))
    assert [spaced.has_experts(layer) for layer in range(4)] == [True, False, True, False]
    assert spaced.expert_layers == ("model.layers.0", "model.layers.2", "model.layers.4")
    assert model_config(deepseek(num_nextn_predict_layers=0)).expert_layers == ("model.layers.3",)


def test_routing_says_what_the_file_says():
    routing = model_config(
        deepseek(n_shared_experts=2, n_group=4, topk_group=2, moe_aux_loss_coeff=0.01, routed_scaling_factor=1.5)
    ).routing
    assert (routing.experts, routing.top_k, routing.groups, routing.topk_group) == (16, 2, 4, 2)
    assert (routing.scoring, routing.scaling, routing.shared, routing.bias) == ("sigmoid", 1.5, 16, True)
    assert routing.balance == 0.01
    assert model_config(deepseek(moe_router_load_balancing_type="none", moe_aux_loss_coeff=1)).routing.balance == 0
    assert model_config(qwen(norm_topk_prob=True)).routing.normalized


@pytest.mark.parametrize("make", [qwen, deepseek])
@pytest.mark.parametrize(
    ("kind", "tokens"),
    [
        ("seq_aux_loss", "sequence"),
        ("sub_seq_aux_loss", "sequence"),
        ("aux_loss", "micro_batch"),
        ("global_aux_loss", "global_batch"),
        ("gbs_aux_loss", "global_batch"),
        ("none", None),
    ],
)
def test_what_is_balanced_together(make, kind, tokens):
    model = model_config(make(moe_router_load_balancing_type=kind, moe_aux_loss_coeff=0.1))
    assert model.balanced_over == tokens
    assert model.routing.balance == (0.1 if tokens else 0)
    assert model_config(make(moe_router_load_balancing_type=kind)).balanced_over is None  # no coefficient


@pytest.mark.parametrize("make", [qwen, deepseek])
def test_balancing_that_does_not_exist_is_refused(make):
    message = refusal(make(moe_router_load_balancing_type="loss"))
    assert "is 'loss': it is unknown; use one of none, seq_aux_loss" in message


@pytest.mark.parametrize(
    ("section", "named"),
    [
        (deepseek(scoring_func="softmax"), "scoring_func is 'softmax': DeepSeek-V3 cannot do that here; use 'sigmoid'"),
        (deepseek(multi_latent_attention=False), "multi_latent_attention is False"),
        (deepseek(num_nextn_predict_layers=2), "one module predicts one token further; use 1 or 0"),
        (deepseek(qk_rope_head_dim=3), "so it has to be even; use 4"),
        (deepseek(extra={"moe_expert_capacity_factor": 1.5}), "moe_expert_capacity_factor is 1.5"),
        (
            deepseek(extra={"moe_shared_expert_intermediate_size": 12}),
            "n_shared_experts 1 · moe_intermediate_size 8 = 8",
        ),
        (deepseek(kv_lora_rank=None), "kv_lora_rank is missing"),
        (qwen(num_experts=None), "num_experts is missing"),
        (qwen(n_shared_experts=1), "n_shared_experts is 1"),
        (qwen(extra={"router_aux_loss_coef": 0.001}), "router_aux_loss_coef is 0.001"),
        (qwen(extra={"shared_expert_intermediate_size": 4}), "shared_expert_intermediate_size is 4"),
        (qwen(moe_router_enable_expert_bias=True), "moe_router_enable_expert_bias is True"),
        (qwen(scoring_func="sigmoid"), "scoring_func is 'sigmoid': Qwen3-MoE cannot do that here; use 'softmax'"),
        (qwen(n_group=4), "n_group is 4"),
        (qwen(topk_group=2), "topk_group is 2"),
        (qwen(routed_scaling_factor=2.5), "routed_scaling_factor is 2.5"),
        (qwen(first_k_dense_replace=1), "first_k_dense_replace is 1"),
        (qwen(moe_layer_freq=2), "moe_layer_freq is 2"),
        (qwen(n_routed_experts=8), "Qwen3-MoE calls its experts num_experts; write num_experts: 8 instead"),
        (
            deepseek(num_experts=16),
            "DeepSeek-V3 calls its experts n_routed_experts; write n_routed_experts: 16 instead",
        ),
        (
            deepseek(first_k_dense_replace=4),
            "first_k_dense_replace is 4: none of the num_hidden_layers 4 layers would have experts",
        ),
        (
            qwen(decoder_sparse_step=2, mlp_only_layers=[1, 3]),
            "decoder_sparse_step is 2 and mlp_only_layers [1, 3]: none of the num_hidden_layers 4 layers",
        ),
        (deepseek(seq_length=1), "a sequence of seq_length 1 has no token further ahead; use 0"),
        *(
            (make(extra=extra), f"{name} is {value}")
            for make in (qwen, deepseek)
            for extra in ({"moe_z_loss_coeff": 0.001}, {"moe_router_force_expert_balance": True})
            for name, value in extra.items()
        ),
    ],
)
def test_what_cannot_be_done_is_refused(section, named):
    assert named in refusal(section)


def test_fields_that_say_what_the_model_does_anyway_are_accepted():
    config = model_config(qwen(n_group=1, topk_group=1, routed_scaling_factor=1.0, scoring_func="softmax"))
    assert config.routing.scaling == config.routing.groups == 1
    assert model_config(deepseek(num_nextn_predict_layers=0, seq_length=1)).num_nextn_predict_layers == 0


def test_no_low_rank_for_queries():
    assert model_config(deepseek()).q_lora_rank is None
    assert model_config(deepseek(q_lora_rank=0)).q_lora_rank is None
    assert model_config(deepseek(q_lora_rank=4)).q_lora_rank == 4


def test_yarn_in_the_words_of_hugging_face_and_of_mindformers():
    expected = Yarn(factor=40, original_max_position_embeddings=4096, mscale=1.0, mscale_all_dim=1.0)
    scaling = {
        "type": "yarn",
        "factor": 40,
        "original_max_position_embeddings": 4096,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    }
    assert model_config(deepseek(rope_scaling=scaling)).yarn == expected
    flat = {"position_embedding_type": "yarn", "scaling_factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0}
    assert model_config(deepseek(max_position_embeddings=4096, extra=flat)).yarn == expected
    assert model_config(deepseek(rope_scaling={"rope_type": "default"})).yarn is None
    assert model_config(deepseek(extra={"position_embedding_type": "rope"})).yarn is None
    assert model_config(deepseek()).yarn is None


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"rope_scaling": {"type": "linear", "factor": 2}}, "has type 'linear': it has to be 'yarn' or 'default'"),
        ({"rope_scaling": {"type": "yarn", "factor": 0}}, "yarn needs a factor above 0, and has 0"),
        ({"rope_scaling": {"type": "yarn", "factor": 2}}, "original_max_position_embeddings above 0, and has None"),
        ({"rope_scaling": {"type": "yarn", "fctor": 2}}, "fctor is no field of yarn; use attention_factor, beta_fast"),
        ({"extra": {"position_embedding_type": "mrope"}}, "'mrope': it has to be 'yarn' or 'rope'"),
        ({"extra": {"position_embedding_type": "yarn"}}, "yarn needs a factor"),
    ],
)
def test_position_embeddings_that_do_not_exist_are_refused(fields, named):
    assert named in refusal(deepseek(**fields))


def test_yarn_keeps_fast_pairs_slows_slow_ones_and_blends_between():
    """Equations 13 to 17 of arXiv:2309.00071, with the bounds rounded outwards as in its authors' code."""
    theta, size, length, factor = 1e4, 64, 4096, 40
    plain = np.array([theta ** (-2 * pair / size) for pair in range(size // 2)])
    # Pair d turns L / (2π θ^(2d/size)) times over the length: 32 times for d = 10.47, once for d = 22.51.
    low, high = 10, 23
    expected = []
    for pair, frequency in enumerate(plain):
        kept = 1 - min(max((pair - low) / (high - low), 0), 1)
        expected.append(kept * frequency + (1 - kept) * frequency / factor)
    found = frequencies(size, theta, Yarn(factor=factor, original_max_position_embeddings=length))
    np.testing.assert_allclose(found, expected, rtol=1e-14)
    np.testing.assert_allclose(found[:11], plain[:11], rtol=1e-14)
    np.testing.assert_allclose(found[23:], plain[23:] / factor, rtol=1e-14)


@pytest.mark.parametrize(
    ("fields", "table", "softmax"),
    [
        ({}, 0.1 * np.log(40) + 1, 1),
        ({"mscale": 1.0, "mscale_all_dim": 1.0}, 1, (0.1 * np.log(40) + 1) ** 2),
        (
            {"mscale": 1.0, "mscale_all_dim": 0.5},
            (0.1 * np.log(40) + 1) / (0.05 * np.log(40) + 1),
            (0.05 * np.log(40) + 1) ** 2,
        ),
        ({"attention_factor": 1.25}, 1.25, 1),
    ],
)
def test_yarn_scales_what_is_turned_and_the_scores(fields, table, softmax):
    yarn = Yarn(factor=40, original_max_position_embeddings=4096, **fields)
    assert yarn.table_scale == pytest.approx(table, rel=1e-14)
    assert yarn.softmax_scale == pytest.approx(softmax, rel=1e-14)


def test_model_section_that_mindformers_ships():
    config = loads(SHIPPED.read_text(encoding="utf-8"))
    model = model_config(config.model)
    assert isinstance(model, DeepseekV3Config)
    assert (model.q_lora_rank, model.v_head_dim, model.n_routed_experts) == (1536, 192, 8)
    assert model.routing.balance == 0.001
    assert model.mtp_loss_scaling_factor == 0.3
    assert model.yarn == Yarn(factor=40, original_max_position_embeddings=163840, mscale=1, mscale_all_dim=1)
    ignored = {path for path in fields_without_effect(config) if path.startswith("model.")}
    assert ignored == {
        "model.layernorm_compute_dtype",
        "model.mla_qkv_concat",
        "model.moe_grouped_gemm",
        "model.moe_pad_tokens",
        "model.moe_token_drop_policy",
        "model.rotary_dtype",
        "model.router_dense_type",
        "model.softmax_compute_dtype",
    }


def test_model_section_with_qwens_experts():
    sizes = "\n".join(f"  {name}: {value}" for name, value in QWEN.items())
    text = (
        f"model:\n  model_type: qwen3_moe\n  architectures: Qwen3MoeForCausalLM\n{sizes}\n  mlp_only_layers: [0, 2]\n"
    )
    text += "  rope_scaling: {type: yarn, factor: 2}\n"
    config = loads(text)
    model = model_config(config.model)
    assert isinstance(model, Qwen3MoeConfig)
    assert model.mlp_only_layers == (0, 2)
    assert model.yarn == Yarn(factor=2, original_max_position_embeddings=32768)
    assert fields_without_effect(config) == ()


def test_every_model_type_has_defaults():
    assert CONFIGS.keys() == MODEL_DEFAULTS.keys()
