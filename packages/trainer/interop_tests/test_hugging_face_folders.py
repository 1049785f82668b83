"""Folders that transformers loads and saves: the same logits on both sides, the same numbers in BF16."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from parallel_trainer.checkpoint.hugging_face import HuggingFaceFolder, declared, write_folder
from parallel_trainer.models.single import logits
from peers import CASES, FURTHER, micro_batch, our_model, our_name, peer_model, values
from transformers import AutoModelForCausalLM
from transformers.modeling_layers import MtpModel

# The largest logits are about 5.
TOLERANCE = 2e-5
# A file has no model whose layers are all dense and that says that it has experts.
BUILT = {name: config for name, config in CASES.items() if name != "deepseek_v3 all dense"}


def random_weights(config):
    """Large enough for every part to matter."""
    generator = np.random.default_rng(7)
    return {
        name: ((weight.shape[1:] == ()) + 0.2 * generator.standard_normal(weight.shape)).astype(np.float32)
        for name, weight in declared(config).items()
    }


def written(folder, config, weights, **options):
    """A folder with these weights, each in two pieces."""
    pieces = ((name, np.array_split(value.reshape(-1), 2)) for name, value in weights.items())
    write_folder(folder, config, pieces, **options)
    return folder


def read(folder):
    """What is in a folder: the model's sizes and weights."""
    with HuggingFaceFolder.open(folder) as found:
        weights = {name: found.read(name).reshape(weight.shape) for name, weight in found.weights.items()}
        return found.config.model, weights


def loaded(folder, **options):
    """The model that transformers makes of a folder, and the names that it did not find or did not expect."""
    model, report = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True, **options)
    return model, {name for kind in report.values() for name in kind}


def their_logits(model, ids):
    return model(torch.from_numpy(ids).long()).logits.detach().float().numpy()


@pytest.mark.parametrize("case", BUILT)
def test_what_is_written_is_loaded_by_transformers(tmp_path, case):
    config, ids = BUILT[case], micro_batch().input_ids
    weights = random_weights(config)
    theirs, differing = loaded(written(tmp_path / "folder", config, weights, max_shard_bytes=20_000))
    assert not differing
    assert np.abs(their_logits(theirs, ids) - logits(our_model(config), weights, ids)).max() < TOLERANCE


@pytest.mark.parametrize("case", BUILT)
def test_what_transformers_saves_is_read(tmp_path, case):
    theirs, ids = peer_model(BUILT[case]), micro_batch().input_ids
    theirs.save_pretrained(tmp_path, max_shard_size="20KB")
    config, weights = read(tmp_path)
    assert config == BUILT[case]
    assert np.abs(their_logits(theirs, ids) - logits(our_model(config), weights, ids)).max() < TOLERANCE


@pytest.mark.parametrize("case", ["qwen3 all at once", "qwen3_moe", "deepseek_v3"])
def test_bfloat16_is_rounded_as_by_torch_both_ways(tmp_path, case):
    weights = random_weights(CASES[case])
    theirs, differing = loaded(written(tmp_path / "ours", CASES[case], weights, dtype="bfloat16"))
    assert not differing
    assert theirs.dtype == torch.bfloat16
    rounded = {name: torch.from_numpy(value).bfloat16().float().numpy() for name, value in weights.items()}
    not_rounded = {name for name in weights if "correction_bias" in name}
    rounded |= {name: weights[name] for name in not_rounded}
    found = values(theirs.float())
    assert found.keys() == weights.keys()
    assert all(np.array_equal(found[name], value) for name, value in rounded.items())
    loaded(tmp_path / "ours")[0].save_pretrained(tmp_path / "theirs")
    _, again = read(tmp_path / "theirs")
    assert all(np.array_equal(again[name], value) for name, value in rounded.items())


@pytest.mark.parametrize("case", FURTHER)
def test_a_further_prediction_is_loaded_by_transformers(tmp_path, case, monkeypatch):
    config = FURTHER[case]
    weights = random_weights(config)
    theirs, differing = loaded(written(tmp_path / "folder", config, weights, max_shard_bytes=20_000))
    layer = f"model.layers.{config.num_hidden_layers}."
    assert differing
    assert all(name.startswith(layer) for name in differing)
    # transformers looks for the layer of the published model.
    monkeypatch.setattr(theirs, "_keys_to_ignore_on_load_unexpected", [rf"model\.layers\.{config.num_hidden_layers}.*"])
    found = values(MtpModel.from_pretrained(theirs))
    own = {our_name(name, config.num_hidden_layers): value for name, value in found.items() if "layers.0." in name}
    assert own.keys() == {name for name in weights if name.startswith(layer)}
    assert all(np.array_equal(weights[name], value) for name, value in own.items())
