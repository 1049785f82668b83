"""A configuration checked and made ready to run, before any rank starts, and without MindSpore where that can be."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, TypeVar

import numpy as np
from attrs import asdict, evolve, frozen
from parallel_config import ParallelPlan, TrainConfig, fields_without_effect, plan, written_fields

from parallel_trainer.data.gpt_dataset import Dataset
from parallel_trainer.data.held_out import HeldOut
from parallel_trainer.data.loader import BatchLoader, build_dataset
from parallel_trainer.errors import MissingCorpus, UserError
from parallel_trainer.kernels import kernels
from parallel_trainer.models import build_model
from parallel_trainer.models.config import model_config
from parallel_trainer.models.section import ModelConfig
from parallel_trainer.optim.decay import decay_notes
from parallel_trainer.optim.schedules import Schedule, build_schedule
from parallel_trainer.precision import MixedPrecision, ascend_precision, compute_dtype
from parallel_trainer.report.experts import watched_layers
from parallel_trainer.support import refusals

T = TypeVar("T")

Device = Literal["cpu", "ascend"]

_NEEDED_SECTIONS = ("model", "lr_scheduler", "train_dataset")


@frozen(eq=False)
class Job:
    """What every rank of a run agrees on.

    config:   the file.
    plan:     what it means for this world size.
    model:    sizes of the model.
    device:   what ranks compute on.
    precision: types of weights, activations and gradients.
    schedule: learning rate by step.
    dataset:  samples by number; only its index is in memory.
    watched:  names of the layers whose loads of experts are written down.
    notes:    sentences that the user should see once.
    held_out: samples whose loss is measured while training, None for a file without `eval_dataset`.
    """

    config: TrainConfig
    plan: ParallelPlan
    model: ModelConfig
    device: Device
    precision: MixedPrecision
    schedule: Schedule
    dataset: Dataset
    watched: tuple[str, ...]
    notes: tuple[str, ...]
    held_out: HeldOut | None = None

    @property
    def dtype(self) -> np.dtype:
        """float32 or float64, in which weights are kept and gradients added up."""
        return np.dtype(self.precision.reduce_dtype)

    @property
    def seq_length(self) -> int:
        """Tokens of a sample."""
        length = self.config.train_dataset.dataloader.config.seq_length
        assert length is not None, "build_dataset refuses a dataset without it"
        return length

    @property
    def summary(self) -> str:
        """How the ranks share the model and a step's samples, in a line for a person, and an evaluation in one more."""
        line = (
            f"ranks: {self.plan.world_size} = {degrees(self.plan)}; a step: {self.plan.global_batch_size} samples of "
            f"{self.seq_length} tokens, micro-batches of a rank: {self.plan.num_accumulation_steps}"
        )
        return line if self.held_out is None else f"{line}\n{self._evaluation(self.held_out)}"

    def _evaluation(self, held_out: HeldOut) -> str:
        passes = held_out.passes(self.plan.local_batch_size, self.plan.data_parallel)
        interval = self.config.eval_dataset.interval
        return (
            f"evaluation: after every {interval} steps and the last, {held_out.size} samples of "
            f"{self.seq_length} tokens, {held_out.size * self.seq_length:,} in all; micro-batches of a rank: {passes}"
        )

    def evaluates_after(self, step: int) -> bool:
        """Whether an evaluation follows step `step`, counted from 1."""
        interval = self.config.eval_dataset.interval
        if self.held_out is None or interval is None:
            return False
        return step % interval == 0 or step == self.config.training.steps

    def loader(self, shard_index: int) -> BatchLoader:
        """The micro-batches of one data-parallel shard."""
        dataloader = self.config.train_dataset.dataloader
        return BatchLoader(
            self.dataset,
            global_batch_size=self.plan.global_batch_size,
            local_batch_size=self.plan.local_batch_size,
            data_parallel=self.plan.data_parallel,
            shard_index=shard_index,
            shuffle_seed=dataloader.config.seed if dataloader.shuffle else None,
            neighbours=self.model.balanced_over == "micro_batch",
        )


def degrees(plan: ParallelPlan) -> str:
    """The degrees of a plan, and how context parallelism is done where there is any."""
    parts = [f"dp_replicate {plan.dp_replicate}", f"dp_shard {plan.dp_shard}"]
    if plan.cp > 1:
        method = plan.context_parallel_method
        how = [f"{method} of {plan.ulysses_degree}" if method == "hybrid" else method, plan.context_parallel_order]
        how += ["asynchronous"] if plan.context_parallel_async else []
        parts.append(f"cp {plan.cp} ({', '.join(how)})")
    if plan.tp > 1:
        parts.append(f"tp {plan.tp}")
    if plan.ep > 1:
        parts.append(f"ep {plan.ep} (efsdp {plan.efsdp})")
    if plan.pp > 1:
        how = [f"{plan.interleave_num} chunks a rank"] if plan.interleave_num > 1 else []
        how += [plan.zero_bubble] if plan.zero_bubble != "none" else []
        how += [plan.schedule] if plan.schedule == "gpipe" else []
        parts.insert(0, f"pp {plan.pp} ({', '.join(how)})" if how else f"pp {plan.pp}")
    return " x ".join(parts)


