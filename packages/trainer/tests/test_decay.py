"""Which weights decay: rules by names here and by MindFormers', and rules that match nothing."""

from __future__ import annotations

import warnings
from pathlib import Path

import numpy as np
import pytest
from parallel_config import loads
from parallel_config.schema import Optimizer
from parallel_trainer.cli import main
from parallel_trainer.data.indexed import IndexedWriter
from parallel_trainer.errors import UserError
from parallel_trainer.job import prepare
from parallel_trainer.kernels import kernels
from parallel_trainer.models import build_model
from parallel_trainer.models.config import model_config
from parallel_trainer.optim.decay import decay_notes, decaying
from parallel_trainer.optim.mindformers_names import mindformers_names
from parallel_trainer.parallel.weights import Normal, Weight

SIZES = "seq_length: 16, hidden_size: 32, intermediate_size: 48, num_hidden_layers: 2, num_attention_heads: 4"
MODELS = {
    # PUB2-OPT-02
    "qwen3": f"model_type: qwen3, architectures: Qwen3ForCausalLM, vocab_size: 64, num_key_value_heads: 2, {SIZES}, "
    "head_dim: 8",
    "deepseek_v3": f"model_type: deepseek_v3, architectures: DeepseekV3ForCausalLM, vocab_size: 64, {SIZES}, "
    "num_key_value_heads: 4, q_lora_rank: 5, kv_lora_rank: 3, qk_nope_head_dim: 4, qk_rope_head_dim: 2, v_head_dim: 3, "
    "n_routed_experts: 8, num_experts_per_tok: 2, moe_intermediate_size: 6, n_shared_experts: 1, n_group: 4, "
    "first_k_dense_replace: 1, topk_group: 2, num_nextn_predict_layers: 1",
}


def weights(model: str) -> tuple[Weight, ...]:
    return build_model(model_config(loads(f"model: {{{MODELS[model]}}}").model), kernels("cpu")).weights


def decayed(model: str, *, include: list[str] | None = None, exclude: list[str] | None = None) -> set[str]:
    section = Optimizer(
        weight_decay_include=None if include is None else tuple(include),
        weight_decay_exclude=None if exclude is None else tuple(exclude),
    )
    return {name for name, decays in decaying(weights(model), section).items() if decays}


def notes(model: str, rules: str) -> tuple[str, ...]:
    return decay_notes(weights(model), loads(f"optimizer:\n  {rules}", "run.yaml"))


@pytest.mark.parametrize(
    ("name", "shape", "include", "exclude", "expected"),
    [
        ("model.layers.0.mlp.up_proj.weight", (8, 4), None, None, True),
        ("model.norm.weight", (8,), None, None, False),
        ("model.layers.0.self_attn.q_proj.bias", (8, 1), None, None, False),
        ("model.norm.weight", (8,), ("model.norm.weight",), None, True),
        ("model.embed_tokens.weight", (8, 4), None, ("embed",), False),
        ("model.layers.3.mlp.up_proj.weight", (8, 4), None, ("model.layers.*.mlp.*",), False),
        ("model.embed_tokens.weight", (8, 4), ("*embed*",), ("embed",), True),
        ("model.embed_tokens.weight", (8, 4), None, ("word_embeddings",), False),
        ("model.norm.weight", (8,), ("decoder.final_layernorm.weight",), None, True),
        ("model.layers.3.mlp.up_proj.weight", (8, 4), None, ("*.layers.3.mlp.linear_fc1*",), False),
        ("model.layers.3.mlp.up_proj.weight", (8, 4), None, ("*.layers.4.mlp.linear_fc1*",), True),
    ],
)
def test_decay_rules(name, shape, include, exclude, expected) -> None:
    section = Optimizer(weight_decay_include=include, weight_decay_exclude=exclude)
    assert decaying([Weight(name, shape, init=Normal(1.0))], section) == {name: expected}


