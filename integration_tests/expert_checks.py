"""What ranks that share experts do where training goes wrong."""

from __future__ import annotations

from typing import Any

import numpy as np
from attrs import evolve
from cases import Case, Model, corpora
from device_mesh import Communicator
from parallel_config import loads
from parallel_trainer.job import prepare
from parallel_trainer.trainer import Trainer

_GATE = "model.layers.1.mlp.gate.weight"


def router_that_is_not_finite(communicator: Communicator) -> dict[str, Any]:
    """A step whose routers see nan in one element of one rank's shard, skipped, and the same trainer mended."""
    model = Model(architecture="deepseek_v3", experts=8, top_k=2, mtp=1)
    case = Case(dp_shard=communicator.size, ep=communicator.size, node=communicator.size, model=model)
    config = loads(case.yaml(corpora()))
    config = evolve(config, training=evolve(config.training, use_skip_step_on_nan=True))
    trainer = Trainer(prepare(config, communicator.size), communicator)
    weights, biases = trainer.weights, np.concatenate([bias.values for bias in trainer.biases.values()])
    gate = weights[_GATE].values
    kept = gate.copy()
    if communicator.rank == 0:
        gate[0] = np.nan
    before = weights.values.copy()
    skipped = trainer.train_step()
    unchanged = np.array_equal(weights.values, before, equal_nan=True)
    assert trainer.loads is not None
    choices = trainer.loads.tokens_per_expert.sum(axis=1).tolist()
    gate[...] = kept
    mended = trainer.train_step()
    moved = np.concatenate([bias.values for bias in trainer.biases.values()]) - biases
    return {
        "updated": [skipped.updated, mended.updated],
        "ranks that changed": int(communicator.all_reduce(np.array([0 if unchanged else 1]))[0]),
        "choices": choices,
        "largest move of a bias": float(communicator.all_reduce(np.array([np.abs(moved).max()]), "max")[0]),
    }