def prepare(
    config: TrainConfig,
    world_size: int,
    *,
    dtype: str | None = None,
    device: Device = "cpu",
    engine: str = "native",
) -> Job:
    """Infer the plan and open the data; everything that can be wrong before training starts is found here.

    dtype:  "float32" or "float64" to compute in that type whatever the file says.
    device: what ranks compute on. Nothing has run on "ascend" yet.
    engine: what trains, native or hyperparallel.
    Raises ConfigError for a configuration that breaks a rule, one UserError with all that this version cannot run or
    read.
    """
    parallel_plan = plan(config, world_size)
    missing = [name for name in _NEEDED_SECTIONS if name not in written_fields(config)]
    if missing:
        raise UserError(f"The file has no {', no '.join(missing)}: training needs these sections, planning does not.")
    found = [str(problem) for problem in refusals(config)]

    def attempt(build: Callable[[], T]) -> T | None:
        try:
            return build()
        except UserError as error:
            found.extend(error.problems)
            return None

    model = attempt(lambda: model_config(config.model))
    watched = attempt(lambda: watched_layers(config.monitor.moe_monitor, model.expert_layers) if model else ())
    computing = attempt(lambda: _precision(config, dtype, device))
    schedule = attempt(lambda: schedule_of(config))
    dataset = attempt(lambda: _dataset(config, model.vocab_size if model else 2**31))
    held_out = None
    if dataset or "eval_dataset.dataloader" in written_fields(config):  # a fault of a shared one has been said
        held_out = attempt(lambda: HeldOut.of(config, vocab_size=model.vocab_size if model else 2**31))
    decay = attempt(lambda: decay_rules(config, model, device)) if model else ()
    if engine == "hyperparallel" and model and computing:
        from parallel_trainer.engines.hyperparallel.program import check_run, run_notes  # loads MindSpore

        attempt(lambda: check_run(in_one_type(config, computing[0]), world_size))
    if found or not (model and computing and schedule and dataset):
        raise UserError("parallel-train cannot run this file:", list(dict.fromkeys(found)))
    chosen, note = computing
    notes = [*([] if note is None else [note]), *(decay or ())]
    ignored = fields_without_effect(config, engine)
    if ignored:
        notes.append(f"The file sets fields that have no effect with engine {engine}: {', '.join(ignored)}.")
    if engine == "hyperparallel":
        notes += run_notes(config, parallel_plan)
    return Job(config, parallel_plan, model, device, chosen, schedule, dataset, watched or (), tuple(notes), held_out)


def _dataset(config: TrainConfig, vocab_size: int) -> Dataset:
    """The training data. Where its corpus has not been built, the error has the commands that the file begins with."""
    try:
        return build_dataset(config.train_dataset, vocab_size=vocab_size)
    except MissingCorpus as error:
        lines = (line.lstrip("# ").rstrip() for line in config.source.text.splitlines() if line.startswith("#"))
        commands = [line for line in lines if line.startswith(("parallel-train data build ", "python "))]
        if not any(line.startswith("parallel-train data build ") for line in commands):
            raise
        raise UserError(
            f"{error}. This file says how, to be run in the same directory: {'; '.join(commands)}"
        ) from None


def in_one_type(config: TrainConfig, precision: MixedPrecision) -> TrainConfig:
    """The file with the type that is computed in, which may not be the one that it names."""
    return evolve(config, model=evolve(config.model, compute_dtype=precision.param_dtype))


def _precision(config: TrainConfig, dtype: str | None, device: Device) -> tuple[MixedPrecision, str | None]:
    if device == "ascend":
        return ascend_precision(config)
    found, note = (np.dtype(dtype), None) if dtype else compute_dtype(config)
    return MixedPrecision(found.name, found.name), note


def decay_rules(config: TrainConfig, model: ModelConfig, device: Device) -> tuple[str, ...]:
    """Notes on what the file's rules of weight decay match; raises UserError where one matches no weight."""
    section = config.optimizer
    if not (section.weight_decay_include or section.weight_decay_exclude):
        return ()
    # Names of weights are the model's, which needs MindSpore: imported for these files alone.
    return decay_notes(build_model(model, kernels(device)).weights, config)


def schedule_of(config: TrainConfig) -> Schedule:
    """The learning rate by step that a file asks for. Raises UserError for a section that is none."""
    options = asdict(config.lr_scheduler, recurse=False)
    options |= options.pop("extra")
    return build_schedule(
        options.pop("type"),
        options.pop("learning_rate"),
        total_steps=config.training.steps,
        options={name: value for name, value in options.items() if value is not None},
    )
