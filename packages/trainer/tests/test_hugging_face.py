"""Hugging Face folders against files that the safetensors library wrote or reads, and published configurations."""

from __future__ import annotations

import json
import math
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import parallel_config
import pytest
import safetensors.numpy
from attrs import evolve
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from parallel_trainer.checkpoint.hugging_face import HuggingFaceFolder, declared, write_folder
from parallel_trainer.checkpoint.hugging_face_checkpoint import import_folder
from parallel_trainer.checkpoint.hugging_face_config import read_config, write_config
from parallel_trainer.checkpoint.index import Checkpoint
from parallel_trainer.cli import main
from parallel_trainer.errors import UserError
from parallel_trainer.models.config import DeepseekV3Config, Qwen3Config, Qwen3MoeConfig, model_config
from parallel_trainer.models.rope import Yarn

COMMON = {"hidden_act": "silu", "initializer_range": 0.02, "rms_norm_eps": 1e-6, "use_cache": True}
ATTENTION = {"attention_bias": False, "attention_dropout": 0.0}
QWEN = {**COMMON, **ATTENTION, "vocab_size": 151936, "rope_theta": 1000000, "rope_scaling": None, "head_dim": 128,
        "max_position_embeddings": 40960, "use_sliding_window": False, "sliding_window": None,
        "bos_token_id": 151643, "eos_token_id": 151645, "torch_dtype": "bfloat16"}  # fmt: skip
