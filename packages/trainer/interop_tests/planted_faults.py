"""Faults that are planted in our side of a run, and what of it differs first from the other trainer's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from attrs import evolve
from parallel_trainer.batch import MicroBatch
from parallel_trainer.kernels import cpu
from parallel_trainer.parallel import expert_parallel
from parallel_trainer.trainer import Trainer


@dataclass(frozen=True)
class Fault:
    """Something wrong in our run alone: what its file says instead, or a patch; and what that shows first.

    first: the step, counted from 0, and the quantity; None for the initial weights.
    """

    case: str
    first: tuple[int, str] | None
    edit: str = "{}"
    patch: Callable[[Any], None] = field(default=lambda monkeypatch: None)


def _warm_up_from_one(monkeypatch: Any) -> None:
    monkeypatch.setattr(Trainer, "lr", property(lambda trainer: trainer.job.schedule(trainer.step + 1)))


def _biases_the_wrong_way(monkeypatch: Any) -> None:
    change = expert_parallel.bias_change
    monkeypatch.setattr(expert_parallel, "bias_change", lambda *args: -change(*args))


def _chosen_experts_are_counted(monkeypatch: Any) -> None:
    """The auxiliary loss counts what bias and groups chose, not the largest affinities."""
    choose, chosen = cpu.choose_experts, []

    def remembered(scores: Any, **options: Any) -> np.ndarray:
        if "bias" in options:
            chosen[:] = [choose(scores, **options)]
        return chosen[0]

    monkeypatch.setattr(cpu, "choose_experts", remembered)


def _micro_batches_weigh_alike(monkeypatch: Any) -> None:
    """The loss is the mean of the micro-batches' means, however many of their tokens count."""
    read = Trainer.micro_batches

    def weighed(trainer: Trainer, consumed: int) -> list[MicroBatch]:
        batches = read(trainer, consumed)
        mean = np.mean([batch.valid_tokens() for batch in batches])
        return [evolve(batch, loss_mask=batch.loss_mask * (mean / batch.valid_tokens())) for batch in batches]

    monkeypatch.setattr(Trainer, "micro_batches", weighed)


def _data(edit: str) -> str:
    return f"train_dataset: {{dataloader: {{config: {{{edit}}}}}}}"


FAULTS = {
    "every matrix starts a tenth smaller": Fault("qwen3", None, "model: {initializer_range: 0.09}"),
    "outputs start with Megatron-LM's rule": Fault("qwen3", None, "extensions: {initial_weights: megatron}"),
    "norms decay": Fault("qwen3", (2, "loss"), "optimizer: {weight_decay_include: [layernorm]}"),
    "biases decay": Fault("qwen3", (3, "loss"), "optimizer: {weight_decay_include: [.bias]}"),
    "the head does not decay": Fault("qwen3", (2, "loss"), "optimizer: {weight_decay_exclude: [lm_head]}"),
    "rules of decay are not read": Fault(
        "qwen3 with rules of decay", (2, "loss"), "optimizer: {weight_decay_include: null, weight_decay_exclude: null}"
    ),
    "warm-up is one step longer": Fault("qwen3", (1, "lr"), "lr_scheduler: {warmup_steps: 5}"),
    "warm-up counts from 1": Fault("qwen3", (0, "lr"), patch=_warm_up_from_one),
    "the cosine ends at 0": Fault("qwen3 packed, tied", (5, "lr"), "lr_scheduler: {lr_end: 0.0}"),
    "nothing is clipped": Fault("qwen3", (2, "loss"), "training: {max_norm: 0.0}"),
    "beta2": Fault("qwen3", (2, "loss"), "optimizer: {betas: [0.9, 0.99]}"),
    "eps": Fault("qwen3", (2, "loss"), "optimizer: {eps: 1.0e-8}"),
    "micro-batches weigh alike": Fault("qwen3 packed, tied", (0, "loss"), patch=_micro_batches_weigh_alike),
    "ends of documents count": Fault("qwen3 packed, tied", (0, "loss"), _data("eod_mask_loss: false")),
    "documents see each other": Fault("qwen3_moe packed", (0, "loss"), _data("create_compressed_eod_mask: false")),
    "the auxiliary loss counts less": Fault("qwen3_moe", (0, "balance loss"), "model: {moe_aux_loss_coeff: 0.04}"),
    "sequences are balanced together": Fault(
        "qwen3_moe", (0, "balance loss"), "model: {moe_router_load_balancing_type: aux_loss}"
    ),
    "chosen experts are counted": Fault("deepseek_v3", (0, "balance loss"), patch=_chosen_experts_are_counted),
    "biases move the wrong way": Fault("deepseek_v3", (1, "loss"), patch=_biases_the_wrong_way),
    "biases do not move": Fault("deepseek_v3", (1, "loss"), "model: {moe_router_bias_update_rate: 0.0}"),
    "the further prediction counts less": Fault(
        "deepseek_v3 further", (0, "grad norm"), "model: {mtp_loss_scaling_factor: 0.1}"
    ),
}
"""The first step applies a learning rate of 0: the second is the first that moves weights, the third that feels it."""
