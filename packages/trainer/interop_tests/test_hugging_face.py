"""Qwen3 here and in Hugging Face `transformers`: same weights in, same logits, loss and gradients out."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import transformers.models.qwen3.modeling_qwen3 as peer
from parallel_trainer.batch import MicroBatch
from parallel_trainer.kernels import kernels
from parallel_trainer.models.config import Qwen3Config
from parallel_trainer.models.qwen3 import Qwen3
from parallel_trainer.models.single import logits, loss_and_gradients
from transformers import Qwen3Config as PeerConfig

ROWS, TOKENS, VOCABULARY = 2, 150, 61

SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 8,
}
VARIANTS = {
    "untied": {},
    "tied": {"tie_word_embeddings": True},
    "two heads share keys": {"num_key_value_heads": 2},
    "four heads share keys": {"num_key_value_heads": 1},
    "wide heads": {"head_dim": 20, "num_key_value_heads": 2},
    "attention bias": {"attention_bias": True},
    "long rotary": {"rope_theta": 1e6, "rms_norm_eps": 1e-5},
    "all at once": {
        "num_key_value_heads": 2,
        "head_dim": 12,
        "attention_bias": True,
        "rope_theta": 1e6,
        "tie_word_embeddings": True,
    },
}
# Logits and gradients: relative to the largest element of the array.
TOLERANCE = {"float32": 1e-4, "float64": 1e-9}


@pytest.fixture
def float64_peer(monkeypatch):
    """The peer computes norms and rotary angles in float32 whatever the model's type; here they are float64."""

    def norm(self, x):
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon))

    def rotary(self, x, position_ids):
        half = x.new_tensor(range(self.config.head_dim // 2))
        frequencies = self.config.rope_parameters["rope_theta"] ** (-half / len(half))
        angles = (position_ids[:, :, None] * frequencies).repeat(1, 1, 2)
        return angles.cos(), angles.sin()

    monkeypatch.setattr(peer.Qwen3RMSNorm, "forward", norm)
    monkeypatch.setattr(peer.Qwen3RotaryEmbedding, "forward", rotary)


def peer_model(config, dtype):
    """A Hugging Face model with random weights, large enough for every part to matter."""
    rope = {"rope_type": "default", "rope_theta": config.rope_theta}
    fields = {name: getattr(config, name) for name in (*SIZES, "attention_bias", "tie_word_embeddings")}
    model = peer.Qwen3ForCausalLM(
        PeerConfig(**fields, rope_parameters=rope, rms_norm_eps=config.rms_norm_eps, attn_implementation="sdpa")
    )
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for weight in model.parameters():
            weight += 0.2 * torch.randn(weight.shape, generator=generator)
    return model.to(getattr(torch, dtype))


def assert_close(ours, theirs, dtype, name):
    scale = np.abs(theirs).max()
    assert scale > 0, name
    difference = np.abs(ours - theirs).max() / scale
    assert difference < TOLERANCE[dtype], f"{name}: {difference:.1e}"


def compare(variant, dtype):
    config = Qwen3Config(**{**SIZES, **VARIANTS[variant]})
    theirs = peer_model(config, dtype)
    ours = Qwen3(config, kernels("cpu"))
    weights = {name: weight.detach().numpy() for name, weight in theirs.named_parameters()}
    assert weights.keys() == {weight.name for weight in ours.weights}

    generator = np.random.default_rng(5)
    ids, labels = generator.integers(0, VOCABULARY, (2, ROWS, TOKENS), dtype=np.int32)
    labels[generator.random(labels.shape) < 0.3] = -100
    positions = np.tile(np.arange(TOKENS, dtype=np.int32), (ROWS, 1))

    their_logits = theirs(torch.from_numpy(ids).long()).logits
    their_loss = torch.nn.functional.cross_entropy(
        their_logits.flatten(0, 1), torch.from_numpy(labels).long().flatten(), reduction="sum"
    )
    their_loss.backward()
    loss, gradients = loss_and_gradients(ours, weights, MicroBatch(ids, positions, labels))

    assert_close(logits(ours, weights, ids), their_logits.detach().numpy(), dtype, "logits")
    assert_close(np.array(loss), their_loss.detach().numpy(), dtype, "loss")
    for name, weight in theirs.named_parameters():
        assert_close(gradients[name], weight.grad.numpy(), dtype, name)


@pytest.mark.parametrize("variant", VARIANTS)
def test_float32(variant):
    compare(variant, "float32")


@pytest.mark.usefixtures("float64_peer")
@pytest.mark.parametrize("variant", VARIANTS)
def test_float64(variant):
    compare(variant, "float64")