PUBLISHED: dict[str, dict[str, Any]] = {
    "Qwen3-0.6B": {**QWEN, "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "hidden_size": 1024,
                   "intermediate_size": 3072, "max_window_layers": 28, "num_attention_heads": 16,
                   "num_hidden_layers": 28, "num_key_value_heads": 8, "tie_word_embeddings": True,
                   "transformers_version": "4.51.0"},
    "Qwen3-30B-A3B": {**QWEN, "model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "hidden_size": 2048,
                      "intermediate_size": 6144, "max_window_layers": 48, "num_attention_heads": 32,
                      "num_hidden_layers": 48, "num_key_value_heads": 4, "num_experts": 128, "num_experts_per_tok": 8,
                      "moe_intermediate_size": 768, "norm_topk_prob": True, "decoder_sparse_step": 1,
                      "mlp_only_layers": [], "output_router_logits": False, "router_aux_loss_coef": 0.001,
                      "tie_word_embeddings": False},
    "DeepSeek-V3": {**COMMON, **ATTENTION, "model_type": "deepseek_v3", "architectures": ["DeepseekV3ForCausalLM"],
                    "torch_dtype": "bfloat16",
                    "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV3Config"}, "aux_loss_alpha": 0.001,
                    "seq_aux": True, "ep_size": 1, "pretraining_tp": 1, "vocab_size": 129280, "hidden_size": 7168,
                    "intermediate_size": 18432, "moe_intermediate_size": 2048, "num_hidden_layers": 61,
                    "num_attention_heads": 128, "num_key_value_heads": 128, "q_lora_rank": 1536, "kv_lora_rank": 512,
                    "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "n_routed_experts": 256,
                    "n_shared_experts": 1, "num_experts_per_tok": 8, "first_k_dense_replace": 3, "moe_layer_freq": 1,
                    "n_group": 8, "topk_group": 4, "topk_method": "noaux_tc", "scoring_func": "sigmoid",
                    "norm_topk_prob": True, "routed_scaling_factor": 2.5, "num_nextn_predict_layers": 1,
                    "max_position_embeddings": 163840, "tie_word_embeddings": False, "rope_theta": 10000,
                    "rope_scaling": {"type": "yarn", "factor": 40, "original_max_position_embeddings": 4096,
                                     "beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0}},
}  # fmt: skip

SIZES = {"vocab_size": 11, "hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 2, "num_attention_heads": 2}
DENSE = Qwen3Config(**SIZES, num_key_value_heads=1, head_dim=4)
TIED = evolve(DENSE, tie_word_embeddings=True)
EXPERTS = Qwen3MoeConfig(
    **SIZES, num_key_value_heads=1, head_dim=4, num_experts=3, num_experts_per_tok=2, moe_intermediate_size=5,
    mlp_only_layers=[1], norm_topk_prob=True,
)  # fmt: skip
DEEPSEEK = DeepseekV3Config(
    **SIZES, q_lora_rank=6, kv_lora_rank=5, qk_nope_head_dim=4, qk_rope_head_dim=2, v_head_dim=3, n_routed_experts=2,
    num_experts_per_tok=1, moe_intermediate_size=5, first_k_dense_replace=1, n_group=1, topk_group=1,
    rope_theta=5e5, yarn=Yarn(factor=4.0, original_max_position_embeddings=64, mscale=1.0, mscale_all_dim=0.5),
)  # fmt: skip
MODELS = {"dense": DENSE, "tied": TIED, "experts": EXPERTS, "deepseek": DEEPSEEK}


def parameters(config: Any, *, further: bool = False) -> int:
    layer = f"model.layers.{config.num_hidden_layers}."
    return sum(weight.size for name, weight in declared(config).items() if name.startswith(layer) == further)


def test_published_configurations_give_models_of_the_published_sizes() -> None:
    found = {name: read_config(values) for name, values in PUBLISHED.items()}
    assert not any(config.notes for config in found.values())
    # Half the bytes that the index of the BF16 files sums up, for Qwen3-0.6B without the table that they hold twice.
    assert parameters(found["Qwen3-0.6B"].model) == 1503264768 // 2 - 151936 * 1024
    assert parameters(found["Qwen3-30B-A3B"].model) == 61064245248 // 2
    # "671B" and, with other things counted, "11.5B unique parameters" say DeepSeek's notes on the files.
    assert round(parameters(found["DeepSeek-V3"].model) / 1e9) == 671
    assert parameters(found["DeepSeek-V3"].model, further=True) / 1e9 == pytest.approx(11.5, rel=0.02)
    assert found["DeepSeek-V3"].model.yarn == Yarn(
        factor=40, original_max_position_embeddings=4096, mscale=1.0, mscale_all_dim=1.0
    )


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_section_of_a_file_says_the_same(name: str) -> None:
    found = read_config(PUBLISHED[name])
    section = parallel_config.loads(f"training: {{steps: 1}}\n{found.yaml}").model
    assert model_config(section) == found.model
    assert section.max_position_embeddings == PUBLISHED[name]["max_position_embeddings"]
    assert "  rms_norm_eps: 1.0e-06\n" in found.yaml


@pytest.mark.parametrize("name", PUBLISHED)
def test_what_is_written_has_the_published_values(name: str) -> None:
    written = write_config(read_config(PUBLISHED[name]).model, dtype="bfloat16")
    without = {"max_position_embeddings", "auto_map", "aux_loss_alpha", "seq_aux", "ep_size", "pretraining_tp",
               "sliding_window", "max_window_layers", "bos_token_id", "eos_token_id", "output_router_logits",
               "router_aux_loss_coef", "transformers_version"}  # fmt: skip
    expected = {name: value for name, value in PUBLISHED[name].items() if name not in without}
    if expected["rope_scaling"]:
        expected["rope_scaling"] = expected["rope_scaling"] | {"rope_type": "yarn", "truncate": True}
        del expected["rope_scaling"]["type"]
    assert {name: written[name] for name in expected} == expected


@pytest.mark.parametrize("name", MODELS)
def test_what_is_written_is_read(name: str) -> None:
    others = {"max_position_embeddings": 77, "pad_token_id": 3}
    found = read_config(json.loads(json.dumps(write_config(MODELS[name], dtype="float32", others=others))))
    assert (found.model, found.others, found.notes) == (MODELS[name], others, ())


def test_token_ids_outside_the_vocabulary_are_not_written() -> None:
    written = write_config(DENSE, dtype="float32", others={"pad_token_id": 11, "bos_token_id": 10, "eos_token_id": -1})
    assert [written[f"{name}_token_id"] for name in ("pad", "bos", "eos")] == [None, 10, None]


def test_names_of_transformers_5_are_read() -> None:
    written = write_config(EXPERTS, dtype="float32")
    written["num_local_experts"] = written.pop("num_experts")
    written["rope_parameters"] = {"rope_theta": 1e6, "rope_type": "default"}
    assert read_config(written).model == evolve(EXPERTS, rope_theta=1e6)
    written = write_config(DEEPSEEK, dtype="float32")
    written["num_mtp_layers"] = written.pop("num_nextn_predict_layers")
    written["rope_parameters"] = written.pop("rope_scaling") | {"rope_theta": 10.0}
    assert read_config(written).model == evolve(DEEPSEEK, rope_theta=10.0)
    del written["q_lora_rank"]
    assert read_config(written).model == evolve(DEEPSEEK, rope_theta=10.0, q_lora_rank=1536)


REFUSED = {
    "another model": (
        DENSE,
        {"model_type": "llama"},
        "model_type is 'llama': the models here are 'qwen3', 'qwen3_moe'",
    ),
    "no model": (DENSE, {"model_type": None}, "model_type is None"),
    "another head": (DENSE, {"architectures": ["Qwen3ForSequenceClassification"]}, "only Qwen3ForCausalLM can be read"),
    "gelu": (DENSE, {"hidden_act": "gelu"}, "- hidden_act is 'gelu': Qwen3 cannot do that here; use 'silu'"),
    "a window": (DENSE, {"use_sliding_window": True}, "use_sliding_window is True"),
    "windows": (DENSE, {"layer_types": ["full_attention", "sliding_attention"]}, "layer_types has sliding_attention"),
    "FP8": (DEEPSEEK, {"quantization_config": {"quant_method": "fp8"}}, "Convert them to bfloat16 first"),
    "linear rotary": (DENSE, {"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_scaling has type 'linear'"),
    "half rotary": (
        DENSE,
        {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}},
        "partial_rotary_factor is 0.5",
    ),
    "softmax": (DEEPSEEK, {"scoring_func": "softmax"}, "scoring_func is 'softmax'"),
    "a size left out": (DENSE, {"head_dim": None}, "head_dim is missing"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_model_that_does_not_exist_here_is_refused(case: str) -> None:
    config, changes, message = REFUSED[case]
    with pytest.raises(UserError, match=message):
        read_config(write_config(config, dtype="float32") | changes)


def test_all_that_cannot_be_built_is_said_at_once_and_unknown_fields_are_named() -> None:
    values = write_config(DENSE, dtype="float32")
    with pytest.raises(UserError) as found:
        read_config(values | {"hidden_act": "gelu", "layer_types": ["sliding_attention"], "attention_dropout": 0.1})
    assert len(found.value.problems) == 3
    assert read_config(values | {"logit_scale": 2, "a": 1}).notes == (
        "config.json has fields that are not known here: a, logit_scale.",
    )


def random_weights(config: Any, seed: int = 0) -> dict[str, np.ndarray]:
    generator = np.random.default_rng(seed)
    return {
        name: generator.standard_normal(weight.shape).astype(np.float32) for name, weight in declared(config).items()
    }


def as_released(weights: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The tensors of a checkpoint as its model code names them: three matrices for each expert."""
    found = {}
    for name, value in weights.items():
        if name.endswith(".gate_up_proj"):
            inner = value.shape[1] // 2
            for expert in range(len(value)):
                place = name.replace("gate_up_proj", f"{expert}.")
                found[f"{place}gate_proj.weight"] = value[expert, :inner].copy()
                found[f"{place}up_proj.weight"] = value[expert, inner:].copy()
        elif name.endswith(".experts.down_proj"):
            for expert in range(len(value)):
                found[name.replace("down_proj", f"{expert}.down_proj.weight")] = value[expert].copy()
        else:
            found[name] = value
    return found


def put(folder: Path, config: Any, tensors: dict[str, np.ndarray], *, files: int = 1, **changes: Any) -> None:
    """A folder written by the safetensors library."""
    (folder / "config.json").write_text(json.dumps(write_config(config, dtype="float32") | changes))
    if files == 1:
        safetensors.numpy.save_file(tensors, folder / "model.safetensors", {"format": "pt"})
        return
    weight_map = {name: f"{number % files}.safetensors" for number, name in enumerate(tensors)}
    for file in set(weight_map.values()):
        held = {name: tensors[name] for name in tensors if weight_map[name] == file}
        safetensors.numpy.save_file(held, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def get(folder: Path) -> dict[str, np.ndarray]:
    """What the safetensors library finds in a folder."""
    files = [safetensors.numpy.load_file(path) for path in sorted(folder.glob("*.safetensors"))]
    return {name: value for file in files for name, value in file.items()}


@pytest.mark.parametrize("files", [1, 3])
@pytest.mark.parametrize("name", MODELS)
def test_weights_are_read(tmp_path: Path, name: str, files: int) -> None:
    weights = random_weights(MODELS[name])
    put(tmp_path, MODELS[name], as_released(weights), files=files)
    with HuggingFaceFolder.open(tmp_path) as folder:
        assert folder.config.model == MODELS[name]
        assert folder.weights.keys() == weights.keys()
        for weight, value in weights.items():
            assert np.array_equal(folder.read(weight), value.reshape(-1))


@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_parts_of_stacked_experts_are_read(tmp_path: Path, data: st.DataObject) -> None:
    weights = random_weights(EXPERTS)
    if not (tmp_path / "config.json").exists():
        put(tmp_path, EXPERTS, as_released(weights), files=2)
    name = data.draw(st.sampled_from([name for name in weights if "experts" in name]))
    first = data.draw(st.integers(0, weights[name].size))
    last = data.draw(st.integers(first, weights[name].size))
    with HuggingFaceFolder.open(tmp_path) as folder:
        assert np.array_equal(folder.read(name, first, last), weights[name].reshape(-1)[first:last])


def test_experts_stacked_in_the_file_and_float16_are_read(tmp_path: Path) -> None:
    weights = random_weights(EXPERTS)
    put(tmp_path, EXPERTS, {name: value.astype(np.float16) for name, value in weights.items()})
    with HuggingFaceFolder.open(tmp_path) as folder:
        for name, value in weights.items():
            found = folder.read(name)
            assert found.dtype == np.float32
            assert np.array_equal(found, value.astype(np.float16).reshape(-1))


def in_pieces(weights: dict[str, np.ndarray], size: int) -> Iterator[tuple[str, Iterator[np.ndarray]]]:
    for name, value in weights.items():
        flat = value.reshape(-1)
        yield name, (flat[first : first + size] for first in range(0, flat.size, size))


@pytest.mark.parametrize("name", MODELS)
def test_what_is_written_the_library_reads(tmp_path: Path, name: str) -> None:
    weights = random_weights(MODELS[name])
    backward = dict(reversed(weights.items()))
    write_folder(tmp_path / "new" / "folder", MODELS[name], in_pieces(backward, 7))
    assert sorted(path.name for path in (tmp_path / "new" / "folder").iterdir()) == ["config.json", "model.safetensors"]
    found, expected = get(tmp_path / "new" / "folder"), as_released(weights)
    assert found.keys() == expected.keys()
    assert all(np.array_equal(found[tensor], value) for tensor, value in expected.items())
    with HuggingFaceFolder.open(tmp_path / "new" / "folder") as folder:
        assert folder.config.model == MODELS[name]


def test_large_models_are_written_to_several_files_with_an_index(tmp_path: Path) -> None:
    weights = random_weights(DEEPSEEK)
    (tmp_path / "folder").mkdir()
    write_folder(tmp_path / "folder", DEEPSEEK, in_pieces(weights, 100), dtype="float64", max_shard_bytes=3000)
    expected = as_released(weights)
    files = sorted((tmp_path / "folder").glob("*.safetensors"))
    assert [path.name for path in files] == [
        f"model-{number:05d}-of-{len(files):05d}.safetensors" for number in range(1, len(files) + 1)
    ]
    assert len(files) >= math.ceil(8 * sum(value.size for value in expected.values()) / 3000)
    index = json.loads((tmp_path / "folder" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == 8 * sum(value.size for value in expected.values())
    for path in files:
        held = safetensors.numpy.load_file(path)
        assert held.keys() == {name for name, file in index["weight_map"].items() if file == path.name}
        assert sum(value.nbytes for value in held.values()) <= 3000 or len(held) == 1
        assert all(np.array_equal(value, expected[name]) for name, value in held.items())
    with HuggingFaceFolder.open(tmp_path / "folder") as folder:
        assert folder.read("model.norm.weight").dtype == np.float64


def test_a_router_without_a_bias_is_written_with_zeros_and_a_bias_is_not_rounded(tmp_path: Path) -> None:
    weights = random_weights(DEEPSEEK)
    bias = "model.layers.1.mlp.gate.e_score_correction_bias"
    write_folder(tmp_path / "a", DEEPSEEK, in_pieces(weights, 100), dtype="bfloat16")
    with HuggingFaceFolder.open(tmp_path / "a") as folder:
        assert np.array_equal(folder.read(bias), weights[bias])
        assert np.array_equal(folder.read("model.norm.weight").view(np.uint32) & 0xFFFF, np.zeros(8))
    without = evolve(DEEPSEEK, moe_router_enable_expert_bias=False)
    write_folder(tmp_path / "b", without, in_pieces(random_weights(without), 100))
    assert not get(tmp_path / "b")[bias].any()


def test_a_folder_is_complete_or_not_there(tmp_path: Path) -> None:
    weights = random_weights(DENSE)
    norm = weights["model.norm.weight"]
    for change, message in (
        ({"model.norm.weight": norm[1:]}, r"model\.norm\.weight \(7 of 8 elements\)"),
        ({"model.norm.weight": np.ones(9)}, "model.norm.weight has 8 elements; got more"),
        ({"model.other": norm}, "model.other is no weight of the model"),
    ):
        with pytest.raises(ValueError, match=message):
            write_folder(tmp_path / "folder", DENSE, in_pieces(weights | change, 100))
    with pytest.raises(UserError, match=r"model\.norm\.weight holds 100000\.0, which F16 cannot"):
        write_folder(tmp_path / "folder", DENSE, in_pieces({"model.norm.weight": norm * 0 + 1e5}, 3), dtype="float16")
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "mine").touch()
    with pytest.raises(UserError, match="exists and is not an empty folder"):
        write_folder(tmp_path / "folder", DENSE, in_pieces(weights, 100))
    for config, message in (
        (evolve(DEEPSEEK, moe_layer_freq=2), "moe_layer_freq is 2"),
        (evolve(DEEPSEEK, n_shared_experts=0), "n_shared_experts is 0"),
    ):
        with pytest.raises(UserError, match=message):
            write_folder(tmp_path / "other", config, [])
    assert [path.name for path in tmp_path.rglob("*")] == ["folder", "mine"]


def test_tensors_that_do_not_make_up_the_model_are_listed(tmp_path: Path) -> None:
    tensors = as_released(random_weights(EXPERTS))
    del tensors["model.layers.0.mlp.experts.2.up_proj.weight"]
    tensors["model.layers.0.mlp.experts.3.up_proj.weight"] = np.zeros((5, 8), np.float32)
    tensors["model.norm.weight"] = np.zeros((8, 1), np.float32)
    tensors["lm_head.weight"] = tensors["lm_head.weight"].astype(np.int8)
    put(tmp_path, EXPERTS, tensors)
    with pytest.raises(UserError) as found:
        HuggingFaceFolder.open(tmp_path)
    assert found.value.problems == (
        "1 tensors are missing: model.layers.0.mlp.experts.2.up_proj.weight",
        "1 tensors are too much: model.layers.0.mlp.experts.3.up_proj.weight",
        "model.norm.weight has shape [8, 1], and the model [8]",
        "lm_head.weight has dtype I8, and a weight one of F32, BF16, F16, F64",
    )
    put(tmp_path, EXPERTS, {"model.norm.weight": np.zeros(8, np.float32)})
    with pytest.raises(UserError, match=r"31 tensors are missing: lm_head\.weight, .*, and 24 more"):
        HuggingFaceFolder.open(tmp_path)


def test_a_table_that_is_there_twice_has_to_be_the_same(tmp_path: Path) -> None:
    weights = random_weights(TIED)
    table = weights["model.embed_tokens.weight"]
    put(tmp_path, TIED, weights | {"lm_head.weight": table})
    with HuggingFaceFolder.open(tmp_path) as folder:
        assert "lm_head.weight" not in folder.weights
    put(tmp_path, TIED, weights | {"lm_head.weight": table + 1})
    with pytest.raises(UserError, match=r"lm_head\.weight differs from model\.embed_tokens\.weight"):
        HuggingFaceFolder.open(tmp_path)

    weights = as_released(random_weights(DEEPSEEK))
    table, head = (weights[name] for name in ("model.embed_tokens.weight", "lm_head.weight"))
    names = ("model.layers.2.embed_tokens.weight", "model.layers.2.shared_head.head.weight")
    put(tmp_path, DEEPSEEK, weights | dict(zip(names, (table, head), strict=True)))
    with HuggingFaceFolder.open(tmp_path) as folder:
        assert folder.config.model.num_nextn_predict_layers == 1
    put(tmp_path, DEEPSEEK, weights | dict(zip(names, (head, head), strict=True)))
    with pytest.raises(UserError, match=r"layers\.2\.embed_tokens\.weight differs from model\.embed_tokens\.weight"):
        HuggingFaceFolder.open(tmp_path)


def test_a_further_prediction_that_only_config_json_has_is_left_out(tmp_path: Path) -> None:
    without = evolve(DEEPSEEK, num_nextn_predict_layers=0)
    put(tmp_path, without, as_released(random_weights(without)), num_nextn_predict_layers=1)
    with HuggingFaceFolder.open(tmp_path) as folder:
        assert folder.config.model == without
        assert "num_nextn_predict_layers: 0\n" in folder.config.yaml
        assert folder.config.notes[0].endswith("the model is read without, num_nextn_predict_layers 0.")


def test_folders_that_are_none_are_refused(tmp_path: Path) -> None:
    def refused(message: str) -> None:
        with pytest.raises(UserError, match=message):
            HuggingFaceFolder.open(tmp_path)

    config, index = tmp_path / "config.json", tmp_path / "model.safetensors.index.json"
    refused(r"config\.json: there is no such file")
    config.write_text("[]")
    refused(r"config\.json: it is no JSON object")
    config.write_text("{")
    refused(r"config\.json: it is no JSON")
    config.write_text(json.dumps(write_config(DENSE, dtype="float32") | {"hidden_act": "gelu"}))
    refused(r"config\.json: this model cannot be built here:\n  - hidden_act")
    config.write_text(json.dumps(write_config(DENSE, dtype="float32")))
    refused(r"has no model\.safetensors and no model\.safetensors\.index\.json\. A Hugging")
    (tmp_path / "pytorch_model.bin").touch()
    refused(r"It has pytorch_model\.bin, which are pickles")
    for wrong in ({}, {"weight_map": []}, {"weight_map": {"a": 3}}, {"weight_map": {"a": "../b"}}):
        index.write_text(json.dumps(wrong))
        refused(r"index\.json has no weight_map from tensors to files of the folder")
    index.write_text(json.dumps({"weight_map": {"a": "b.safetensors"}}))
    refused(r"b\.safetensors cannot be read: No such file")
    safetensors.numpy.save_file({"c": np.zeros(1)}, tmp_path / "b.safetensors")
    refused("a should be in b.safetensors and is not\n  - c is in b.safetensors, of which the index says nothing")
    index.unlink()
    (tmp_path / "model.safetensors").write_bytes(b"version https://git-lfs.github.com/spec/v1\n")
    refused(r"model\.safetensors is no whole safetensors file")


def test_pub2_hf_01_two_complete_sets_of_weights_are_refused_and_both_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """PUB2-HF-01: a stale file of zeros beside the shards with their index."""
    weights = as_released(random_weights(DENSE))
    put(tmp_path, DENSE, weights, files=2)
    stale = {name: np.zeros_like(value) for name, value in weights.items()}
    safetensors.numpy.save_file(stale, tmp_path / "model.safetensors", {"format": "pt"})
    assert main(["checkpoint", "import-hf", str(tmp_path), str(tmp_path / "checkpoint")]) == 2
    said = capsys.readouterr().err
    assert "two sets of weights: model.safetensors, and model.safetensors.index.json with 0.safetensors, 1." in said
    assert "transformers reads model.safetensors" in said
    assert not (tmp_path / "checkpoint").exists()


@pytest.mark.parametrize("index", ['{"weight_map": {"a": "gone.safetensors"}}', "{", '{"weight_map": {}}'])
def test_an_index_whose_files_are_not_there_is_said_beside_the_file_that_is_read(tmp_path: Path, index: str) -> None:
    put(tmp_path, DENSE, random_weights(DENSE))
    (tmp_path / "model.safetensors.index.json").write_text(index)
    with HuggingFaceFolder.open(tmp_path) as folder:
        (note,) = folder.config.notes
    assert note == (
        "model.safetensors is read. The folder has more weights, which are not read: model.safetensors.index.json."
    )


@pytest.mark.parametrize("files", [1, 2])
def test_files_of_weights_that_are_not_read_are_said(tmp_path: Path, files: int) -> None:
    """As folders have them beside: another format's copy, shards of an older save, pickles."""
    weights = as_released(random_weights(DENSE))
    put(tmp_path, DENSE, weights, files=files)
    others = ["consolidated.safetensors", "model-00001-of-00009.safetensors", "pytorch_model-1-of-2.bin"]
    for name in (*others, "training_args.bin", "tokenizer.json"):
        (tmp_path / name).write_bytes(b"?")
    with HuggingFaceFolder.open(tmp_path) as folder:
        assert np.array_equal(folder.read("model.norm.weight"), weights["model.norm.weight"])
        (note,) = folder.config.notes
    read = "model.safetensors is" if files == 1 else "model.safetensors.index.json and the files that it names (2) are"
    assert note == f"{read} read. The folder has more weights, which are not read: {', '.join(others)}."


@pytest.mark.parametrize("name", MODELS)
def test_a_checkpoint_made_of_a_folder_gives_the_folder_back(
    tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    weights = random_weights(MODELS[name])
    put(tmp_path, MODELS[name], as_released(weights), files=3, max_position_embeddings=77)
    assert main(["checkpoint", "import-hf", str(tmp_path), str(tmp_path / "checkpoint")]) == 0
    file = parallel_config.loads(capsys.readouterr().out)
    assert model_config(file.model) == MODELS[name]
    assert (file.checkpoint.load_path, file.checkpoint.no_load_optim) == (str(tmp_path / "checkpoint"), True)
    checkpoint = Checkpoint.open(tmp_path / "checkpoint")
    assert {name: tensor.shape for name, tensor in checkpoint.weights.items()} == {
        name: value.shape for name, value in weights.items()
    }
    assert not checkpoint.has_optimizer
    assert main(["checkpoint", "verify", str(tmp_path / "checkpoint")]) == 0
    assert main(["checkpoint", "export-hf", str(tmp_path / "checkpoint"), str(tmp_path / "again")]) == 0
    found, expected = get(tmp_path / "again"), as_released(weights)
    assert found.keys() == expected.keys()
    assert all(np.array_equal(found[tensor], value) for tensor, value in expected.items())
    with HuggingFaceFolder.open(tmp_path / "again") as folder:
        assert folder.config.model == MODELS[name]
        assert folder.config.others["max_position_embeddings"] == 77


def test_memory_holds_blocks_and_no_weight(tmp_path: Path) -> None:
    large = evolve(DENSE, vocab_size=500_000, tie_word_embeddings=True)  # a table of 16 MB
    put(tmp_path, large, random_weights(large))
    with HuggingFaceFolder.open(tmp_path) as folder:
        tracemalloc.start()
        checkpoint = import_folder(folder, tmp_path / "checkpoint")
        _, imported = tracemalloc.get_traced_memory()
        tracemalloc.reset_peak()
        values = ((name, pieces_of(folder, name)) for name in folder.weights)
        write_folder(tmp_path / "again", large, values, dtype="bfloat16")
        _, written = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert checkpoint.weights["model.embed_tokens.weight"].size == 4_000_000
    assert max(imported, written) < 6 << 20


def pieces_of(folder: HuggingFaceFolder, name: str) -> Iterator[np.ndarray]:
    size = folder.weights[name].size
    return (folder.read(name, first, min(first + 100_000, size)) for first in range(0, size, 100_000))


def test_import_and_export_say_what_is_wrong(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    without = evolve(DEEPSEEK, num_nextn_predict_layers=0)
    put(tmp_path, without, as_released(random_weights(without)), num_nextn_predict_layers=1)
    folder, checkpoint = str(tmp_path), str(tmp_path / "checkpoint")
    assert main(["checkpoint", "import-hf", folder, checkpoint]) == 0
    assert "Note: config.json announces a layer that predicts one token further" in capsys.readouterr().err
    assert main(["checkpoint", "import-hf", folder, checkpoint]) == 2
    assert f"{checkpoint} exists" in capsys.readouterr().err
    assert main(["checkpoint", "export-hf", checkpoint, folder]) == 2
    assert f"{folder} exists and is not an empty folder" in capsys.readouterr().err
    assert main(["checkpoint", "export-hf", folder, checkpoint]) == 2
    assert f"{folder} " in capsys.readouterr().err
    [file] = (tmp_path / "checkpoint").glob("*.safetensors")
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    assert main(["checkpoint", "export-hf", checkpoint, str(tmp_path / "again")]) == 2
    assert "is damaged" in capsys.readouterr().err
    assert not (tmp_path / "again").exists()
