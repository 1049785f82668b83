"""Models here and in Hugging Face `transformers`: same weights in, same logits, losses and gradients out."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from parallel_trainer.batch import look_ahead
from parallel_trainer.models.single import logits, loss_and_gradients, losses
from peers import CASES, FURTHER, TOKENS, micro_batch, our_model, our_name, peer_model, randomized, values
from transformers.modeling_layers import MtpModel

# Logits and gradients: relative to the largest element of the array.
TOLERANCE = {"float32": 2e-4, "float64": 1e-9}


@pytest.fixture(params=["float32", "float64"])
def dtype(request, monkeypatch):
    """The peer computes norms, routers and angles in float32 whatever the model's type; for float64 that is float64."""
    if request.param == "float64":
        monkeypatch.setattr(torch, "float32", torch.float64)
        monkeypatch.setattr(torch, "float", torch.float64)
    return request.param


def loss_of(found, labels, mask=None):
    each = torch.nn.functional.cross_entropy(
        found.flatten(0, 1), torch.from_numpy(labels).long().flatten(), reduction="none"
    )
    return (each if mask is None else each * torch.from_numpy(mask).flatten()).sum()


def assert_close(ours, theirs, dtype, name):
    scale = np.abs(theirs).max()
    assert scale > 0, name
    difference = np.abs(ours - theirs).max() / scale
    assert difference < TOLERANCE[dtype], f"{name}: {difference:.1e}"


@pytest.mark.parametrize("case", CASES)
def test_logits_loss_and_gradients(case, dtype):
    theirs, ours, batch = peer_model(CASES[case], dtype), our_model(CASES[case]), micro_batch()
    weights = values(theirs)
    assert {name: value.shape for name, value in weights.items()} == {
        weight.name: weight.shape for weight in ours.weights
    }
    their_logits = theirs(torch.from_numpy(batch.input_ids).long()).logits
    their_loss = loss_of(their_logits, batch.labels)
    their_loss.backward()
    loss, gradients = loss_and_gradients(ours, weights, batch)

    assert_close(logits(ours, weights, batch.input_ids), their_logits.detach().numpy(), dtype, "logits")
    assert_close(np.array(loss), their_loss.detach().numpy(), dtype, "loss")
    assert gradients.keys() == dict(theirs.named_parameters()).keys()
    for name, weight in theirs.named_parameters():
        assert_close(gradients[name], weight.grad.numpy(), dtype, name)


@pytest.mark.parametrize("case", FURTHER)
def test_prediction_of_one_token_further(case, dtype):
    config = FURTHER[case]
    main, ours, batch = peer_model(config, dtype), our_model(config), look_ahead(micro_batch())
    module = randomized(MtpModel(main, 1), 6).to(getattr(torch, dtype))
    own = {our_name(name, config.num_hidden_layers): name for name in values(module) if name.startswith("layers.0.")}
    weights = values(main) | {ours: values(module)[theirs] for ours, theirs in own.items()}
    assert weights.keys() == {weight.name for weight in ours.weights}

    ids, ahead = (torch.from_numpy(found.input_ids).long() for found in (batch, batch.ahead))
    hidden = main.model(ids).last_hidden_state
    angles = main.model.rotary_emb(hidden, torch.arange(TOKENS)[None])
    mask = torch.full((TOKENS, TOKENS), -torch.inf, dtype=hidden.dtype).triu(1)[None, None]
    further = module.layers[0](main.model.embed_tokens(ahead), hidden, angles, mask, None, None)
    theirs = [
        loss_of(main.lm_head(hidden), batch.labels),
        loss_of(main.lm_head(further), batch.ahead.labels, batch.ahead.loss_mask),
    ]
    (theirs[0] + 0.3 * theirs[1]).backward()

    assert_close(losses(ours, weights, batch), np.array([loss.item() for loss in theirs]), dtype, "losses")
    assert_close(logits(ours, weights, batch.input_ids), main.lm_head(hidden).detach().numpy(), dtype, "logits")
    _, gradients = loss_and_gradients(ours, weights, batch, loss_weights=(1, 0.3))
    expected = dict(main.named_parameters()) | {
        ours: module.get_parameter(theirs) for ours, theirs in own.items() if "correction_bias" not in theirs
    }
    assert gradients.keys() == expected.keys()
    for name, weight in expected.items():
        assert_close(gradients[name], weight.grad.numpy(), dtype, name)
