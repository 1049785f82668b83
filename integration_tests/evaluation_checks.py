"""Evaluation on several ranks: what held-out samples lose under a plan, and what training keeps of it, nothing."""

from __future__ import annotations

from typing import Any

import numpy as np
from cases import EOD, PAD, SEQ_LENGTH, Case, Model, corpora
from device_mesh import Communicator
from parallel_config import loads
from parallel_trainer.job import prepare
from parallel_trainer.parallel.fully_shard import ShardedWeights
from parallel_trainer.trainer import Trainer

SAMPLES = 11
"""No multiple of the samples that a plan's ranks take in a pass, but for one rank that takes one."""

DENSE = Model(tied=True, layers=4, text="padded", batch=12)
EXPERTS = Model(architecture="deepseek_v3", mtp=1, text="packed", batch=12)
MODELS = {model.name: model for model in (DENSE, EXPERTS)}

PLANS: dict[int, tuple[Case, ...]] = {
    1: tuple(Case(accumulation=12, model=model) for model in MODELS.values()),
    2: (
        Case(dp_shard=2, accumulation=3, model=DENSE),
        Case(tp=2, loss_parallel=True, reshard="never", model=DENSE),
        Case(cp=2, order="zigzag", asynchronous=True, accumulation=2, model=DENSE),
        Case(pp=2, chunks=2, accumulation=4, reduction="mean", model=DENSE),
        Case(pp=2, chunks=2, zero_bubble="zbv", accumulation=3, model=DENSE),
        Case(pp=2, overlap=True, accumulation=2, model=EXPERTS),
        Case(dp_shard=2, ep=2, accumulation=3, model=EXPERTS),
    ),
    4: (
        Case(pp=2, chunks=2, dp_shard=2, accumulation=3, model=DENSE),
        Case(cp=2, tp=2, method="ulysses", accumulation=3, model=DENSE),
        Case(dp_shard=4, ep=4, node=2, reshard="never", model=EXPERTS),
        Case(pp=2, tp=2, ep=2, accumulation=2, model=EXPERTS),
    ),
}

_SECTION = """
eval_dataset:
  interval: 1
  samples: {samples}
  dataloader:
    type: BlendedMegatronDatasetDataLoader
    datasets_type: GPTDataset
    config:
      valid_data_path: ["{corpus}"]
      seq_length: {seq}
      eod: {eod}
      pad: {pad}
      eod_mask_loss: true
      reset_position_ids: true
      create_attention_mask: false
      create_compressed_eod_mask: true
"""


def evaluations(communicator: Communicator) -> dict[str, dict[str, Any]]:
    """By plan: which model it has, and what is found before a step and after it.

    losses:  of the next token and, where the model has it, of the one after that.
    tokens:  how many counted.
    held:    bytes of weights that stayed gathered.
    changed: for the last plan, on how many ranks a step without evaluations before and after it differs in a bit.
    """
    plans, found = PLANS[communicator.size], {}
    for case in plans:
        trainer = _trainer(case, communicator)
        results = [trainer.evaluate()]
        held = _gathered(trainer.weights)
        step = trainer.train_step()
        results.append(trainer.evaluate())
        found[case.name] = {
            "model": case.model.name,
            "losses": [[loss for loss in (result.loss, result.mtp_loss) if loss is not None] for result in results],
            "tokens": [result.valid_tokens for result in results],
            "held": held,
        }
    undisturbed = _trainer(case, communicator)
    same = undisturbed.train_step() == step
    same &= np.array_equal(undisturbed.weights.values, trainer.weights.values)
    same &= _loads(undisturbed) == _loads(trainer)
    found[case.name]["changed"] = int(communicator.all_reduce(np.array([0 if same else 1]))[0])
    return found


def _trainer(case: Case, communicator: Communicator) -> Trainer:
    texts = corpora()
    section = _SECTION.format(
        samples=SAMPLES,
        corpus=texts[case.model.text],
        seq=SEQ_LENGTH,
        eod=EOD,
        pad=PAD if case.model.text == "padded" else -1,
    )
    return Trainer(prepare(loads(case.yaml(texts) + section), communicator.size), communicator)


def _gathered(weights: ShardedWeights) -> int:
    return sum(sharded.tensor.untyped_storage().size() for sharded in weights if not sharded.stays)


def _loads(trainer: Trainer) -> Any:
    return None if trainer.loads is None else trainer.loads.tokens_per_expert.tolist()