# By hand from the 2.0.0 wheel: submodules of pynative/transformers and base_models/gpt, then weight_mapping in
# models/qwen3/utils.py and models/deepseek3/utils.py.
QWEN3 = {
    "embedding.word_embeddings": ["model.embed_tokens.weight"],
    "output_layer.weight": ["lm_head.weight"],
    "decoder.final_layernorm": ["model.norm.weight"],
    "layers.1.input_layernorm": ["model.layers.1.input_layernorm.weight"],
    "layers.1.pre_mlp_layernorm": ["model.layers.1.post_attention_layernorm.weight"],
    "layers.1.self_attention.linear_qkv": [f"model.layers.1.self_attn.{kind}_proj.weight" for kind in "qkv"],
    "layers.1.self_attention.linear_v.": ["model.layers.1.self_attn.v_proj.weight"],
    "layers.1.self_attention.linear_proj.weight": ["model.layers.1.self_attn.o_proj.weight"],
    "layers.1.self_attention.q_layernorm": ["model.layers.1.self_attn.q_norm.weight"],
    "layers.1.self_attention.k_layernorm": ["model.layers.1.self_attn.k_norm.weight"],
    "layers.1.mlp.linear_fc1": [f"model.layers.1.mlp.{kind}_proj.weight" for kind in ("gate", "up")],
    "layers.1.mlp.linear_fc2": ["model.layers.1.mlp.down_proj.weight"],
    "layers.1.mlp.gating": ["model.layers.1.mlp.gate_proj.weight"],
    "layers.1.mlp.hidden": ["model.layers.1.mlp.up_proj.weight"],
}
ATTENTION = "model.layers.0.self_attn."
DEEPSEEK = {
    "layers.0.self_attention.linear_qkv": [f"{ATTENTION}q_a_proj.weight", f"{ATTENTION}kv_a_proj_with_mqa.weight"],
    "layers.0.self_attention.linear_qb": [f"{ATTENTION}q_b_proj.weight"],
    "layers.0.self_attention.linear_kvb": [f"{ATTENTION}kv_b_proj.weight"],
    "layers.0.self_attention.linear_proj": [f"{ATTENTION}o_proj.weight"],
    "layers.0.self_attention.q_layernorm": [f"{ATTENTION}q_a_layernorm.weight"],
    "layers.0.self_attention.k_layernorm": [f"{ATTENTION}kv_a_layernorm.weight"],
    "layers.0.self_attention.kv_layernorm": [f"{ATTENTION}kv_a_layernorm.weight"],
    "layers.0.self_attention.linear_q_down_proj": [f"{ATTENTION}q_a_proj.weight"],
    "layers.0.self_attention.linear_kv_up_proj": [f"{ATTENTION}kv_b_proj.weight"],
    "layers.1.mlp.router.weight": ["model.layers.1.mlp.gate.weight"],
    "layers.1.mlp.experts.weight1": ["model.layers.1.mlp.experts.gate_up_proj"],
    "layers.1.mlp.experts.weight2": ["model.layers.1.mlp.experts.down_proj"],
    "layers.1.mlp.shared_experts.linear_fc1": [
        f"model.layers.1.mlp.shared_experts.{kind}_proj.weight" for kind in ("gate", "up")
    ],
    "layers.1.mlp.shared_experts.linear_fc2": ["model.layers.1.mlp.shared_experts.down_proj.weight"],
    "mtp.layers.0.enorm": ["model.layers.2.enorm.weight"],
    "mtp.layers.0.eh_proj.weight": ["model.layers.2.eh_proj.weight"],
    "mtp.layers.0.final_layernorm": ["model.layers.2.shared_head.norm.weight"],
    "mtp.layers.0.transformer_layer.mlp.router": ["model.layers.2.mlp.gate.weight"],
}


@pytest.mark.parametrize(("model", "table"), [("qwen3", QWEN3), ("deepseek_v3", DEEPSEEK)])
def test_names_of_mindformers_mean_these_weights(model: str, table: dict[str, list[str]]) -> None:
    for rule, expected in table.items():
        by_name = mindformers_names(weight.name for weight in weights(model) if weight.trainable)
        assert [name for name, theirs in by_name.items() if any(rule in each for each in theirs)] == expected, rule
    # Whole names, as they are and inside the model for training.
    by_name = mindformers_names(weight.name for weight in weights(model))
    for exact in ("decoder.layers.0.mlp.linear_fc2.weight", "model.decoder.layers.0.mlp.linear_fc2.weight"):
        assert [name for name, theirs in by_name.items() if exact in theirs] == ["model.layers.0.mlp.down_proj.weight"]


def test_mapped_rules_change_what_decays_and_say_so() -> None:
    """PUB2-OPT-02: the embedding does not keep decaying, and the note has both names."""
    everything = decayed("qwen3")
    assert everything - decayed("qwen3", exclude=["word_embeddings"]) == {"model.embed_tokens.weight"}
    (note,) = notes("qwen3", "weight_decay_exclude: [word_embeddings]")
    assert "weight_decay_exclude word_embeddings is a name in MindFormers" in note
    assert note.endswith("here it means model.embed_tokens.weight.")
    assert decayed("qwen3", include=["*layernorm*"]) - everything == {
        f"model.layers.{layer}.{norm}.weight"
        for layer in (0, 1)
        for norm in ("input_layernorm", "post_attention_layernorm")
    }, "names here count where a rule matches some of them"
    first, second = notes("qwen3", "weight_decay_exclude: [linear_qkv, decoder.layers.1.mlp.linear_fc2.weight]")
    assert "model.layers.*.self_attn.q_proj.weight, model.layers.*.self_attn.k_proj.weight" in first
    assert second.endswith("means model.layers.1.mlp.down_proj.weight.")


def test_a_rule_by_both_kinds_of_names_is_taken_by_those_here_and_the_difference_is_said() -> None:
    (note,) = notes("qwen3", "weight_decay_exclude: [proj]")
    assert "otherwise for model.layers.*.self_attn.q_proj.weight" in note
    assert "o_proj" not in note, "linear_proj in MindFormers, so both agree"
    assert notes("qwen3", "weight_decay_exclude: [layernorm]") == (), "norms do not decay in either case"
    assert notes("qwen3", 'weight_decay_exclude: [embed_tokens, lm_head, "*"]') == ()


@pytest.mark.parametrize(
    ("model", "rules", "place", "named"),
    [
        ("qwen3", "weight_decay_exclude: [word_embedings]", "2:26", "word_embeddings"),
        ("qwen3", "weight_decay_include: [lm_head, self_atn.q_prj]", "2:35", "self_attn.q_proj"),
        ("qwen3", "weight_decay_exclude: [experts.weight1]", "2:26", "embed_tokens"),
        ("qwen3", 'weight_decay_exclude: ["model.layers.2.*"]', "2:26", ""),
        ("deepseek_v3", "weight_decay_include: [e_score_correction_bias]", "2:26", ""),
        ("deepseek_v3", "weight_decay_include: [expert_bias]", "2:26", "experts"),
    ],
)
def test_a_rule_that_matches_no_trained_weight_is_refused(model: str, rules: str, place: str, named: str) -> None:
    with pytest.raises(UserError, match=f"run.yaml:{place}: optimizer.weight_decay_.*matches none") as caught:
        notes(model, rules)
    (problem,) = caught.value.problems
    assert named in problem


FILE = """
training: {{steps: 3, global_batch_size: 4, local_batch_size: 1}}
model: {{{model}}}
optimizer: {{type: AdamW, weight_decay: 0.1, {rules}}}
lr_scheduler: {{type: ConstantWarmUpLR, learning_rate: 1.0e-3, warmup_steps: 0}}
train_dataset:
  dataloader:
    type: BlendedMegatronDatasetDataLoader
    datasets_type: GPTDataset
    sizes: [12, 0, 0]
    config: {{data_path: ["{corpus}"], split: "1, 0, 0", seq_length: 16, eod: 0, create_attention_mask: false,
             create_compressed_eod_mask: false}}
"""


def file(folder: Path, rules: str) -> Path:
    prefix = folder / "corpus"
    with IndexedWriter(prefix, vocab_size=64) as writer:
        for document in np.random.default_rng(0).integers(1, 64, (50, 40)):
            writer.add_document(np.append(document, 0))
    path = folder / "run.yaml"
    path.write_text(FILE.format(model=MODELS["qwen3"], rules=rules, corpus=prefix), encoding="utf-8")
    return path


@pytest.mark.filterwarnings("ignore::parallel_config.ConfigWarning")
def test_every_command_finds_it_before_ranks_start(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("parallel_trainer.cli.run.run_ranks", lambda *_, **__: pytest.fail("ranks were started"))
    monkeypatch.setattr("parallel_trainer.cli.verify.run_ranks", lambda *_, **__: pytest.fail("ranks were started"))
    path = str(file(tmp_path, "weight_decay_exclude: [wrd_embeddings, other]"))
    for command in (
        ["run", path, "--nproc", "2", "--output", str(tmp_path / "out")],
        ["verify", path, "--nproc", "2"],
        ["plan", path, "--world-size", "2"],
        ["plan", path, "--world-size", "2", "--engine", "hyperparallel"],
    ):
        assert main(command) == 2, command
        said = capsys.readouterr().err
        assert said.count("weight_decay_exclude[0] wrd_embeddings must match a weight of this model") == 1
        assert said.count("weight_decay_exclude[1] other must match a weight of this model") == 1
    assert not (tmp_path / "out").exists()
    with pytest.raises(UserError, match=r"weight_decay_exclude\[0\] wrd_embeddings must match"):
        prepare(loads(Path(path).read_text()), 2, engine="hyperparallel")


def test_a_job_carries_the_note_and_plan_shows_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = file(tmp_path, "weight_decay_exclude: [word_embeddings]")
    with warnings.catch_warnings(action="ignore"):
        (note,) = (note for note in prepare(loads(path.read_text()), 1).notes if "word_embeddings" in note)
        assert main(["plan", str(path), "--world-size", "1"]) == 0
    assert f"Note: {note}" in capsys.readouterr().err
